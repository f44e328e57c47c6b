"""The store: a run appends JSON lines to a segment of its own, and seals it when it ends; readers take the union.

OUT/records/<utc>-<host>-<pid>-<random>.jsonl      one record a line, one fsynced write a record, while a run goes on
OUT/records/<the same>.parquet                      the same records, sealed, with what lay beside them; see `table`
OUT/environments/<hash>.json                        machine and libraries, once each; see `manifests` for what else
OUT/weights/<cell id>.safetensors                   weights that other cells start from
OUT/checkpoints/<cell id>.safetensors               a training under way, until its record is there
OUT/fits/<hash>.safetensors                         what strategies learned from training images before a test
OUT/underway/<host>-<pid>.json                      how far a run is, until it is over
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import files, place, table
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import SCHEMA, Head, NewerSchemaError, Record, upgrade
from sparsebench.text import plain

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Head)
X = TypeVar("X")
SHOWN = 5
"""Lines of a segment that cannot be read and are named."""
CELL, CELL_ID = b'{"cell":', b',"cell_id":"'
BESIDE = ("environments", "checks", "strategies", "suites", "metrics", "files", "strays", "pictures")
"""Folders whose .json files belong to records and are named after what they say."""
_NAMED = re.compile(r"[\w-]{1,64}\.json", re.ASCII)


def weights_path(out: Path, cell_id: str) -> Path:
    """Return where the trained weights of a cell lie."""
    return out / "weights" / f"{cell_id}.safetensors"


def has_weights(out: Path, cell_id: str, known: Mapping[str, Head]) -> bool:
    """Say whether the trained weights of a cell lie there as its record, among the known, says they were written."""
    written = known[cell_id].notes.get("weights") if cell_id in known else None
    return written is not None and written == files.content_hash(weights_path(out, cell_id))


def checkpoint_path(out: Path, cell_id: str) -> Path:
    """Return where the checkpoint of a cell lies while it is trained."""
    return out / "checkpoints" / f"{cell_id}.safetensors"


def fit_path(out: Path, key: str) -> Path:
    """Return where it lies what a strategy learned from training images, by a hash of all that it depends on."""
    return out / "fits" / f"{key}.safetensors"


def remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and what a process that was killed left of one."""
    path = checkpoint_path(out, cell_id)
    if not path.parent.exists():
        return
    with suppress(OSError):
        for leftover in (path, *path.parent.glob(f".{path.name}.*.part")):
            leftover.unlink(missing_ok=True)


def check_writable(out: Path) -> None:
    """Raise UserError unless files can be made in the folder; makes it if it is not there."""
    try:
        for folder, pattern in ((out, "records"), (out / "records", "*.jsonl")):
            place.check_link(folder, pattern)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}", next_step="give another --out") from error


class Writer:
    """Appends records to a segment of its own, which nobody else ever writes.

    A segment that was removed meanwhile is written again. Nothing is written to what has taken the folder's name.

    Raises:
        UserError: the folder cannot be written or is gone, or the disk is full. What was acknowledged before is whole.
    """

    def __init__(self, out: Path):
        self.folder, self._home = out / "records", place.identity(out)
        self._records = place.identity(self.folder)
        self._file: int | None = None
        self._path = self.folder

    def append(self, record: Record) -> None:
        """Write one record; when this returns, the record is on the disk."""
        line = (canonical(record.model_dump(mode="json")) + "\n").encode()
        try:
            if self._file is None:
                self._file = self._open()
            self._write(self._file, line)
            if place.identity(self._path) != place.identity(self._file):
                self._write_again(self._file)
        except OSError as error:
            raise UserError(
                f"cannot write records to {self.folder}: {error.strerror or error}",
                next_step="what was recorded before is safe; mend it and give the same command again",
            ) from error

    def _write(self, file: int, line: bytes) -> None:
        good = os.lseek(file, 0, os.SEEK_END)
        try:
            if os.write(file, line) != len(line):
                raise OSError("the disk is full")
            os.fsync(file)
        except OSError:
            # Network file systems may say only here that the disk is full, and taking the line back may fail as well.
            # What comes next goes to another segment, so that a torn line stays the last of its own.
            with suppress(OSError):
                os.ftruncate(file, good)
            with suppress(OSError):
                self.close()
            raise

    def _write_again(self, gone: int) -> None:
        """Write what a segment that has lost its name holds to another one."""
        log.warning("%s was removed while it was written; its records are written again", self._path.name)
        self._file = self._open()
        self._write(self._file, os.pread(gone, os.fstat(gone).st_size, 0))
        os.close(gone)

    def _open(self) -> int:
        place.check(self.folder.parent, self._home)
        if self.folder.is_symlink():
            place.check(self.folder, self._records)
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        host = "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:40]
        self._path = self.folder / f"{stamp}-{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        with suppress(OSError):  # of file systems without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # while this process lives nobody seals the segment
        for folder in (self.folder, self.folder.parent):
            _sync_folder(folder)
        return file

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # which a process that was forked meanwhile would hold
            os.close(file)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(folder)


