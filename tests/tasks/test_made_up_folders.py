"""A hundred made-up folders of classes: each picture has the label that it shows, in the order that is said, or one
line refuses the folder."""

import json
import random
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import ImageNetInfo
from timm.utils.misc import natural_key

from sparsebench.errors import UserError
from sparsebench.tasks.folder import Folder, locate
from sparsebench.tasks.sources.files import known_contents
from sparsebench.tasks.sources.labels import described

STEP = 18
"""Between the shades of two classes."""
INFO = ImageNetInfo()
SUFFIXES = (".png", ".PNG", ".jpg", ".jfif", ".bmp", ".ppm", ".pgm", ".webp", ".tiff")
FORMS = {".jfif": "JPEG", ".jpg": "JPEG", ".pgm": "PPM", ".tiff": "TIFF"}
WORDS = ("ant", "Bee", "cat", "Zebra", "école", "zoo", "Ångström", "class2", "class10", "x y", "été", "日本", "crane")
ANIMALS = {"ant": 310, "Bee": 309, "Zebra": 340}
"""Those of the words that name one class of ImageNet-1k, as its list numbers them; crane names two."""


@st.composite
def names_of(draw: Any) -> tuple[list[str], dict[str, int] | None]:
    """Return names of class folders, and the classes of ImageNet that they are, where they are such."""
    n = draw(st.integers(2, 13))
    kind = draw(st.sampled_from(("numbers", "some numbers", "padded", "from 1", "wordnet", "lemmas", "words", "mixed")))
    if kind in ("wordnet", "lemmas", "mixed"):
        chosen = draw(st.lists(st.integers(0, 999), min_size=n, max_size=n, unique=True))
        describe = INFO.index_to_description if kind == "lemmas" else INFO.index_to_label_name
        known = {describe(k).split(",")[0]: k for k in chosen}
        return [*known, *(["misc"] if kind == "mixed" else [])], known
    if kind == "words":
        form = draw(st.sampled_from(("NFC", "NFD")))
        words = draw(st.lists(st.sampled_from(WORDS), min_size=2, max_size=12, unique=True))
        known = {word: ANIMALS[word] for word in words if word in ANIMALS}
        return [unicodedata.normalize(form, word) for word in words], known
    if kind == "some numbers":
        return list(map(str, draw(st.lists(st.integers(0, 30), min_size=2, max_size=12, unique=True)))), None
    return [f"{k:03}" if kind == "padded" else str(k + (kind == "from 1")) for k in range(n)], None


def write_picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "L" if path.suffix == ".pgm" else "RGB"
    Image.new(mode, (8, 8), shade if mode == "L" else (shade,) * 3).save(path, FORMS.get(path.suffix.lower()))


def link_to_first(root: Path, names: list[str]) -> None:
    first = next(path for path in sorted((root / names[0]).rglob("[01].*")) if path.is_file())
    (root / names[-1] / f"linked{first.suffix}").symlink_to(first)


PUT: dict[str, Callable[[Path, list[str]], object]] = {
    "hidden": lambda root, names: write_picture(root / names[0] / "._0.png", 255),
    "system": lambda root, names: write_picture(root / names[-1] / "@eaDir" / "0.png", 255),
    "loose": lambda root, names: write_picture(root / "loose.png", 255),
    "text": lambda root, names: (root / names[0] / "notes.txt").write_text("notes"),
    "dangling": lambda root, names: (root / names[0] / "gone.png").symlink_to("nowhere.png"),
    "circle": lambda root, names: (root / names[0] / "link.png").symlink_to("link.png"),
    "up": lambda root, names: (root / names[0] / "up").symlink_to(root),
}
"""Stray things that are left out, by what puts them into a folder of classes."""
PUT_WRONG: dict[str, Callable[[Path, list[str]], object]] = {
    "class link": lambda root, names: (root / "another").symlink_to(names[0]),
    "picture link": link_to_first,
    "empty class": lambda root, names: (root / "nothing").mkdir(),
}
"""Things that are refused."""


