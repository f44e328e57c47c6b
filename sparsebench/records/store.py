"""The store: append-only JSON lines, one new segment a writer, read as the union of all segments.

OUT/records/<utc>-<host>-<pid>-<random>.jsonl      one record a line, one fsynced write a record
OUT/environments/<hash>.json                        machine and libraries, once each; see `described` for what else
OUT/weights/<cell id>.safetensors                   weights that other cells start from
OUT/checkpoints/<cell id>.safetensors               a training under way, until its record is there
OUT/fits/<hash>.safetensors                         what strategies learned from training images before a test
OUT/underway/<host>-<pid>.json                      how far a run is, until it is over
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import files, place
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import SCHEMA, Head, NewerSchemaError, Record, upgrade
from sparsebench.text import plain

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Head)
X = TypeVar("X")
SHOWN = 5
"""Lines of a segment that cannot be read and are named."""
CELL, CELL_ID = b'{"cell":', b',"cell_id":"'


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
        for folder in (self.folder, self.folder.parent):
            _sync_folder(folder)
        return file

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            file, self._file = self._file, None
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


class Found(NamedTuple, Generic[T]):
    """What one line of a segment holds, and where it stands.

    Attributes:
        offset, length: in bytes.
        checksum: CRC-32 of the line; what decides between records that nothing else does.
    """

    item: T
    path: Path
    offset: int
    length: int
    checksum: int

    @property
    def claim(self) -> Claim:
        """What decides whether it counts."""
        head = self.item
        return Claim(head.cell_id, head.origin.identity, head.status == "ok", head.started, self.checksum)


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
        UserError: a record was written by a later sparsebench.
    """
    with without_collector():
        return newest((stored.claim, stored.item) for stored in scan_all(out, Record))


def heads(out: Path) -> dict[str, Head]:
    """Return what a resumed run must know of the same records; several times as fast, and in far less memory."""
    with without_collector():
        return newest((stored.claim, stored.item) for stored in scan_all(out, Head))


def segments(out: Path) -> list[Path]:
    """Return the segments of a run's folder, by name."""
    return files.files_in(out / "records", ".jsonl")


def scan_all(out: Path, kind: type[T]) -> Iterator[Found[T]]:
    """Yield what the lines of all segments hold; what cannot be read is left out with a warning."""
    for path in segments(out):
        try:
            yield from scan(path, kind)
        except OSError as error:
            files.leave_out(path, error)


def scan(path: Path, kind: type[T], warn: Callable[[str], None] = log.warning) -> Iterator[Found[T]]:
    """Yield what the lines of a segment hold; those that cannot be read are left out with a warning.

    Raises:
        UserError: a record was written by a later sparsebench.
        OSError: the segment cannot be read.
    """
    name, number, offset, unread = plain(path.name), 0, 0, 0
    with files.open_file(path, files.MOST_BYTES) as file:
        while line := file.readline(files.LINE_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                why = "too long" if len(line) > files.LINE_BYTES else "torn (a run was stopped while writing it)"
                warn(f"{name}: line {number} is {why} and is left out, with what comes after it")
                break
            try:
                yield Found(parse(line, kind), path, offset, len(line), zlib.crc32(line))
            except NewerSchemaError as error:
                raise UserError(f"{path} line {number} has {error}", next_step="upgrade sparsebench") from error
            except ValueError as error:
                unread += 1
                if unread <= SHOWN:
                    warn(f"{name} line {number} is left out: {error}")
            offset += len(line)
    if unread > SHOWN:
        warn(f"{name}: {unread - SHOWN} more lines are left out")


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
    """Write a value to the file of a folder that is named after it, unless it is there."""
    path = folder / f"{digest(value)}.json"
    if not path.exists():
        files.write_whole(path, canonical(value).encode())