class Claim(NamedTuple):
    """What decides which of several records of a cell counts; `source` is what `Origin.identity` says."""

    cell_id: str
    source: str
    ok: bool
    started: str
    checksum: int

    @property
    def rank(self) -> tuple[bool, Moment, int]:
        """What the later one of one source has more of."""
        return self.ok, moment(self.started), self.checksum


Moment = tuple[bool, datetime, str]
AHEAD = timedelta(days=1)
"""How far a machine's clock may be before this one's."""


def moment(started: str) -> Moment:
    """Return when a record says that it began, to compare: what is no time, or yet to come, is before all others."""
    try:
        when = datetime.fromisoformat(started)
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        return False, datetime.min.replace(tzinfo=UTC), started
    return when <= datetime.now(UTC) + AHEAD, when, started


def of_each_source(items: Iterable[tuple[Claim, X]]) -> dict[tuple[str, str], tuple[Claim, X]]:
    """Return what counts for each cell and source of its strategy: the newest success, or else the newest failure.

    It depends on no order, and may be done in parts: of what is left of two stores as of both at once.
    """
    best: dict[tuple[str, str], tuple[Claim, X]] = {}
    for claim, item in items:
        known = best.get(claim[:2])
        if known is None or claim.rank > known[0].rank:
            best[claim[:2]] = claim, item
    return best


def newest(items: Iterable[tuple[Claim, X]]) -> dict[str, X]:
    """Return what counts for each cell: of what counts for each source the newest; see `of_each_source`."""
    best: dict[str, tuple[Claim, X]] = {}
    for claim, item in of_each_source(items).values():
        known = best.get(claim.cell_id)
        if known is None or (moment(claim.started), claim) > (moment(known[0].started), known[0]):
            best[claim.cell_id] = claim, item
    return {cell_id: item for cell_id, (_, item) in best.items()}


def read(out: Path) -> dict[str, Record]:
    """Return the newest record of each cell in a run's folder; a failure does not replace a success of the same code.

    Lines that cannot be read are left out with a warning: their cells count as not run.

    Raises:
        UserError: a record was written by a later sparsebench, or a sealed file is damaged.
    """
    with without_collector():
        return newest((claim_of(*stored), stored.item) for stored in scan_all(out, Record))


def heads(out: Path) -> dict[str, Head]:
    """Return what a resumed run must know of the same records; several times as fast, and in far less memory."""
    with without_collector():
        return newest((claim_of(*stored), stored.item) for stored in scan_all(out, Head))


def claim_of(head: Head, checksum: int) -> Claim:
    """Return what decides whether a record counts."""
    return Claim(head.cell_id, head.origin.identity, head.status == "ok", head.started, checksum)


def segments(out: Path) -> list[Path]:
    """Return the segments of a run's folder that are not sealed, by name."""
    return files.files_in(out / "records", ".jsonl")


