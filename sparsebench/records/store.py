"""The store: a run appends JSON lines to a segment of its own, and seals it when it ends; readers take the union.

OUT/records/<utc>-<host>-<pid>-<random>.jsonl      one record a line, one fsynced write a record, while a run goes on
OUT/records/<the same>.parquet                      the same records, sealed, with what lay beside them; see `table`
OUT/environments/<hash>.json                        machine and libraries, once each; see `manifests` for what else
OUT/weights/<cell id>.safetensors                   weights that other cells start from
OUT/checkpoints/<cell id>.pt                        a training under way, until its record is there
OUT/underway/<host>-<pid>.json                      how far a run is, until it is over
OUT/.cells.lock                                     whose bytes are the locks of cells that runs are at
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter

from sparsebench import files
from sparsebench.errors import UserError, plain, reason_of
from sparsebench.records import table
from sparsebench.records.record import Head, Record, VersionError, canonical, digest
from sparsebench.records.table import ALL, Columns

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

T = TypeVar("T")
SIDECARS = ("environments", "checks", "strategies", "suites", "metrics", "files")
"""Folders whose .json files belong to records and are named after what they say."""


def weights_path(out: Path, cell_id: str) -> Path:
    """Return where the trained weights of a cell lie."""
    return out / "weights" / f"{cell_id}.safetensors"


def checkpoint_path(out: Path, cell_id: str) -> Path:
    """Return where the checkpoint of a cell lies while it is trained."""
    return out / "checkpoints" / f"{cell_id}.pt"


def check_writable(out: Path) -> None:
    """Raise UserError unless records can be written to a run's folder; makes it if it is not there."""
    for folder in (out, out / "records"):
        files.check_writable(folder, "give another --out")


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
            if not os.fstat(self._file).st_nlink:
                raise OSError("it was removed while the run was under way, with what had been recorded there")
            if os.write(self._file, line) != len(line):
                raise OSError("the disk is full")
            os.fsync(self._file)  # network file systems may say only here that the disk is full
        except OSError as error:
            self.close()  # what was written of the line stays the last of its segment: the next goes to another one
            raise UserError(
                f"cannot write records to {self.folder}: {error.strerror or error}",
                next_step="what was recorded before is safe; mend it and give the same command again",
            ) from error

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = self.folder / f"{stamp}{process_tag()}{secrets.token_hex(4)}.jsonl"
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
            with suppress(OSError):
                os.close(file)


def process_tag() -> str:
    """Return what names of files say of the process that writes them."""
    host = "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:40]
    return f"-{host}-{os.getpid()}-"


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some network file systems cannot, and need not
        os.fsync(folder)
    os.close(folder)


def read(out: Path, *, needed: bool = False) -> dict[str, Record]:
    """Return the records of a run's folder that count, by cell; see `rows`."""
    records = map(table.record_of, table.rows_of(rows(out, needed=needed)))
    return {record.cell_id: record for record in records}


def heads(out: Path) -> dict[str, Head]:
    """Return what a resumed run must know of the same records; many times as fast, and in far less memory."""
    items = table.heads_of(rows(out, lambda name: name in table.HEAD, needed=False))
    return {head.cell_id: head for head in items}


def rows(out: Path, columns: Columns = ALL, *, counted: bool = True, needed: bool = True) -> pa.Table:
    """Return the records of a run's folder as a table, of the columns that are wanted; see `table`.

    Only those that count, see `counting`, unless all are wanted. Lines that cannot be read are left out with a warning:
    their cells count as not run. Segments are read first, so that one that is sealed meanwhile is read, if only from
    its file.

    Raises:
        UserError: the folder holds no records, which are `needed`, some of a version that is not read, or a sealed file
            that is damaged.
    """

    def is_read(name: str) -> bool:
        return name in table.CLAIM or columns(name)

    parts: list[pa.Table] = []
    for path in segments(out):
        try:
            parts += _segment(path, is_read)[0]
        except OSError as error:
            if path.exists():  # else it was sealed meanwhile
                files.leave_out(path, error)
    parts += [table.read(path, is_read) for path in sealed_files(out)]
    whole = table.join(parts or [table.table_of([])])
    if needed and not len(whole):
        raise UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")
    return counting(whole) if counted else whole


def segments(out: Path) -> list[Path]:
    """Return the segments of a run's folder that are not sealed, by name."""
    return files.files_in(out / "records", ".jsonl")


def sealed_files(out: Path) -> list[Path]:
    """Return the sealed files of a run's folder, by name."""
    return files.files_in(out / "records", ".parquet")


