"""Assignment of class folders to classes of a head: it is right, or the error is one line."""

import json
import unicodedata
from pathlib import Path

import pytest

from sparsebench.errors import UserError
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.sources.files import check_unchanged
from sparsebench.tasks.sources.labels import imagenet_classes as classes
from sparsebench.tasks.sources.labels import number, read_file

WORDNET = classes()


ECLAIR, ECOLE = unicodedata.normalize("NFC", "éclair"), unicodedata.normalize("NFD", "école")
OWN = sorted(["tench", *(f"own-{k:03}" for k in range(999))])

NUMBERED = {
    "numbers, not sorted as texts": (sorted(map(str, range(12))), "auto", 12, "numbers", None),
    "numbers with zeros": (["00", "1", "02"], "auto", None, "numbers", [0, 1, 2]),
    "some numbers of a larger head": (["17", "3", "940"], "auto", 1000, "numbers", [17, 3, 940]),
    "numbers from 1, as asked for": (["1", "2", "3"], "numbers", 4, "numbers", [1, 2, 3]),
    "numbers without a head": (["2", "5"], "numbers", None, "numbers", [2, 5]),
    "names with one usual order": (["ant", "bee", "zebra"], "auto", 3, "names", [0, 1, 2]),
    "ids of another head": (sorted(WORDNET[k] for k in (5, 900, 33)), "auto", 3, "names", [0, 1, 2]),
    "ids": ([WORDNET[5], WORDNET[900]], "auto", 1000, "imagenet", [5, 900]),
    "names of ImageNet": ([WORDNET[134], "goldfish", "tench", "tiger shark"], "auto", 1000, "imagenet", [134, 1, 0, 3]),
    "a thousand own names, one of ImageNet": (OWN, "auto", 1000, "names", list(range(1000))),
}


@pytest.mark.parametrize("what", NUMBERED)
def test_a_class_folder_is_the_class_that_its_name_says(what: str) -> None:
    folders, labels, head, rule, numbers = NUMBERED[what]
    result = number(folders, labels, head)
    assert result.labels == rule and list(result.numbers) == (numbers or list(map(int, folders)))
    assert len(result.classes) == (head or max(result.numbers) + 1)
    named = [result.classes[k] for k in result.numbers]
    assert named == (folders if rule != "imagenet" else [WORDNET[k] for k in result.numbers])