def sealed(out: Path) -> list[Path]:
    """Return the sealed files of a run's folder, by name."""
    return files.files_in(out / "records", ".parquet")


def scan_all(out: Path, kind: type[T]) -> Iterator[table.Stored[T]]:
    """Yield the records of all files, or what a `Head` or `Past` says of them; see `scan`.

    Segments come first, so that one that is sealed meanwhile is read, if only from its file.

    Raises:
        UserError: a record was written by a later sparsebench, or a sealed file is damaged.
    """
    for path in segments(out):
        with _leaving_out(path):
            yield from scan(path, kind)
    for path in sealed(out):
        yield from table.items(path, kind)


@contextmanager
def _leaving_out(path: Path) -> Iterator[None]:
    """Warn of a segment that cannot be read; not of one that was sealed meanwhile."""
    try:
        yield
    except OSError as error:
        if path.exists():
            files.leave_out(path, error)


def scan(path: Path, kind: type[T]) -> Iterator[table.Stored[T]]:
    """Yield what the lines of a segment hold; those that cannot be read are left out with a warning.

    Raises:
        UserError: a record was written by a later sparsebench.
        OSError: the segment cannot be read.
    """
    name, number, unread = plain(path.name), 0, 0
    with files.open_file(path, files.MOST_BYTES) as file:
        while line := file.readline(files.LINE_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                why = "too long" if len(line) > files.LINE_BYTES else "torn (a run was stopped while writing it)"
                log.warning(f"{name}: line {number} is {why} and is left out, with what comes after it")
                break
            try:
                yield table.Stored(parse(line, kind), zlib.crc32(line))
            except NewerSchemaError as error:
                raise UserError(f"{path} line {number} has {error}", next_step="upgrade sparsebench") from error
            except ValueError as error:
                unread += 1
                if unread <= SHOWN:
                    log.warning(f"{name} line {number} is left out: {error}")
    if unread > SHOWN:
        log.warning(f"{name}: {unread - SHOWN} more lines are left out")


def rows(out: Path, columns: Callable[[str], bool] = lambda name: True, *, newest: bool = True) -> pa.Table:
    """Return the records of a run's folder as a table, of the columns that are wanted; see `table`.

    Only those that count, unless all are wanted.

    Raises:
        UserError: the folder holds no records, or as `scan_all`.
    """
    with without_collector():
        parts = [part for path in segments(out) for part in _parts(path, columns)]
        parts += [table.read(path, lambda name: name in table.CLAIM or columns(name)) for path in sealed(out)]
    if not any(map(len, parts)):
        raise nothing(out)
    whole = table.join(parts)
    return counting(whole) if newest else whole


def nothing(out: Path) -> UserError:
    """Return the error for a folder without records."""
    return UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")


def _parts(path: Path, columns: Callable[[str], bool] = lambda name: True) -> list[pa.Table]:
    """Return the rows of a segment, part by part, as so many records at once would take much memory."""
    parts, lines = [], scan(path, Record)
    with _leaving_out(path):
        while len(part := table.table_of(islice(lines, table.BATCH))):
            parts.append(part.select([name for name in part.column_names if name in table.CLAIM or columns(name)]))
    return parts


def counting(whole: pa.Table, choose: Callable[[Iterable[tuple[Claim, int]]], Mapping[Any, int]] = newest) -> pa.Table:
    """Return the rows that count; of most cells there is only one.

    Args:
        whole: the rows of one or more folders.
        choose: of the claims of cells with several rows, and the places of these, returns the places that count.
    """
    import numpy as np
    import pyarrow as pa

    cells = whole["cell_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    keep = np.bincount(cells)[cells] == 1
    several = np.flatnonzero(~keep)
    if not several.size:
        return whole
    named = table.rows_of(whole.select(table.CLAIM).take(pa.array(several)))
    claims = (
        Claim(c["cell_id"], f"{c['distribution']} {c['revision']}".strip(), c["status"] == "ok", c["started"],
              c["checksum"]) for c in named
    )  # fmt: skip
    keep[list(choose(zip(claims, several.tolist(), strict=True)).values())] = True
    return whole.filter(pa.array(keep))


def seal(out: Path) -> None:
    """Seal the segments of a run's folder that nobody writes any more, each into a file of its own name.

    What lies beside the records goes into the file with them. A process that is killed meanwhile leaves what it has not
    finished as it was, and a segment of which a whole line cannot be read stays as it is.

    Raises:
        UserError: a file cannot be written.
    """
    for path in segments(out):
        with suppress(OSError), path.open("rb") as file:  # of a lock: its writer is alive, or another seals it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                _seal(out, path)


def _seal(out: Path, path: Path) -> None:
    parts = _parts(path)
    with path.open("rb") as file:
        lines = sum(line.endswith(b"\n") for line in file)
    if sum(map(len, parts)) < lines:
        return
    loose = [one for folder in BESIDE for one in _loose(out, folder)]
    if parts:
        texts = {f"{one.parent.name}/{one.name}": text for one, text in loose}
        table.write(path.with_suffix(".parquet"), table.join(parts), texts)
    path.unlink()
    _sync_folder(path.parent)
    for one, _ in loose if parts else ():
        one.unlink(missing_ok=True)


def _loose(out: Path, folder: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of one of the folders `BESIDE`, and what they say; what is no text is left out with a warning."""
    for path, content in files.contents_in(out / folder):
        try:
            if not _NAMED.fullmatch(path.name):
                raise ValueError("its name is of another form")
            yield path, content.decode()
        except ValueError as error:
            files.leave_out(path, error)


def beside(out: Path, folder: str) -> dict[str, str]:
    """Return what lies beside records, in one of the folders `BESIDE` or in sealed files, by the name of its file.

    Of several texts under one name what is in the folder counts.
    """
    texts: dict[str, str] = {}
    for path in sealed(out):
        for name, text in table.beside(path).items():
            if name.startswith(f"{folder}/"):
                name = name.removeprefix(f"{folder}/")
                texts[name] = max(texts.get(name, ""), text)
    return dict(sorted((texts | {path.name: text for path, text in _loose(out, folder)}).items()))


def parse(line: bytes, kind: type[T] = Record) -> T:  # type: ignore[assignment]
    """Return the record of one line, or its head.

    Raises:
        NewerSchemaError: a later sparsebench wrote it.
        ValueError, in one line: it is none that this version can read.
    """
    try:
        return _parse(line, kind)
    except NewerSchemaError:
        raise
    except (ValueError, UserError, RecursionError) as error:
        raise ValueError(plain(" ".join(str(error).split()), 300)) from error


def _parse(line: bytes, kind: type[T]) -> T:
    try:
        item = kind.model_validate_json(line)
    except (ValueError, UserError):
        item = None
    if item is None or item.schema_version != SCHEMA or "schema_version" not in item.model_fields_set:
        item = kind.model_validate_json(canonical(upgrade(json.loads(line))).encode())
    if not _names_its_cell(line, item.cell_id):
        record = item if isinstance(item, Record) else _parse(line, Record)
        if record.cell.id != record.cell_id:
            raise ValueError(f"its cell has hash {record.cell.id}, not {record.cell_id}")
    if isinstance(item, Record) and item.outcomes is not None:
        item.outcomes.check()
    return item


def _names_its_cell(line: bytes, cell_id: str) -> bool:
    """Say whether a line begins with the canonical JSON of the cell, as those do that a `Writer` wrote.

    No text in JSON can hold the bytes that end it, as quotes in texts are escaped.
    """
    cell = line[len(CELL) : line.find(CELL_ID)] if line.startswith(CELL) else b""
    return hashlib.sha256(cell).hexdigest()[:16] == cell_id


def keep(folder: Path, value: object) -> None:
    """Write a value to the file of a folder that is named after it, unless it is there or in a sealed file."""
    path = folder / f"{digest(value)}.json"
    if not path.exists() and path.name not in beside(folder.parent, folder.name):
        files.write_whole(path, canonical(value).encode())