def _segment(path: Path, columns: Columns = ALL) -> tuple[list[pa.Table], bool]:
    """Return the rows of a segment, part by part, as it would take much memory at once, and whether it is whole.

    Lines that cannot be read are left out with a warning. A torn last line makes it no less whole: its run was stopped.

    Raises:
        UserError: a record is of a version that is not read.
        OSError: the segment cannot be read.
    """
    parts: list[pa.Table] = []
    odd: list[str] = []

    def records(lines: Iterable[bytes]) -> Iterator[tuple[Record, int]]:
        for number, line in enumerate(lines, 1):
            try:
                if line.endswith(b"\n"):
                    yield parse(line), zlib.crc32(line)
                else:
                    log.warning(f"{plain(path.name)}: line {number} is torn (a run was stopped while writing it)")
            except VersionError as error:
                raise UserError(f"{path} line {number}: {error}") from error
            except ValueError as error:
                odd.append(f"line {number} is left out: {error}")

    with path.open("rb") as file:
        read = records(file)
        while len(part := table.table_of(islice(read, table.BATCH))):
            parts.append(part.select(list(filter(columns, part.column_names))))
    if odd:
        more = f" (and {len(odd) - 1} more lines)" if len(odd) > 1 else ""
        log.warning(f"{plain(path.name)} {odd[0]}{more}")
    return parts, not odd


def parse(line: bytes) -> Record:
    """Return the record of one line; ValueError, in one line, if it is none, VersionError if it is of another."""
    try:
        record = Record.model_validate_json(line)
        if record.cell.id != record.cell_id:
            raise ValueError(f"its cell has hash {record.cell.id}, not {record.cell_id}")
    except VersionError:
        raise
    except (ValueError, UserError) as error:
        raise ValueError(reason_of(error)) from error
    return record


def counting(whole: pa.Table, *, each_source: bool = False) -> pa.Table:
    """Return the rows that count; of most cells there is only one.

    Of a cell and source of its strategy, see `Origin.identity`, that is the newest success, or else the newest failure;
    of a cell the newest of these, or with `each_source` all of them. It depends on no order, and may be done in parts.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.count_distinct(whole["cell_id"]).as_py() == len(whole):
        return whole
    claims = whole.select(table.CLAIM).to_pandas().astype({"distribution": str, "revision": str})
    claims["ok"] = claims["status"] == "ok"
    source = ["distribution", "revision"]
    claims = claims.sort_values(["ok", "started", "checksum"]).drop_duplicates(["cell_id", *source], keep="last")
    if not each_source:
        claims = claims.sort_values(["started", *source, "ok", "checksum"]).drop_duplicates("cell_id", keep="last")
    return whole.take(pa.array(sorted(claims.index)))


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
            parts, whole = _segment(path)
            if not whole:
                continue
            loose = _loose_texts(out, SIDECARS) if parts else {}
            if parts:
                table.write(path.with_suffix(".parquet"), table.join(parts), loose)
            path.unlink()
            _sync_folder(path.parent)
            for name in loose:
                (out / name).unlink(missing_ok=True)
    for folder in SIDECARS:
        with suppress(OSError):  # it is not there, or not empty
            (out / folder).rmdir()


def _loose_texts(out: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return by file name what lies in some of the folders `SIDECARS`; what is no text is left out."""
    texts = {}
    for path in (path for folder in folders for path in files.files_in(out / folder, ".json")):
        try:
            texts[f"{path.parent.name}/{path.name}"] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            files.leave_out(path, error)
    return texts


def sidecars(out: Path, *folders: str) -> dict[str, str]:
    """Return by file name what lies beside records, in some of the folders `SIDECARS` or in sealed files.

    Of several texts under one name what is in the folder counts, else the greatest.
    """
    texts = dict(sorted(item for path in sealed_files(out) for item in table.sidecars(path).items()))
    texts |= _loose_texts(out, folders)
    return {name: text for name, text in sorted(texts.items()) if name.split("/")[0] in folders}


def values(out: Path, folder: str, kind: type[T]) -> dict[str, T]:
    """Return what lies beside records in one of the folders as values of a type; what is none is left out."""
    read, entries = TypeAdapter(kind).validate_json, {}
    for name, text in sidecars(out, folder).items():
        try:
            entries[name.removeprefix(f"{folder}/")] = read(text)
        except (ValueError, UserError) as error:
            files.leave_out(Path(name), error)
    return entries


def keep(folder: Path, value: object) -> None:
    """Write a value to the file of a folder that is named after it, unless it is there or in a sealed file."""
    path = folder / f"{digest(value)}.json"
    if not path.exists() and f"{folder.name}/{path.name}" not in sidecars(folder.parent, folder.name):
        files.write_whole(path, canonical(value).encode())


def merge(stores: Sequence[Path], out: Path) -> int:
    """Write the union of stores to a new folder, and return how many records it has.

    Of the records of a cell by the same revision of its strategy one stays, see `counting`: so stores may be merged one
    after the other, in any order, and the folder reads as all of them would. Weights and checkpoints are left out.

    Raises:
        UserError: a store has no records, or some of another version; `out` is there, or cannot be written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    whole = counting(table.join([rows(folder, counted=False) for folder in stores]), each_source=True)
    texts = (item for folder in stores for item in sidecars(folder, *SIDECARS).items())
    table.write(out / "records" / "merged.parquet", whole, dict(sorted(texts)))
    return len(whole)