REFUSED = {
    "from 1": ([*map(str, range(1, 11))], "auto", 10, "to 10, .*counted from 0; allowed: 0 to 9; [^=]*labels=names"),
    "perhaps from 1": (
        [*map(str, range(1, 11))],
        "auto",
        1000,
        "to 10, .*from 0; [^=]*labels=numbers[^=]*:cl",
    ),
    "a gap": (["0", "1", "3"], "auto", 3, "0 to 3, and there are 3 classes; allowed: 0 to 2; [^=]*labels=names"),
    "too large": (["2", "5", "9"], "numbers", 9, "2 to 9, and there are 9 classes; allowed: 0 to 8; [^=]*classes=FILE"),
    "an unknown head": (["2", "5", "9"], "auto", None, "2 to 9, .*allowed: 0 to 2; .*labels=numbers.*labels=names"),
    "one class twice": (["0", "1", "01"], "auto", 3, "the same class; got 1, 01"),
    "no number": (
        ["0", "1", "a"],
        "numbers",
        3,
        "1 of 3 .* match no class, .*are numbers.*; got 'a'; allowed: names such as '0', '1'",
    ),
    "too large a head": (["0", "1", "70000"], "auto", 100_000, "head; got 100000 classes"),
    "a name among numbers": ([*map(str, range(10)), "misc"], "auto", 10, "11 class folders, and the head has 10"),
    "a name among ids": (
        [*WORDNET[:11], "misc"],
        "auto",
        1000,
        "1 of 12 .* no class, .*ImageNet-1k.* got 'misc'",
    ),
    "names of two classes": (
        ["crane", "goldfish", "maillot", "tench", "tiger shark"],
        "auto",
        1000,
        "2 of 5 .* got 'crane', 'maillot'",
    ),
    "ImageNet's names for another head": (
        ["goldfish", "tench"],
        "imagenet",
        10,
        "1000 classes, and the head has 10",
    ),
    "own names for ImageNet's head": (["own", "names"], "auto", 1000, "2 class folders, and the head has 1000.*FILE"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_class_folders_that_are_not_the_head_s_are_refused(what: str) -> None:
    folders, labels, head, says = REFUSED[what]
    with pytest.raises(UserError, match=says):
        number(folders, labels, head)


@pytest.mark.parametrize(
    "names",
    [["Bee", "Zebra", "ant"], ["class10", "class2"], [ECLAIR, "zebra"], [ECOLE, "zebra"], [*map(str, range(12)), "x"]],
)
def test_if_the_usual_orders_differ_the_user_must_choose_one(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other way round.*labels=names.*classes=FILE"):
        number(sorted(names), "auto", len(names))
    result = number(sorted(names), "names", len(names))
    assert result.labels == "names" and result.classes == tuple(sorted(names))
    path = tmp_path / "classes.txt"
    path.write_text("\n".join(reversed(names)), encoding="utf-8")
    result = number(names, "auto", len(names), read_file(path))
    assert result.labels == "file" and list(result.numbers) == list(reversed(range(len(names))))


FORMS = {
    "text": ("classes.txt", "disc\nsquare\ncross\nring\n"),
    "text of another system": ("classes.txt", "\ufeffdisc\r\nsquare\r\ncross\r\nring"),
    "list": ("classes.json", json.dumps(["disc", "square", "cross", "ring"])),
    "name to number": ("classes.json", json.dumps({"ring": 3, "disc": 0, "cross": 2, "square": 1})),
    "number to name": ("classes.json", json.dumps({"3": "ring", "0": "disc", "1": "square", "2": "cross"})),
    "number to names": ("c.JSON", json.dumps({"0": ["n0", "disc"], "1": ["n1", "square"], "2": "cross", "3": "ring"})),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_says_which_class_has_which_name(form: str, tmp_path: Path) -> None:
    name, content = FORMS[form]
    path = tmp_path / name
    path.write_bytes(content.encode())
    result = number(["cross", "disc", "ring", "square"], "auto", 4, read_file(path))
    assert result.labels == "file" and result.numbers == (2, 0, 3, 1)
    assert number(["ring", "square"], "auto", 4, read_file(path)).numbers == (
        3,
        1,
    )  # the file has more classes than folders
    (name, place), *_ = Folder(classes=str(path)).locate()[1].items()
    assert name.startswith("classes-") and place == path and read_file(path)


def test_a_file_may_spell_names_in_the_other_unicode_normalisation(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text(unicodedata.normalize("NFC", "zebra\nécole"), encoding="utf-8")
    assert number([unicodedata.normalize("NFD", "école"), "zebra"], "auto", 2, read_file(path)).numbers == (1, 0)


def test_a_name_that_two_classes_have_is_refused_where_a_folder_has_it(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("crane\ntench\ncrane\n")
    assert number(["tench"], "auto", 3, read_file(path)).numbers == (1,)
    with pytest.raises(UserError, match=r"or two; .*; got 'crane'"):
        number(["crane", "tench"], "auto", 3, read_file(path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.txt", b"", "names no class"),
        ("c.txt", b"a\n\nb\n", "class 1 named ''"),
        ("c.txt", b"\xff\xfe\x00", "cannot be read"),
        ("c.json", b"[1, 2]", "cannot be read: .*name per line, or JSON"),
        ("c.json", b'{"a": 0, "b": 0}', "two names have the same number"),
        ("c.json", b'{"a": true, "b": 1}', "cannot be read"),
        ("c.json", b'{"0": "1", "1": "0"}', "cannot be told apart"),  # which are the numbers?
        ("c.json", b'{"a": -1, "b": 1}', "class -1 named 'a'"),
        ("c.json", b"{", "cannot be read"),
        ("c.json", b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_classes_is_one_line(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as raised:
        read_file(tmp_path / name)
    assert len(str(raised.value).splitlines()) == 1


def test_a_missing_or_changed_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    with pytest.raises(UserError, match=r"classes\.txt cannot be read"):
        Folder(classes=str(path)).locate()
    path.write_text("a\nb\n")
    (name,) = Folder(classes=str(path)).locate()[1]
    path.write_text("b\na\n")
    with pytest.raises(UserError, match=r"classes\.txt changed while the run was under way"):
        check_unchanged(path, name)


@pytest.mark.parametrize(
    ("content", "head", "says"),
    [
        ("a\nb\nc\n", 3, "1 of 3 .* no class, .*by the file of classes, which has 3 classes; got 'd'; .* such as 'a',"),
        ("a, b, d", 3, "which has 1 class; got 'a', 'b', 'd'; allowed: names such as 'a, b, d';"),
        ("a\nb\nd\n", 4, "3 classes, and the head has 4"),
        ("x\ny\na\nb\nd\n", 4, "5 classes, and the head has 4"),
    ],
)
def test_a_file_of_other_classes_than_the_folders_or_the_head_is_refused(content, head, says, tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        number(["a", "b", "d"], "auto", head, read_file(path))
