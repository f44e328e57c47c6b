"""Folders of pictures: which files are used, which are left out and reported, and which folders are refused."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sparsebench.errors import UserError
from sparsebench.tasks.folder import Folder, locate
from sparsebench.tasks.sources.composites import locate_images
from sparsebench.tasks.sources.files import known_contents

SHADE = {"a": 40, "b": 200}


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Return a folder of two classes, two pictures each."""
    for name, shade in SHADE.items():
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (shade,) * 3).save(tmp_path / "val" / name / f"{i}.png")
    return tmp_path / "val"


def outcome(root: Path) -> list[tuple[int, int]]:
    """Return the shade and the label of each test picture."""
    name, place = locate(f"folder:{root}")
    test = Folder(images=name, canvas=8, crop=1).draw(0, 0, {name: place}).test
    return list(zip(test.inputs[:, 0, 0, 0].tolist(), test.labels.tolist(), strict=True))


def said_of(root: Path, find: Callable[..., tuple[str, Path | None]] = locate) -> str:
    """Return the report of what is left out."""
    result = known_contents(find(f"folder:{root}")[0])
    assert result is not None
    return result.strays


AS_THEY_ARE = [(40, 0)] * 2 + [(200, 1)] * 2


def stray(at: Path, content: bytes = b"x") -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(content)


STRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a server's folder": (lambda root: stray(root / "a" / "@eaDir" / "0.png" / "SYNO.jpg"), "a/@eaDir"),
    "a server's folder beside the classes": (lambda root: stray(root / "@eaDir" / "0.png"), "@eaDir"),
    "a hidden folder": (lambda root: stray(root / "b" / ".thumbs" / "0.png"), "b/.thumbs"),
    "a hidden picture": (lambda root: stray(root / "b" / "._0.png"), "b/._0.png"),
    "a loose picture": (lambda root: stray(root / "loose.png"), "pictures in no class folder: 1 (loose.png)"),
    "another suffix": (lambda root: stray(root / "a" / "x.heic"), "files of another kind: 1 (a/x.heic)"),
    "a dangling link": (lambda root: (root / "a" / "gone.png").symlink_to(root / "nowhere.png"), "a/gone.png"),
    "a link to itself": (
        lambda root: (root / "a" / "self.png").symlink_to("self.png"),
        "links to nothing: 1 (a/self.png)",
    ),
    "a link to where it lies": (lambda root: (root / "a" / "up").symlink_to(root), "a/up"),
    "a link to a picture of the set": (
        lambda root: (root / "b" / "again.png").symlink_to(root / "a" / "0.png"),
        "links to what is here already: 1 (b/again.png)",
    ),
    "a pipe": (lambda root: os.mkfifo(root / "a" / "pipe.png"), "a/pipe.png"),
    "many": (lambda root: [stray(root / "a" / f"{i}.txt") for i in range(9)], "another kind: 9 (a/0.txt"),
}


@pytest.mark.parametrize("kind", STRAYS)
def test_a_stray_file_is_left_out_and_reported(kind: str, classes: Path) -> None:
    assert outcome(classes.parent) == AS_THEY_ARE and said_of(classes) == ""
    put, says = STRAYS[kind]
    put(classes)
    assert outcome(classes.parent) == AS_THEY_ARE
    assert says in said_of(classes) and len(said_of(classes).splitlines()) == 1


def test_usual_hidden_files_are_not_reported(classes: Path) -> None:
    for name in (".DS_Store", ".gitkeep"):
        stray(classes / name)
        stray(classes / "a" / name)
    assert outcome(classes) == AS_THEY_ARE and said_of(classes) == ""


def refused(root: Path, says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        locate(f"folder:{root}")
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_is_taken_once_however_many_links_lead_to_it(classes: Path) -> None:
    (classes / "c").symlink_to("a")
    refused(classes, "c holds no pictures")
    (classes / "c").unlink()
    (classes / "a" / "more").symlink_to(classes / "b")
    assert outcome(classes) == AS_THEY_ARE and "a/more" in said_of(classes)


def test_pictures_that_are_links_into_a_hidden_folder_are_taken_once_each(classes: Path) -> None:
    for path in sorted(classes.rglob("*.png")):
        store = classes / ".store" / f"{path.parent.name}{path.name}"
        store.parent.mkdir(exist_ok=True)
        path.rename(store)
        path.symlink_to(store)
    assert outcome(classes) == AS_THEY_ARE and said_of(classes) == "hidden: 1 (.store)"
    (classes / "b" / "again.png").symlink_to(store)
    assert outcome(classes) == AS_THEY_ARE and "b/again.png" in said_of(classes)


def test_an_empty_val_beside_a_full_test_is_reported_and_not_used(classes: Path) -> None:
    root = classes.parent
    classes.rename(root / "test")
    (root / "val" / "a").mkdir(parents=True)
    assert outcome(root) == AS_THEY_ARE
    assert "folders without pictures: 1 (val)" in said_of(root)
    shutil.rmtree(root / "test" / "b")
    shutil.rmtree(root / "test" / "a")
    refused(root, "val holds no pictures")


def test_loose_pictures_alone_and_splits_are_no_classes(classes: Path) -> None:
    root = classes.parent
    for path in sorted(classes.rglob("*.png")):
        path.rename(classes / f"{path.parent.name}{path.name}")
    shutil.rmtree(classes / "a")
    shutil.rmtree(classes / "b")
    refused(root, r"too few classes; got \[\] and 4 pictures in no class folder")
    classes.rename(root / "validation")
    (root / "train").mkdir()
    refused(root, r"holds splits, not classes; got \['train', 'validation'\]")


def test_names_that_look_the_same_are_refused(classes: Path) -> None:
    for name in ("e\u0301cole", "\u00e9cole"):
        shutil.copytree(classes / "a", classes / name)
    refused(classes, "differ only in their Unicode normalisation")
    root = classes.parent / "trained"
    for split, name in (("train", "e\u0301cole"), ("test", "\u00e9cole")):
        shutil.copytree(classes / "a", root / split / "a")
        shutil.copytree(classes / "a", root / split / name)
    with pytest.raises(UserError, match="in their Unicode normalisation"):
        locate_images(f"folder:{root}")


def test_a_folder_that_cannot_be_read_is_named(classes: Path) -> None:
    for deep in (classes / "a" / "deep", classes / "b", classes):
        place = Path(tempfile.mkdtemp())
        try:
            root = place / "val"
            shutil.copytree(classes, root)
            locked = root / deep.relative_to(classes)
            locked.mkdir(exist_ok=True)
            place.chmod(0o755)
            locked.chmod(0)
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)  # a user for whom permissions are checked, unlike root
            try:
                if os.access(locked, os.R_OK, effective_ids=True):
                    pytest.skip("permissions do not bind any user here")
                refused(place, rf"{locked}.* cannot be read: Permission denied")
            finally:
                os.seteuid(user)
                locked.chmod(0o755)
        finally:
            shutil.rmtree(place)


def test_a_source_to_train_on_says_what_it_leaves_out(classes: Path) -> None:
    root = classes.parent / "trained"
    for split in ("train", "test"):
        shutil.copytree(classes, root / split)
    assert said_of(root, locate_images) == ""
    stray(root / "train" / "@eaDir" / "a.png")
    stray(root / "train" / "loose.png")
    report = said_of(root, locate_images)
    assert "train/@eaDir" in report and "pictures in no class folder: 1 (train/loose.png)" in report
