"""The store: append-only JSON lines, one new segment a writer, read as the union of all segments.

OUT/records/<utc>-<host>-<pid>-<random>.jsonl      one record a line, one fsynced write a record
OUT/environments/<hash>.json                        machine and libraries, once each
OUT/weights/<cell id>.safetensors                   weights that other cells start from
OUT/checkpoints/<cell id>.safetensors               a training under way, until its record is there
OUT/underway/<host>-<pid>.json                      how far a run is, until it is over
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.sweep.cell import canonical
from sparsebench.sweep.record import SCHEMA, Record

log = logging.getLogger(__name__)


def weights_path(out: Path, cell_id: str) -> Path:
    """Return where the trained weights of a cell lie."""
    return out / "weights" / f"{cell_id}.safetensors"


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def has_weights(out: Path, cell_id: str, known: Mapping[str, Record]) -> bool:
    """Say whether the trained weights of a cell lie there as its record, among the known, says they were written."""
    written = known[cell_id].notes.get("weights") if cell_id in known else None
    return written is not None and written == content_hash(weights_path(out, cell_id))


def checkpoint_path(out: Path, cell_id: str) -> Path:
    """Return where the checkpoint of a cell lies while it is trained."""
    return out / "checkpoints" / f"{cell_id}.safetensors"


def remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and what a process that was killed left of one."""
    path = checkpoint_path(out, cell_id)
    if not path.parent.exists():
        return
    with suppress(OSError):
        for found in (path, *path.parent.glob(f".{path.name}.*.part")):
            found.unlink(missing_ok=True)


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
        UserError: the folder cannot be written, or the disk is full. What was acknowledged before is whole.
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
            good = os.lseek(self._file, 0, os.SEEK_END)
            if os.write(self._file, line) != len(line):
                os.ftruncate(self._file, good)
                raise OSError("the disk is full")
            os.fsync(self._file)
        except OSError as error:
            raise UserError(f"cannot write records to {self.folder}: {error.strerror or error}") from error

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        host = "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:40]
        path = self.folder / f"{stamp}-{host}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return file

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(out: Path) -> dict[str, Record]:
    """Return the newest record of each cell in a run's folder; a failure does not replace a success of the same code.

    Lines that cannot be read are left out with a warning: their cells count as not run.
    """
    best: dict[str, Record] = {}
    for path in sorted((out / "records").glob("*.jsonl")):
        for record in _segment(path):
            known = best.get(record.cell_id)
            if known is None or _replaces(record, known):
                best[record.cell_id] = record
    return best


def _replaces(record: Record, known: Record) -> bool:
    if record.origin.sha256 == known.origin.sha256 and (record.status == "ok") != (known.status == "ok"):
        return record.status == "ok"
    return record.started >= known.started


def _segment(path: Path) -> Iterable[Record]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        log.warning("%s is left out: %s", path.name, error.strerror)
        return
    tail = lines.pop()
    if tail:
        log.warning("%s: the last line is torn (a run was stopped while writing it) and is left out", path.name)
    for number, line in enumerate(lines, 1):
        try:
            yield parse(line)
        except ValueError as error:
            log.warning("%s line %d is left out: %s", path.name, number, error)


def parse(line: bytes) -> Record:
    """Return the record of one line; ValueError, in one line, if it is none that this version can read."""
    try:
        return _parse(line)
    except (ValueError, UserError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error


def _parse(line: bytes) -> Record:
    raw = json.loads(line)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA:
        raise ValueError(f"schema version {version!r}, this sparsebench reads {SCHEMA}")
    record = Record.model_validate(raw)
    if record.cell.id != record.cell_id:
        raise ValueError(f"its cell has hash {record.cell.id}, not {record.cell_id}")
    return record


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there either whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()
