"""From what a user says of pictures to the name that a cell has for them, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.sources import official
from sparsebench.sources.classes import FOLDER
from sparsebench.sources.files import REFUSED, Bad, Contents, contents, fingerprint_of, names_in
from sparsebench.sources.known import DIGITS, KNOWN, PHOTOS, names_for
from sparsebench.sources.labelled import DEFAULTS, layout_of, read, tables
from sparsebench.sources.scenes import ARRAY, read_array
from sparsebench.sources.scenes import FOLDER as SCENES

DATA_ROOT = Path("data")
"""Where official files are looked for unless another place is named."""


def locate_images(
    spec: str, data_root: Path | None = None, download: bool = False, bad: Bad = REFUSED
) -> tuple[str, Path | None]:
    """Return the name that a cell has for an image source, and where it lies.

    Args:
        spec: the name of a known set, or "folder:DIR" for a folder of classes or with a known set's own layout.
        data_root: where official files lie.
        download: whether they may be fetched, if torchvision can.
        bad: what is to be done about pictures that cannot be read.

    Raises:
        UserError: the source is not one of these, or is not there.
    """
    root, (kind, _, path) = data_root or DATA_ROOT, spec.partition(":")
    if spec == DIGITS:
        return spec, None
    if spec in names_for("foregrounds"):
        official.check(spec, root, download=download)
        return spec, root
    if spec in names_for("task"):
        return _locate_labelled(root / KNOWN[spec].folder, spec, bad)
    if kind == FOLDER and path:
        folder = Path(path).expanduser()
        layout = layout_of(folder)
        return _locate_classes(folder, bad) if layout is None else _locate_labelled(folder, layout, bad)
    allowed = (
        f"{', '.join(names_for('foregrounds'))}, folder:DIR; for tasks of their own {', '.join(names_for('task'))}"
    )
    raise UserError("--images", got=f"'{spec}'", allowed=allowed)


def locate_backgrounds(
    spec: str, data_root: Path | None = None, download: bool = False, bad: Bad = REFUSED
) -> tuple[str, Path | None]:
    """Return the name that a cell has for a background source, and where it lies; see `locate_images`.

    Args:
        spec: the name of a known set, a folder of pictures, or an .npz file.
        data_root, download, bad: see `locate_images`.
    """
    if spec == PHOTOS:
        return spec, None
    if spec in names_for("backgrounds"):
        root = data_root or DATA_ROOT
        official.check(spec, root, download=download)
        return spec, root
    path = Path(spec).expanduser()
    if path.suffix == ".npz" and path.is_file():
        read_array(path)
        return f"{ARRAY}-{fingerprint_of(path)}", path
    if not path.is_dir():
        allowed = f"{', '.join(names_for('backgrounds'))}, a folder of pictures or an .npz file"
        raise UserError(f"--backgrounds: {path} is not a folder", allowed=allowed)
    return f"{SCENES}-{contents(path, bad=bad).fingerprint}", path


def _locate_labelled(root: Path, kind: str, bad: Bad) -> tuple[str, Path]:
    """Return name and place of a set in its published layout; its table, and that each picture is there, is checked."""
    if layout_of(root) != kind:
        raise UserError(
            f"{kind} is not in {root}", next_step=f"get it from {KNOWN[kind].source} and give --images folder:DIR, or "
            "--data-root with it in it",
        )  # fmt: skip
    names = names_in(root)
    read(root, kind, DEFAULTS[kind], Contents(dict.fromkeys(names, "")))
    return f"{kind}-{contents(root, names, tables(root, kind), bad).fingerprint}", root


def _locate_classes(root: Path, bad: Bad) -> tuple[str, Path]:
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(
                f"--images folder: {root / split} is not a folder",
                allowed="a folder with train/<class>/* and test/<class>/*",
            )
    names = names_in(root)
    _check_classes(root, names)
    found = contents(root, names, bad=bad)
    _check_classes(root, list(found.pictures))
    return f"{FOLDER}-{found.fingerprint}", root


def _check_classes(root: Path, pictures: Sequence[str]) -> None:
    """Raise UserError unless train and test have the same classes, two or more, and a picture in each."""
    full = {"/".join(name.split("/")[:2]) for name in pictures if name.count("/") > 1}
    folders = [[p for p in (root / split).iterdir() if not p.name.startswith(".")] for split in ("train", "test")]
    names = [sorted(p.name for p in each if p.is_dir()) for each in folders]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))
        raise UserError(f"{root}: train and test have different classes", got=odd)
    if len(names[0]) < 2:
        raise UserError(f"{root}: too few classes", got=names[0], allowed="2 or more folders in train and test")
    for folder in (f"{split}/{name}" for split in ("train", "test") for name in names[0]):
        if folder not in full:
            raise UserError(f"{root / folder} holds no pictures", allowed="at least one in each class")
