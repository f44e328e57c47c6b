"""Known data sets: their uses and sources, the layout of their files, and reading their pictures and groups."""

from __future__ import annotations

import importlib
import posixpath
import tomllib
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sparsebench.errors import UserError, unknown
from sparsebench.tasks.sources.files import Contents, check_unchanged, contents_of, listing

if TYPE_CHECKING:
    import pandas as pd


_TABLE = resources.files(__package__) / "sets.toml"
DIGITS, SVHN = "digits", "svhn"
PHOTOS, FLOWERS102 = "photos", "flowers102"
WATERBIRDS, CELEBA = "waterbirds", "celeba"
SPLITS = {0: 0, 1: 1, 2: 2}
BITS = {0: 0, 1: 1}
SIGNS = {-1: 0, 1: 1}
METADATA, ATTRIBUTES, PARTITION, FACES = "metadata.csv", "list_attr_celeba", "list_eval_partition", "img_align_celeba"

Use = Literal["foregrounds", "backgrounds", "task"]
State = Literal["there", "missing", "corrupt"]


@dataclass(frozen=True)
class ImageSet:
    """A known data set.

    Attributes:
        name: the name on the command line.
        uses: foregrounds, backgrounds, or a task of its own.
        pictures: number of pictures.
        source: URL of its page.
        licence, citation: as its authors state them.
        classes: number of classes; 0 for backgrounds.
        torchvision: name of its class in torchvision.datasets, which reads and downloads it and checks its checksums;
            "" if torchvision does not have it.
        folder: folder of its pictures below the data root, or "".
        files: other files that must be below the data root; patterns are possible.
        megabytes: size of the download.
        columns: the columns of its table that are label and attribute in its paper.
    """

    name: str
    uses: Sequence[Use]
    pictures: int
    source: str
    licence: str
    citation: str
    classes: int = 0
    torchvision: str = ""
    folder: str = ""
    files: Sequence[str] = ()
    megabytes: int = 0
    columns: Sequence[str] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The files and folders in the data root; none for data of scikit-learn."""
        return tuple(dict.fromkeys(file.partition("/")[0] for file in self.files))

    def look(self, root: Path, verify: bool = False) -> tuple[State, str]:
        """Return the state of its files, and what is missing or wrong; `verify` also checks torchvision's checksums."""
        if missing := [file for file in self.files if not any(root.glob(file))]:
            return "missing", f"{missing[0]} is not there"
        try:
            count = len(listing(root / self.folder).pictures) if self.folder else self.pictures
            if count < self.pictures:
                return "corrupt" if count else "missing", f"{self.folder} holds {count} of {self.pictures} pictures"
            if verify and self.torchvision:
                for split in ("train", "test"):
                    dataset(self.name, root, split)
        except UserError as error:
            return "corrupt", str(error)
        return "there", ""


SETS = {name: ImageSet(name, **about) for name, about in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()}
OFFICIAL = frozenset(name for name, image_set in SETS.items() if image_set.torchvision)
"""Sets that are the same on every machine, so that cells contain their plain names."""


def names_for(use: Use) -> tuple[str, ...]:
    """Return the names of the sets with this use."""
    return tuple(name for name, image_set in SETS.items() if use in image_set.uses)