def classes_file(form: str, order: list[str], path: Path) -> Path:
    """Write a file that says the order of classes, in one of its forms."""
    if form == "text":
        path.write_text("\n".join(order), encoding="utf-8")
        return path
    said: dict[str, Any] = {
        "list": order,
        "name to number": {name: k for k, name in enumerate(order)},
        "number to name": {str(k): name for k, name in enumerate(order)},
    }
    path.with_suffix(".json").write_text(json.dumps(said[form]), encoding="utf-8")
    return path.with_suffix(".json")


@settings(max_examples=30)
@given(
    names_of(),
    st.sampled_from(("same", "more", "imagenet", "unknown")),
    st.sampled_from((None, None, None, "text", "list", "name to number", "number to name")),
    st.sampled_from(("auto", "auto", "auto", "numbers", "names", "imagenet")),
    st.sampled_from(("val", "test", ".", "empty val")),
    st.sets(st.sampled_from(sorted(PUT)), max_size=3),
    st.sampled_from([None] * 9 + sorted(PUT_WRONG)),
    st.randoms(use_true_random=False),
)
@example((["ant", "Bee"], ANIMALS), "imagenet", None, "auto", "val", set(), None, random.Random(0))
@example((["ant", "cat", "Zebra"], ANIMALS), "imagenet", None, "auto", "val", set(), None, random.Random(0))
def test_labels_are_right_or_one_line_refuses(named, heads, form, labels, layout, strays, wrong, rng):
    names, known = named
    shades = {name: STEP * place for place, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as place:
        top = Path(place) / "pictures"
        root = top / {"empty val": "test"}.get(layout, layout)
        if layout == "empty val":
            (top / "val" / names[0]).mkdir(parents=True)
        expected = 0
        for name in names:
            for i in range(rng.randint(1, 2)):
                deep = rng.choice(("", "", "deep", "deep/er"))
                write_picture(root / name / deep / f"{i}{rng.choice(SUFFIXES)}", shades[name])
                expected += 1
        for kind in sorted(strays):
            PUT[kind](root, names)
        if wrong:
            PUT_WRONG[wrong](root, names)
        head = {"same": len(names), "more": len(names) + 3, "imagenet": 1000, "unknown": None}[heads]
        order = rng.sample(names, len(names))
        path = None if form is None else classes_file(form, order, Path(place) / "classes.txt")
        try:
            images, where = locate(f"folder:{top}")
            asked = Folder(images=images, canvas=8, crop=1, labels=labels, classes="" if path is None else str(path))
            asked.check()
            task, places = asked.located()
            locations = {images: where, **places}
            task = task.with_classes(head, locations)
            data = task.draw(0, 0, locations)
        except UserError as error:
            assert len(str(error).splitlines()) == 1
            return
        assert wrong is None, f"{wrong} was taken"
        assert len(data.classes) == (head or len(data.classes)) and len(data.test.labels) == expected
        assert Folder.model_validate(task.model_dump()).draw(0, 0, locations).classes == data.classes
        assert described(task.model_dump())
        shown = np.rint(data.test.inputs.mean(axis=(1, 2, 3)) / STEP).astype(int)
        of = {
            "numbers": {name: int(name) for name in names if name.isdigit()},
            "names": {name: k for k, name in enumerate(sorted(names))},
            "file": {name: k for k, name in enumerate(order)},
            "imagenet": known or {},
        }[task.labels]
        assert [of[names[k]] for k in shown] == data.test.labels.tolist()
        if path is not None:
            assert task.labels == "file"
        if labels == "auto" and task.labels == "names":  # the order of every usual program
            for key in (natural_key, lambda name: unicodedata.normalize("NFC", name)):
                assert sorted(names) == sorted(names, key=key)
        found = known_contents(images)
        assert found is not None
        said = found.strays
        assert bool(said) == bool(strays or layout == "empty val") and len(said.splitlines()) <= 1
