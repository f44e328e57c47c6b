"""Sets of pictures with a label and an attribute that goes with it, read where they lie in their published layouts.

Waterbirds: DIR/metadata.csv with the columns img_filename, y, split and place, and the pictures below DIR.
CelebA: DIR/list_attr_celeba and DIR/list_eval_partition, both .txt as published or both .csv as Kaggle has them, and
the pictures in DIR/img_align_celeba (or once more img_align_celeba in it).

A table may spell the name of a picture otherwise than the disk does, see `_key`, if only one picture can be meant.
"""

from __future__ import annotations

import csv
import hashlib
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sparsebench.errors import UserError, unknown
from sparsebench.sources import cache
from sparsebench.sources.cache import BadPicturesError
from sparsebench.sources.files import DIGITS, Contents, Locations, contents_of, read_square, sha256_of
from sparsebench.sources.known import CELEBA, WATERBIRDS

SPLITS = {"0": 0, "1": 1, "2": 2}
BITS = {"0": 0, "1": 1}
SIGNS = {"-1": 0, "1": 1}
METADATA, ATTRIBUTES, PARTITION, FACES = "metadata.csv", "list_attr_celeba", "list_eval_partition", "img_align_celeba"
DEFAULTS = {WATERBIRDS: ("y", "place"), CELEBA: ("Blond_Hair", "Male")}
"""The label and the attribute of each set that its papers use."""


@dataclass(frozen=True)
class Labelled:
    """Pictures of a set, n of them, in the order of its table.

    Attributes:
        contents: of the folder `root`, in which the set lies.
        names: the paths in it of the n pictures.
        lines: the line of each in `table`.
        splits: (n,) 0 for training, 1 for validation, 2 for the test.
        labels, attributes: (n,) 0 or 1.
    """

    contents: Contents
    root: Path
    names: Sequence[str]
    table: Path
    lines: np.ndarray
    splits: np.ndarray
    labels: np.ndarray
    attributes: np.ndarray


def layout_of(root: Path) -> str | None:
    """Return the name of the set whose published layout a folder has, or None."""
    if (root / METADATA).is_file():
        return WATERBIRDS
    return CELEBA if _table(root, ATTRIBUTES).is_file() else None


def tables(root: Path, kind: str) -> list[str]:
    """Return the names of the files beside the pictures that a set is made of."""
    return [METADATA] if kind == WATERBIRDS else [_table(root, name).name for name in (ATTRIBUTES, PARTITION)]


def labelled_pictures(kind: str, name: str, columns: tuple[str, str], locations: Locations) -> Labelled:
    """Return a located set.

    Args:
        kind: "waterbirds" or "celeba".
        name: what the cell calls it, with its fingerprint.
        columns: of its table, the label and the attribute.
        locations: where it lies.

    Raises:
        UserError: it is of another kind, not here, or its table is wrong; file and line are named.
    """
    known, _, content = name.partition("-")
    if known != kind or not content:
        raise UserError(f"the images '{name}' are not those of task '{kind}'", next_step=f"give --images {kind}")
    if name not in locations:
        raise UserError(f"the images '{name}' of this cell are not on this machine", next_step="give --images")
    return _read(kind, content, locations[name], columns)


@lru_cache(maxsize=4)
def _read(kind: str, content: str, root: Path, columns: tuple[str, str]) -> Labelled:
    names = tables(root, kind)
    found = contents_of(content, root, names)
    if {name: sha256_of(root / name) for name in names} != found.tables:
        raise UserError(f"the tables in {root} changed while the run was under way", next_step="run it again")
    return read(root, kind, columns, found)


