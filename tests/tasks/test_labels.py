"""Which class of a head each class folder is: right, or one line."""

import json
import unicodedata
from pathlib import Path

import pytest

from sparsebench.errors import UserError
from sparsebench.tasks.sources.labels import imagenet_classes as classes
from sparsebench.tasks.sources.labels import locate_file, number, read_file

WORDNET = classes()


@pytest.mark.parametrize("names", [[*map(str, range(12))], [f"{k:03}" for k in range(12)], ["00", "1", "02"]])
def test_numbers_from_0_are_the_classes_not_the_order_of_texts(names: list[str]) -> None:
    names = sorted(names)
    for head in (len(names), None):
        found = number(names, "auto", head)
        assert found.labels == "numbers" and list(found.numbers) == list(map(int, names))
        assert [found.classes[k] for k in found.numbers] == names


def test_numbers_may_be_some_classes_of_a_larger_head() -> None:
    found = number(["17", "3", "940"], "auto", 1000)
    assert found.labels == "numbers" and found.numbers == (17, 3, 940) and len(found.classes) == 1000
    assert number(["1", "2", "3"], "numbers", 4).numbers == (1, 2, 3)
    assert len(number(["2", "5"], "numbers", None).classes) == 6


@pytest.mark.parametrize(
    ("names", "labels", "head", "says"),
    [
        ([*map(str, range(1, 11))], "auto", 10, "numbers up to 10, and the head has 10 classes, counted from 0"),
        ([*map(str, range(1, 11))], "auto", 1000, "numbers from 1 to 10.*counted from 0.*labels=numbers"),
        (["2", "5", "9"], "auto", 3, "numbers up to 9, and the head has 3 classes"),
        (["2", "5", "9"], "auto", None, "numbers up to 9, and there are 3.*labels=numbers"),
        (["0", "1", "01"], "auto", 3, "of the same class; got 1, 01"),
        (["0", "1", "a"], "numbers", 3, "that are no numbers; got a"),
        (["0", "1", "70000"], "auto", 100_000, "head; got 100000 classes"),
        ([*map(str, range(10)), "misc"], "auto", 10, "11 class folders, and the head has 10"),
    ],
)
def test_numbers_that_are_not_the_head_s_are_refused(names: list[str], labels, head, says) -> None:
    with pytest.raises(UserError, match=says):
        number(names, labels, head)


@pytest.mark.parametrize(
    "names",
    [
        ["Bee", "Zebra", "ant"],
        ["class10", "class2"],
        sorted(["zebra", unicodedata.normalize("NFC", "éclair")]),
        sorted(["zebra", unicodedata.normalize("NFD", "école")]),
        [*map(str, range(12)), "misc"],
    ],
)
def test_where_the_usual_orders_differ_one_has_to_be_said(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"other way round.*labels=names.*classes=FILE"):
        number(sorted(names), "auto", len(names))
    found = number(sorted(names), "names", len(names))
    assert found.labels == "names" and found.classes == tuple(sorted(names))
    path = tmp_path / "classes.txt"
    path.write_text("\n".join(reversed(names)), encoding="utf-8")
    found = number(names, "auto", len(names), read_file(path))
    assert found.labels == "file" and list(found.numbers) == list(reversed(range(len(names))))


def test_names_with_one_usual_order_are_numbered_in_it() -> None:
    assert number(["ant", "bee", "zebra"], "auto", 3) == ("names", ("ant", "bee", "zebra"), (0, 1, 2))
    ids = sorted(WORDNET[k] for k in (5, 900, 33))  # of a network that was trained for these three alone
    assert number(ids, "auto", 3).labels == "names"
    assert number(ids, "auto", 1000).labels == "imagenet"


def test_imagenet_names_that_are_not_understood_are_named_and_not_numbered_otherwise() -> None:
    some = [*WORDNET[:11], "misc"]
    with pytest.raises(UserError, match=r"1 of 12 class folders are named after no class.* got misc"):
        number(some, "auto", 1000)
    with pytest.raises(UserError, match=r"2 of 5 .* got crane, maillot; allowed: WordNet ids"):
        number(["crane", "goldfish", "maillot", "tench", "tiger shark"], "auto", 1000)
    found = number([WORDNET[134], "goldfish", WORDNET[638], "tench", "tiger shark"], "auto", 1000)
    assert found.labels == "imagenet" and found.numbers == (134, 1, 638, 0, 3)
    with pytest.raises(UserError, match=r"2 class folders, and the head has 1000.*classes=FILE"):
        number(["own", "names"], "auto", 1000)


def test_a_thousand_own_names_are_numbered_though_some_are_of_imagenet() -> None:
    own = sorted(["tench", *(f"own-{k:03}" for k in range(999))])
    assert number(own, "auto", 1000).labels == "names"


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
    found = number(["cross", "disc", "ring", "square"], "auto", 4, read_file(path))
    assert found.labels == "file" and found.numbers == (2, 0, 3, 1)
    assert number(["ring", "square"], "auto", 4, read_file(path)).numbers == (3, 1)  # some of its classes
    assert locate_file(path).startswith("classes-") and read_file(path, locate_file(path))


def test_a_file_may_spell_names_in_the_other_unicode_normalisation(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text(unicodedata.normalize("NFC", "zebra\nécole"), encoding="utf-8")
    assert number([unicodedata.normalize("NFD", "école"), "zebra"], "auto", 2, read_file(path)).numbers == (1, 0)


def test_a_name_that_two_classes_have_is_refused_where_a_folder_has_it(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("crane\ntench\ncrane\n")
    assert number(["tench"], "auto", 3, read_file(path)).numbers == (1,)
    with pytest.raises(UserError, match="or stand for two; got crane"):
        number(["crane", "tench"], "auto", 3, read_file(path))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.txt", b"", "names no class"),
        ("c.txt", b"a\n\nb\n", "class 1 named ''"),
        ("c.txt", b"\xff\xfe\x00", "cannot be read"),
        ("c.json", b"[1, 2]", "neither a list of names nor an object"),
        ("c.json", b'{"a": 0, "b": 0}', "two names have the same number"),
        ("c.json", b'{"a": true, "b": 1}', "neither a list of names"),
        ("c.json", b'{"0": "1", "1": "0"}', "neither a list of names"),  # which are the numbers?
        ("c.json", b'{"a": -1, "b": 1}', "class -1 named 'a'"),
        ("c.json", b"{", "cannot be read"),
        ("c.json", b"[" * 100_000, "cannot be read"),
    ],
)
def test_what_is_no_file_of_classes_is_one_line(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as raised:
        read_file(tmp_path / name)
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_not_there_or_changes_under_a_run_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    with pytest.raises(UserError, match=r"classes\.txt cannot be read"):
        locate_file(path)
    path.write_text("a\nb\n")
    name = locate_file(path)
    path.write_text("b\na\n")
    with pytest.raises(UserError, match="changed while the run was under way"):
        read_file(path, name)


@pytest.mark.parametrize(
    ("content", "head", "says"),
    [
        (
            "a\nb\nc\n",
            3,
            "1 of 3 class folders are not in the file.* got d; allowed: names as the file has them: a, b, c",
        ),
        ("a\nb\nd\n", 4, "the file of classes has 3, and the head has 4"),
        ("x\ny\na\nb\nd\n", 4, "the file of classes has 5, and the head has 4"),
    ],
)
def test_a_file_of_other_classes_than_the_folders_or_the_head_is_refused(content, head, says, tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        number(["a", "b", "d"], "auto", head, read_file(path))