def of_scikit_learn(name: str) -> Path:
    """Return the path of a data file of scikit-learn, without importing it, which takes longer than a cell."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / name


def check(name: str, root: Path, *, download: bool) -> None:
    """Raise UserError unless the files of a set are the official ones. With `download`, fetch missing files first."""
    if download:
        for split in ("train", "test"):
            dataset(name, root, split, download=True)
    state, note = SETS[name].look(root, verify=True)
    if state != "there":
        raise _missing_error(name, state, root, note)


def _missing_error(name: str, state: str, root: Path, note: object) -> UserError:
    image_set = SETS[name]
    return UserError(
        f"{name} is {state} in {root} ({note})",
        next_step=f"give --data-root DIR with {' and '.join(image_set.places)} in it, or --download to fetch it "
        f"({image_set.megabytes} MB from {image_set.source})",
    )


def dataset(name: str, root: Path, split: str, *, download: bool = False, **options: Any) -> Any:
    """Return torchvision's dataset of one split: "train", "val" or "test".

    Raises:
        UserError: its files are incomplete, or cannot be read or fetched.
    """
    reader = getattr(importlib.import_module("torchvision.datasets"), SETS[name].torchvision)
    part = {"train": split == "train"} if name.startswith("cifar") else {"split": split}
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 reads CIFAR-10 in a way that numpy 2.4 deprecates. Users cannot correct this.
            warnings.simplefilter("ignore")
            return reader(str(root), download=download, **part, **options)
    except RuntimeError as error:
        raise _missing_error(name, "missing or corrupt", root, error) from error
    except OSError as error:
        raise UserError(f"{name} cannot be read or fetched into {root} ({error})") from error


def layout_of(root: Path) -> str | None:
    """Return the name of the set whose published layout the folder has, or None."""
    if (root / METADATA).is_file():
        return WATERBIRDS
    return CELEBA if _table(root, ATTRIBUTES).is_file() else None


def tables(root: Path, kind: str) -> list[str]:
    """Return the names of a set's tables."""
    return [METADATA] if kind == WATERBIRDS else [_table(root, name).name for name in (ATTRIBUTES, PARTITION)]


@lru_cache(maxsize=4)
def labelled_pictures(kind: str, name: str, root: Path, columns: tuple[str, str]) -> tuple[Contents, pd.DataFrame]:
    """Return the contents of a set's folder, and its rows, see `read`.

    Args:
        kind: "waterbirds" or "celeba".
        name: its name in cells, with the fingerprint.
        root: its folder.
        columns: the columns of its table that are label and attribute.

    Raises:
        UserError: a table has an error, whose file and line are named, or has changed.
    """
    folder = contents_of(name, root, tables(root, kind))
    for table, sha256 in folder.tables.items():
        check_unchanged(root / table, sha256)
    return folder, read(kind, columns, folder)


def read(kind: str, columns: Sequence[str], folder: Contents) -> pd.DataFrame:
    """Return a row for each picture of a set, in the order of its table; see `labelled_pictures`.

    The columns are `file`, its path in the folder; `split`, 0 for training, 1 for validation, 2 for the test; `label`,
    the class number; and `group`, 2 label + attribute.
    """
    root = folder.root
    if kind == WATERBIRDS:
        table = root / METADATA
        below = root
        rows = _rows(table, "img_filename", {columns[0]: BITS, columns[1]: BITS, "split": SPLITS})
    else:
        table = _table(root, ATTRIBUTES)
        nested = root / FACES / FACES
        below = nested if nested.is_dir() else root / FACES
        rows = _rows(table, "image_id", {columns[0]: SIGNS, columns[1]: SIGNS})
        rows["split"] = _splits_of_faces(root, table, rows["file"])
    prefix = "" if below == root else f"{below.relative_to(root).as_posix()}/"
    names = [path.removeprefix(prefix) for path in {**folder.pictures, **folder.left_out} if path.startswith(prefix)]
    rows["file"] = [prefix + name for name in _on_disk(table, below, names, rows["file"])]
    label, attribute = (rows[name].astype(np.int64) for name in columns)
    rows = rows[["file", "split"]].assign(label=label, group=2 * label + attribute)
    return rows[~rows["file"].isin(list(folder.left_out))]


def _splits_of_faces(root: Path, table: Path, files: pd.Series) -> list[int]:
    """Return the split of each file of the table of faces, which stands in a table of its own.

    Raises:
        UserError: a file has no split.
    """
    partition = _table(root, PARTITION)
    rows = _rows(partition, "image_id", {"partition": SPLITS})
    split_of = dict(zip(map(_key, rows["file"]), rows["partition"], strict=True))
    for line, name in files.items():
        if _key(name) not in split_of:
            raise UserError(f"{table}, line {line}: {name} is not in {partition.name}")
    return [split_of[_key(name)] for name in files]