def read(root: Path, kind: str, columns: tuple[str, str], found: Contents) -> Labelled:
    """Return the set that lies in a folder, without what is left out of its contents; see `labelled_pictures`."""
    if kind == WATERBIRDS:
        table, below = root / METADATA, root
        values: Mapping[str, Mapping[str, int]] = {columns[0]: BITS, columns[1]: BITS, "split": SPLITS}
        rows = list(_rows(table, "img_filename", values))
    else:
        table, partition, below = _table(root, ATTRIBUTES), _table(root, PARTITION), _faces(root)
        splits = _one_table(partition, {"partition": SPLITS})
        split_of = {_key(name): split for _, name, (split,) in splits}
        rows = []
        for line, name, bits in _one_table(table, {columns[0]: SIGNS, columns[1]: SIGNS}):
            if _key(name) not in split_of:
                raise UserError(f"{table}, line {line}: {name} is not in {partition.name}")
            rows.append((line, name, [*bits, split_of[_key(name)]]))
    prefix = "" if below == root else f"{below.relative_to(root).as_posix()}/"
    names = [one.removeprefix(prefix) for one in {**found.pictures, **found.left_out} if one.startswith(prefix)]
    rows = [(line, prefix + name, bits) for line, name, bits in _with_files(table, below, names, rows)]
    rows = [row for row in rows if row[1] not in found.left_out]
    numbers = np.array([bits for _, _, bits in rows], dtype=np.int64)
    lines, names = np.array([line for line, _, _ in rows]), [name for _, name, _ in rows]
    return Labelled(found, root, names, table, lines, numbers[:, 2], numbers[:, 0], numbers[:, 1])


def _table(root: Path, name: str) -> Path:
    """Return the .csv of that name if there is one, else the .txt."""
    kaggle = root / f"{name}.csv"
    return kaggle if kaggle.is_file() else root / f"{name}.txt"


def _faces(root: Path) -> Path:
    inner = root / FACES / FACES
    return inner if inner.is_dir() else root / FACES


def _one_table(path: Path, values: Mapping[str, Mapping[str, int]]) -> list[_Row]:
    """Return the rows of one of CelebA's tables, which may be there as .csv and as .txt.

    Raises:
        UserError: the two say different things.
    """
    rows, other = list(_rows(path, "image_id", values)), path.with_suffix(".txt")
    if path.suffix != ".csv" or not other.is_file():
        return rows
    said = {_key(name): numbers for _, name, numbers in _rows(other, "image_id", values)}
    for line, name, numbers in rows:
        if said.pop(_key(name), None) != numbers:
            raise UserError(
                f"{path}, line {line}: {other.name} says something else of {name}, in {' or '.join(values)}",
                next_step="remove the one that is wrong",
            )
    if said:
        raise UserError(
            f"{path} has no row of {min(said)}, and {other.name} has one", next_step="remove the one that is wrong"
        )
    return rows


def _key(name: str) -> str:
    """Return a name without what tables and disks spell differently: case, form of Unicode, separators, `./`."""
    plain = posixpath.normpath(name.replace("\\", "/"))
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", plain).casefold())


def _with_files(table: Path, below: Path, names: Sequence[str], rows: list[_Row]) -> list[_Row]:
    """Return the rows with the names of their files as they are on the disk: `names`, of all that lie in `below`.

    Raises:
        UserError: there are no rows, a row has no picture, several may be meant, or a picture has two rows.
    """
    if not rows:
        raise UserError(f"{table} has no rows")
    exact, alike = set(names), defaultdict[str, list[str]](list)
    if not all(name in exact for _, name, _ in rows):
        for name in names:
            alike[_key(name)].append(name)
    seen: dict[str, int] = {}
    found = []
    for line, name, numbers in rows:
        meant = [name] if name in exact else alike[_key(name)]
        if len(meant) > 1:
            raise UserError(f"{table}, line {line}: {name} may be {' or '.join(meant)}", next_step="say which")
        if not meant:
            raise UserError(f"{table}, line {line}: {below / name} is not there", next_step=_near(name, names))
        if seen.setdefault(meant[0], line) != line:
            raise UserError(f"{table}, line {line}: {name} is in line {seen[meant[0]]}, too")
        found.append((line, meant[0], numbers))
    return found


def _near(name: str, names: Sequence[str]) -> str | None:
    """Return a hint at a picture that may be meant: one of that name in another folder, or of another suffix."""
    whole = _key(name)
    for part in (posixpath.basename, lambda path: posixpath.splitext(path)[0]):
        if near := [one for one in names if part(_key(one)) == part(whole)][:1]:
            return f"did you mean '{near[0]}'?"
    return None


