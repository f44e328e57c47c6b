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
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from sparsebench.collector import without_collector
from sparsebench.errors import UserError, first_of
from sparsebench.records import files, table
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import SCHEMA, Head, Record
from sparsebench.text import plain

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN = 5
"""Lines of a segment that cannot be read and are named."""
LINE_BYTES = 2**22
"""Of one record."""
BESIDE = ("environments", "checks", "strategies", "suites", "metrics", "files", "strays", "pictures")
"""Folders whose .json files belong to records and are named after what they say."""


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
        for folder in (out, out / "records"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}", next_step="give another --out") from error


class Writer:
    """Appends records to a segment of its own, which nobody else ever writes.

    Raises:
        UserError: the folder cannot be written or was removed, or the disk is full. What was acknowledged before is
            whole.
    """

    def __init__(self, out: Path):
        self.folder = out / "records"
        self._file: int | None = None

    def append(self, record: Record) -> None:
        """Write one record; when this returns, the record is on the disk."""
        line = (canonical(record.model_dump(mode="json")) + "\n").encode()
        try:
            if self._file is None:
                self._file = self._open()
            self._write(self._file, line)
        except OSError as error:
            raise UserError(
                f"cannot write records to {self.folder}: {error.strerror or error}",
                next_step="what was recorded before is safe; mend it and give the same command again",
            ) from error

    def _write(self, file: int, line: bytes) -> None:
        if not os.fstat(file).st_nlink:
            raise OSError("it was removed while the run was under way, with what had been recorded there")
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

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        host = "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:40]
        path = self.folder / f"{stamp}-{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
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


def read(out: Path) -> dict[str, Record]:
    """Return the records of a run's folder that count, by cell; see `counting`. Of one that is not there none.

    Lines that cannot be read are left out with a warning: their cells count as not run.

    Raises:
        UserError: a record was written by a later sparsebench, or a sealed file is damaged.
    """
    return {record.cell_id: record for record in _each(out, lambda name: True, table.record_of)}


def heads(out: Path) -> dict[str, Head]:
    """Return what a resumed run must know of the same records; many times as fast, and in far less memory."""
    return {head.cell_id: head for head in _each(out, lambda name: name in table.HEAD, table.head_of)}


def _each(out: Path, columns: Callable[[str], bool], make: Callable[[table.Row], T]) -> list[T]:
    with without_collector():
        whole = _union(out, columns)
        return [] if whole is None else list(map(make, table.rows_of(counting(whole))))


def segments(out: Path) -> list[Path]:
    """Return the segments of a run's folder that are not sealed, by name."""
    return files.files_in(out / "records", ".jsonl")


def sealed(out: Path) -> list[Path]:
    """Return the sealed files of a run's folder, by name."""
    return files.files_in(out / "records", ".parquet")


def rows(out: Path, columns: Callable[[str], bool] = lambda name: True, *, counted: bool = True) -> pa.Table:
    """Return the records of a run's folder as a table, of the columns that are wanted; see `table`.

    Only those that count, see `counting`, unless all are wanted.

    Raises:
        UserError: the folder holds no records, some by a later sparsebench, or a sealed file that is damaged.
    """
    with without_collector():
        whole = _union(out, columns)
        if whole is None:
            raise nothing(out)
        return counting(whole) if counted else whole


def _union(out: Path, columns: Callable[[str], bool]) -> pa.Table | None:
    """Return all records of a folder.

    Segments are read first, so that one that is sealed meanwhile is read, if only from its file.
    """
    parts = [part for path in segments(out) for part in _parts(path, columns)]
    parts += [table.read(path, lambda name: name in table.CLAIM or columns(name)) for path in sealed(out)]
    return table.join(parts) if any(map(len, parts)) else None


def nothing(out: Path) -> UserError:
    """Return the error for a folder without records."""
    return UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")


def _parts(path: Path, columns: Callable[[str], bool] = lambda name: True) -> list[pa.Table]:
    """Return the rows of a segment, part by part, as so many records at once would take much memory."""
    parts, lines = [], scan(path)
    try:
        while len(part := table.table_of(islice(lines, table.BATCH))):
            parts.append(part.select([name for name in part.column_names if name in table.CLAIM or columns(name)]))
    except OSError as error:
        if path.exists():  # else it was sealed meanwhile
            files.leave_out(path, error)
    return parts