def _table(root: Path, name: str) -> Path:
    """Return the path of the table NAME.csv if it exists, otherwise of NAME.txt."""
    kaggle = root / f"{name}.csv"
    return kaggle if kaggle.is_file() else root / f"{name}.txt"


def _key(name: str) -> str:
    """Return a name without spelling differences of tables and disks: case, Unicode form, separators, `./`."""
    plain = posixpath.normpath(name.replace("\\", "/"))
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", plain).casefold())


def _on_disk(table: Path, below: Path, names: Sequence[str], files: pd.Series) -> list[str]:
    """Return the file of each row of a table, spelled as on the disk; `names` are all pictures in the folder `below`.

    Raises:
        UserError: a row has no picture, several pictures match, or a picture has two rows.
    """
    exact = set(names)
    alike = defaultdict[str, list[str]](list)
    if not exact.issuperset(files):
        for name in names:
            alike[_key(name)].append(name)
    seen: dict[str, int] = {}
    for line, name in files.items():
        matches = [name] if name in exact else alike[_key(name)]
        if not matches:
            raise UserError(f"{table}, line {line}: {below / name} is not there")
        if len(matches) > 1:
            raise UserError(
                f"{table}, line {line}: {name} may be {' or '.join(matches)}", next_step="use its exact name"
            )
        if seen.setdefault(matches[0], line) != line:
            raise UserError(f"{table}, line {line}: {name} is also in line {seen[matches[0]]}")
    return list(seen)


def _rows(path: Path, file: str, values: Mapping[str, Mapping[int, int]]) -> pd.DataFrame:
    """Return the rows of a table, indexed by line: the column `file`, and the columns of `values` as numbers.

    Args:
        path: the table.
        file: the column with the picture's file.
        values: for each column, its allowed values and their numbers.
    """
    import pandas as pd

    try:
        table = _read_csv(path) if path.suffix == ".csv" else _read_txt(path)
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise UserError(f"{path} cannot be read: {error}", next_step="repair or replace it") from error
    if missing := [name for name in (file, *values) if name not in table]:
        raise unknown(f"column of {path}", missing[0], list(table))
    if table.empty:
        raise UserError(f"{path} has no rows")
    rows = pd.DataFrame({"file": table[file].str.strip()})
    for line in rows.index[rows["file"].isna()]:
        raise UserError(f"{path}, line {line}: no {file}")
    for column, numbers in values.items():
        rows[column] = pd.to_numeric(table[column], errors="coerce").map(dict(numbers))
        for line, text in table[column][rows[column].isna()].items():
            raise UserError(f"{path}, line {line}: {column}", got=f"'{text}'", allowed=numbers)
    return rows


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    table = pd.read_csv(path, dtype=str, encoding="utf-8-sig", index_col=False, skip_blank_lines=False)
    return table.rename(columns=str.strip).set_axis(table.index + 2, axis=0).dropna(how="all")


def _read_txt(path: Path) -> pd.DataFrame:
    """Read a table in CelebA's own format; that of attributes starts with the number of rows and the names."""
    import pandas as pd

    if path.stem != ATTRIBUTES:
        table = pd.read_csv(path, sep=r"\s+", dtype=str, header=None, names=["image_id", "partition"])
        return table.set_axis(table.index + 1, axis=0)
    with path.open(encoding="utf-8-sig") as lines:
        number = lines.readline().strip()
        names = lines.readline().split()
        table = pd.read_csv(lines, sep=r"\s+", dtype=str, header=None, names=["image_id", *names])
    if number != str(len(table)):
        raise UserError(
            f"{path} is damaged", got=f"{len(table)} rows", allowed=f"{number}, the number in its first line"
        )
    return table.set_axis(table.index + 3, axis=0)
