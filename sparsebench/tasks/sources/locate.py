"""From what a user says of pictures to the name that a cell has for them, and where they lie."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.tasks.sources import known
from sparsebench.tasks.sources.classes import FOLDER, in_a_class
from sparsebench.tasks.sources.files import REFUSED, Bad, Contents, contents, fingerprint_of
from sparsebench.tasks.sources.known import DIGITS, KNOWN, PHOTOS, names_for
from sparsebench.tasks.sources.labelled import DEFAULTS, layout_of, read, tables
from sparsebench.tasks.sources.listing import Listing, classes_in, listing
from sparsebench.tasks.sources.scenes import ARRAY, read_array
from sparsebench.tasks.sources.scenes import FOLDER as SCENES

LAYOUT = "a folder with train/<class>/* and test/<class>/*"
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
        known.check(spec, root, download=download)
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
        known.check(spec, root, download=download)
        return spec, root
    path = Path(spec).expanduser()
    if path.suffix == ".npz" and path.is_file():
        read_array(path)
        return f"{ARRAY}-{fingerprint_of(path)}", path
    if not path.is_dir():
        allowed = f"{', '.join(names_for('backgrounds'))}, a folder of pictures or an .npz file"
        raise UserError(f"--backgrounds: {path} is not a folder", allowed=allowed)
    return f"{SCENES}-{contents(path, bad=bad, wanted=bool).fingerprint}", path


def _locate_labelled(root: Path, kind: str, bad: Bad) -> tuple[str, Path]:
    """Return name and place of a set in its published layout; its table, and that each picture is there, is checked."""
    if layout_of(root) != kind:
        raise UserError(
            f"{kind} is not in {root}", next_step=f"get it from {KNOWN[kind].source} and give --images folder:DIR, or "
            "--data-root with it in it",
        )  # fmt: skip
    listed = listing(root)
    read(root, kind, DEFAULTS[kind], Contents(dict.fromkeys(listed.names, "")))
    return f"{kind}-{contents(root, listed, tables(root, kind), bad).fingerprint}", root


def _locate_classes(root: Path, bad: Bad) -> tuple[str, Path]:
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(
                f"--images folder: {root / split} is not a folder",
                allowed=LAYOUT,
            )
    listed = listing(root)
    _check_classes(listed)
    found = contents(root, listed, bad=bad, wanted=in_a_class)
    _check_classes(replace(listed, names=tuple(found.pictures)))
    return f"{FOLDER}-{found.fingerprint}", root


def _check_classes(found: Listing) -> None:
    """Raise UserError unless train and test have the same classes, two or more, and a picture in each."""
    train, test = (classes_in(found.below(split), LAYOUT) for split in ("train", "test"))
    if odd := sorted({*train} ^ {*test}):
        alike = len({unicodedata.normalize("NFC", name) for name in odd}) < len(odd)
        raise UserError(
            f"{found.root}: train and test have different classes", got=[ascii(name) for name in odd] if alike else odd,
            next_step="some differ in their Unicode normalisation alone: rename them" if alike else None,
        )  # fmt: skip