_Row = tuple[int, str, list[int]]
"""A line of a table, the name of its picture, and numbers."""


def _rows(path: Path, file: str, values: Mapping[str, Mapping[str, int]]) -> Iterator[_Row]:
    """Yield of each row of a table its line, the picture's file name, and the numbers of the columns in `values`.

    Args:
        path: the table.
        file: the column with the file name.
        values: of each column, what may be in it and which number that is.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            header, rows = _csv(lines) if path.suffix == ".csv" else _txt(lines, path)
            if missing := [name for name in (file, *values) if name not in header]:
                raise unknown(f"column of {path}", missing[0], header)
            places = [header.index(name) for name in (file, *values)]
            for line, row in rows:
                if len(row) != len(header):
                    raise UserError(f"{path}, line {line}", got=f"{len(row)} fields", allowed=f"{len(header)}")
                name, *texts = (row[place].strip() for place in places)
                texts = [_whole(text) for text in texts]
                for (column, numbers), text in zip(values.items(), texts, strict=True):
                    if text not in numbers:
                        raise UserError(f"{path}, line {line}: {column}", got=f"'{text}'", allowed=numbers)
                yield line, name, [numbers[text] for numbers, text in zip(values.values(), texts, strict=True)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}", next_step="mend or replace it") from error


def _whole(text: str) -> str:
    """Return a number as tables have it: spreadsheets write 1 as 1.0."""
    whole, _, rest = text.partition(".")
    return whole if not rest.strip("0") else text


def _csv(lines: Iterator[str]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    return header, ((reader.line_num, row) for row in reader if row)


def _txt(lines: Iterator[str], path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return header and rows of one of CelebA's own tables: attributes are headed by their number and names."""
    header, first, number = ["image_id", "partition"], 1, None
    if path.stem == ATTRIBUTES:
        number, first = next(lines, "").strip(), 3
        header = ["image_id", *next(lines, "").split()]

    def rows() -> Iterator[tuple[int, list[str]]]:
        n = 0
        for line, text in enumerate(lines, first):
            if fields := text.split():
                n += 1
                yield line, fields
        if number is not None and number != str(n):
            raise UserError(f"{path} is cut off or torn", got=f"{n} rows", allowed=f"{number}, as its first line says")

    return header, rows()


def pixels_of(labelled: Labelled, rows: np.ndarray, size: int) -> tuple[cache.Pixels, np.ndarray | None]:
    """Return (n, 3, size, size) pixels with the middle squares of pictures, resized (bilinear), and which are wanted.

    They are mapped from a file, so that a set may be larger than the memory.

    Args:
        labelled: the set.
        rows: (n,) some of one split, in rising order. A split is decoded as a whole, once for all that is chosen of
            it; one that would take more than `cache.LARGE` bytes has a file for each choice.
        size: side of the squares in pixels.

    Returns:
        The pixels of the split or of its chosen pictures, and where the rows are among them; None for all of them.
    """
    split = np.flatnonzero(labelled.splits == labelled.splits[rows[0]])
    if len(rows) < len(split) and len(split) * 3 * size**2 <= cache.LARGE:
        return _pixels(labelled, split, size), np.searchsorted(split, rows)
    return _pixels(labelled, rows, size), None


def _pixels(labelled: Labelled, rows: np.ndarray, size: int) -> cache.Pixels:
    """Return the pixels of exactly those rows."""
    known = labelled.contents

    def row(i: int) -> np.ndarray:
        name = labelled.names[rows[i]]
        try:
            return read_square(labelled.root / name, size, known.pictures[name]).transpose(2, 0, 1)
        except BadPicturesError as error:
            where = f"{labelled.table}, line {labelled.lines[rows[i]]}"
            raise BadPicturesError({f"{where}: {path}": why for path, why in error.reasons.items()}) from error

    about = "".join(sha256[:DIGITS] for sha256 in known.tables.values())
    which = hashlib.sha256(about.encode() + labelled.lines[rows].astype("<i8").tobytes()).hexdigest()[:DIGITS]
    return cache.Pixels(f"{known.fingerprint}-{which}-{size}-first", (len(rows), 3, size, size), row)