def scan(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield the records of a segment, with the CRC-32 of their lines; what cannot be read is left out with a warning.

    Raises:
        UserError: a record was written by a later sparsebench.
        OSError: the segment cannot be read.
    """
    name, unread = plain(path.name), 0
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(LINE_BYTES + 1)
            if not line.endswith(b"\n"):
                if line:
                    why = "too long" if len(line) > LINE_BYTES else "torn (a run was stopped while writing it)"
                    log.warning(f"{name}: line {number} is {why} and is left out, with what comes after it")
                break
            try:
                yield parse(line), zlib.crc32(line)
            except ValueError as error:
                if _is_newer(line):
                    raise UserError(f"{path} line {number}: {error}", next_step="upgrade sparsebench") from error
                unread += 1
                if unread <= SHOWN:
                    log.warning(f"{name} line {number} is left out: {error}")
    if unread > SHOWN:
        log.warning(f"{name}: {unread - SHOWN} more lines are left out")


def parse(line: bytes) -> Record:
    """Return the record of one line; ValueError, in one line, if it is none that this version can read."""
    try:
        record = Record.model_validate_json(line)
        if record.cell.id != record.cell_id:
            raise ValueError(f"its cell has hash {record.cell.id}, not {record.cell_id}")
        if record.outcomes is not None:
            record.outcomes.check()
    except ValidationError as error:
        raise ValueError(first_of(error)) from error
    except (ValueError, UserError) as error:
        raise ValueError(plain(" ".join(str(error).split()), 300)) from error
    return record


def _is_newer(line: bytes) -> bool:
    """Say whether a later sparsebench wrote a line that cannot be read."""
    with suppress(ValueError, TypeError, LookupError, RecursionError):
        return bool(json.loads(line)["schema_version"] > SCHEMA)
    return False


def counting(whole: pa.Table, *, each_source: bool = False) -> pa.Table:
    """Return the rows that count; of most cells there is only one.

    Of a cell and source of its strategy, see `Origin.identity`, that is the newest success, or else the newest failure;
    of a cell the newest of these, or with `each_source` all of them. It depends on no order, and may be done in parts.
    """
    import numpy as np
    import pyarrow as pa

    cells = whole["cell_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    keep = np.bincount(cells)[cells] == 1
    several = np.flatnonzero(~keep)
    if not several.size:
        return whole
    of_source: dict[tuple[str, str], tuple[Any, ...]] = {}
    claims = table.rows_of(whole.select(table.CLAIM).take(pa.array(several)))
    for place, claim in zip(several.tolist(), claims, strict=True):
        key = claim["cell_id"], f"{claim['distribution']} {claim['revision']}".strip()
        rank = claim["status"] == "ok", moment(claim["started"]), claim["checksum"], place
        of_source[key] = max(of_source.get(key, rank), rank)
    of_cell: dict[str, tuple[Any, ...]] = {}
    for (cell, source), (ok, started, checksum, place) in of_source.items():
        later = started, source, ok, checksum, place
        of_cell[cell] = max(of_cell.get(cell, later), later)
    keep[[rank[-1] for rank in (of_source if each_source else of_cell).values()]] = True
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
    for path in files.files_in(out / folder, ".json"):
        try:
            yield path, path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
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


def keep(folder: Path, value: object) -> None:
    """Write a value to the file of a folder that is named after it, unless it is there or in a sealed file."""
    path = folder / f"{digest(value)}.json"
    if not path.exists() and path.name not in beside(folder.parent, folder.name):
        files.write_whole(path, canonical(value).encode())


def merge(stores: Sequence[Path], out: Path) -> int:
    """Write the union of stores to a new folder, and return how many records it has.

    Of the records of a cell by the same revision of its strategy one stays, see `counting`: so stores may be merged one
    after the other, in any order, and the folder reads as all of them would. What lies beside the records is taken from
    the folders `BESIDE`; weights and checkpoints are not.

    Raises:
        UserError: a store has no records, or some by a later sparsebench; `out` is there, or cannot be written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    whole = counting(table.join([rows(each, counted=False) for each in stores]), each_source=True)
    texts: dict[str, str] = {}
    for each, folder in product(stores, BESIDE):
        for file, text in beside(each, folder).items():
            name = f"{folder}/{file}"
            if texts.get(name, text) != text:
                log.warning("%s differs between the stores; one of them is taken", name)
            texts[name] = max(texts.get(name, ""), text)
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        table.write(part / "records" / "merged.parquet", whole, texts)
        os.replace(part, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(whole)
