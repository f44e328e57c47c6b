"""The store: each run appends JSON lines to its own segment, and seals it at the end. Readers take the union.

OUT/records/<utc>-<host>-<pid>-<random>.jsonl      one record per line, one write and fsync per record, during a run
OUT/records/<the same>.parquet                      the same records, sealed, with the sidecar files; see `table`
OUT/environments/<hash>.json                        a machine with its libraries; `manifests` has the other sidecars
OUT/weights/<cell id>.safetensors                   weights that other cells start from
OUT/checkpoints/<cell id>.pt                        state of an unfinished training, until its record is stored
OUT/features/<hash>.safetensors                     features that probes learn from, until the run ends
OUT/underway/<host>-<pid>.json                      progress of a run, until no cells are left
OUT/underway/<host>-<pid>-<random>.cells            the cells of the run and of other shards, until all have records
OUT/.cells.lock                                     byte-range locks of the cells that are running
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pydantic import TypeAdapter

from sparsebench import files
from sparsebench.errors import UserError, plain, reason_of
from sparsebench.records import table
from sparsebench.records.record import Record, RecordSummary, VersionError, canonical, digest
from sparsebench.records.table import ALL, Columns

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

T = TypeVar("T")
SIDECARS = ("environments", "checks", "strategies", "suites", "metrics", "files")
"""Folders of sidecars: .json files that describe records, each named after the hash of its content."""
INDEX = frozenset({*table.SUMMARY, "strategy", "kind"})
"""The columns that an open store keeps in memory."""

SEGMENT = re.compile(r"-(?P<host>[\w-]*)-(?P<pid>\d+)-[0-9a-f]+\.jsonl$")
"""Matches the end of a segment's name, which names its writer. Early versions named no writer."""
DEAD_WRITER_AFTER = 7 * 24 * 3600.0
"""Seconds without a new record after which the writer of another machine's segment counts as dead."""


def weights_path(out: Path, cell_id: str) -> Path:
    """Return the path of the trained weights of a cell."""
    return out / "weights" / f"{cell_id}.safetensors"


def checkpoint_path(out: Path, cell_id: str) -> Path:
    """Return the path of the checkpoint of a cell during its training."""
    return out / "checkpoints" / f"{cell_id}.pt"


def features_path(out: Path, name: str) -> Path:
    """Return the path of the features with this name, see `Job.features`."""
    return out / "features" / f"{name}.safetensors"


def check_writable(out: Path) -> None:
    """Raise UserError unless records can be written to a run's folder. Creates the folder if it does not exist."""
    for folder in (out, out / "records"):
        files.check_writable(folder, "give another --out")


class Writer:
    """Appends records to its own segment, which no other process writes.

    If another run has sealed the segment, although it should not, the next record begins a new segment.

    Raises:
        UserError: if the folder is not writable or was removed, or if the disk is full. Unless they were removed,
            records that `append` wrote before are complete.
    """

    def __init__(self, out: Path):
        self.folder = out / "records"
        self._file: int | None = None
        self._path = self.folder

    def append(self, record: Record) -> None:
        """Write one record. The record is on the disk when this method returns."""
        line = (canonical(record.model_dump(mode="json")) + "\n").encode()
        try:
            if self._file is None:
                self._file = self._open()
            if not self._write(self._file, line):
                self.close()
                if not self._path.with_suffix(".parquet").exists():
                    raise UserError(
                        f"{self._path} was removed during the run, with the records in it",
                        next_step="run the same command again: it computes what is missing",
                    )
                self._file = self._open()
                self._write(self._file, line)
        except OSError as error:
            self.close()  # the torn line stays the last of its segment: the next record goes to a new segment
            raise UserError(
                f"cannot write records to {self.folder}: {error.strerror or error}",
                next_step="earlier records are safe; solve the problem and run the same command again",
            ) from error

    def _write(self, file: int, line: bytes) -> bool:
        """Write a line to the disk, and return whether the segment still exists then."""
        try:
            if os.write(file, line) != len(line):
                raise OSError("the disk is full")
            os.fsync(file)  # network file systems may report a full disk only here
            return os.fstat(file).st_nlink > 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # another machine removed the file
                raise
            return False

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self._path = self.folder / f"{stamp}{process_tag()}{secrets.token_hex(4)}.jsonl"
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        with suppress(OSError):  # file systems without locks
            files.lock(file)  # no other process of this machine seals the segment while this process lives
        for folder in (self.folder, self.folder.parent):
            _sync_folder(folder)
        return file

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            file, self._file = self._file, None
            files.unlock(file)
            with suppress(OSError):
                os.close(file)


def process_tag() -> str:
    """Return the host name and the id of this process, for names of files that it writes."""
    return f"-{_host()}-{os.getpid()}-"


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum() or c == "-")[:40]


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine exists. On Windows, where this is not known, it is taken to exist."""
    if sys.platform == "win32":  # os.kill would end the process there
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # Windows and some network file systems do not support this, and do not need it
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _SealedFile(NamedTuple):
    """What an open store keeps of a sealed file.

    Attributes:
        state: time, size and number of the file when it was read. Another state means another file.
        index: the columns INDEX of its rows.
        sidecars: the texts of its sidecars by file name.
    """

    state: tuple[int, int, int]
    index: pa.Table
    sidecars: Mapping[str, str]


class Store:
    """An open store: the records of a run's folder with their sidecars.

    Summaries and sidecars are read at the first question about them, and are the same until `refresh`. Each sealed file
    is opened once for both. Each call of `rows` or `records` opens it again: their columns may take much memory, and
    are not kept.

    Attributes:
        path: the run's folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self._sealed: dict[Path, _SealedFile] = {}
        self._index: pa.Table | None = None
        self._sidecars: Mapping[str, str] | None = None

    @classmethod
    def open(cls, folder: Path | Store) -> Store:
        """Return the store of a folder; an open store is returned as it is."""
        return folder if isinstance(folder, Store) else cls(folder)

    def refresh(self) -> None:
        """Look at the folder again at the next question. Sealed files that did not change are not opened again."""
        self._index = self._sidecars = None

    def index(self, *, counted: bool = True) -> pa.Table:
        """Return the columns INDEX of the records that count, or of all records."""
        if self._index is None:
            self._index = self._join(lambda name: name in INDEX, lambda path: self._read_sealed(path).index)
        return counting(self._index) if counted else self._index

    def summaries(self) -> dict[str, RecordSummary]:
        """Return the summaries of the records that count, by cell id."""
        return {summary.cell_id: summary for summary in table.summaries_of(self.index())}

    def newest(self) -> dict[str, str]:
        """Return when the newest record of each cell began, by cell id, whether it counts or not."""
        index = self.index(counted=False)
        started: dict[str, str] = {}
        for cell_id, begin in zip(index["cell_id"].to_pylist(), index["started"].to_pylist(), strict=True):
            started[cell_id] = max(begin, started.get(cell_id, ""))
        return started

    def records(self, *, needed: bool = False) -> dict[str, Record]:
        """Return the records that count now, by cell id; see `rows`. This takes many times longer than `summaries`."""
        records = map(table.record_of, table.rows_of(self.rows(needed=needed)))
        return {record.cell_id: record for record in records}

    def rows(self, columns: Columns = ALL, *, counted: bool = True, needed: bool = True) -> pa.Table:
        """Return the records that the folder has now as a table; see `table`.

        With `counted`, the table has only the records that count, see `counting`. Unreadable lines are left out with a
        warning; their cells count as not run.

        Raises:
            UserError: if the folder has no records and they are `needed`, a record has an unsupported version, or a
                sealed file is damaged.
        """

        def is_read(name: str) -> bool:
            return name in table.CLAIM or columns(name)

        records = self._join(is_read, lambda path: table.read(path, is_read))
        if needed and not len(records):
            below = folders_below(self.path)
            next_step = "run `sparsebench run --out` with this folder first"
            if below:
                first = plain(below[0])
                next_step = f"name one of the {len(below)} folders below it that have records, such as {first}"
            raise UserError(f"no records in {self.path}", next_step=next_step)
        return counting(records) if counted else records

    def sidecars(self, *folders: str) -> dict[str, str]:
        """Return the sidecars of the given folders as texts, by file name, also those in sealed files.

        If there are several texts of one name, the text in the folder counts, or otherwise the last in sorted order.
        """
        texts = sorted(self._texts().items())
        return {name: text for name, text in texts if name.split("/")[0] in folders}

    def values(self, folder: str, kind: type[T]) -> dict[str, T]:
        """Return the sidecars of one folder as values of a type, by file name. Invalid values are left out."""
        adapter, entries = TypeAdapter(kind), {}
        for name, text in self.sidecars(folder).items():
            try:
                entries[name.removeprefix(f"{folder}/")] = adapter.validate_json(text)
            except (ValueError, UserError) as error:
                files.leave_out(Path(name), error)
        return entries

    def keep(self, folder: str, value: object) -> None:
        """Write a value as a sidecar named after its hash, unless the folder or a sealed file has it already."""
        name = f"{folder}/{digest(value)}.json"
        path = self.path / name
        if not path.exists() and name not in self._texts():
            files.write_whole(path, canonical(value).encode())

    def _texts(self) -> Mapping[str, str]:
        """Return all sidecars as texts, by file name."""
        if self._sidecars is None:
            loose = _loose_texts(self.path, SIDECARS)  # before sealed files: what is sealed meanwhile is not missed
            sealed = [self._read_sealed(path).sidecars for path in sealed_files(self.path)]
            self._sidecars = dict(sorted(item for texts in sealed for item in texts.items())) | loose
        return self._sidecars

    def _read_sealed(self, path: Path) -> _SealedFile:
        """Return what is kept of a sealed file. The file is opened only if it is new."""
        known = self._sealed.get(path)
        try:
            about = path.stat()
            state = about.st_mtime_ns, about.st_size, about.st_ino
        except OSError:  # reading it says why
            state = 0, 0, 0
        if known is None or known.state != state:
            index, texts = table.read_with_sidecars(path, lambda name: name in INDEX)
            known = self._sealed[path] = _SealedFile(state, index, texts)
        return known

    def _join(self, columns: Columns, read_sealed: Callable[[Path], pa.Table]) -> pa.Table:
        """Return the rows of all segments and sealed files.

        Segments are read before sealed files, so that a segment that is sealed in the meantime is not missed.
        """
        parts: list[pa.Table] = []
        for path in segments(self.path):
            try:
                parts += _segment(path, columns)[0]
            except OSError as error:
                if path.exists():  # otherwise it was sealed in the meantime
                    files.leave_out(path, error)
        for path in sealed_files(self.path):
            parts.append(read_sealed(path))
        return table.join(parts or [table.table_of([]).select(list(filter(columns, table.TYPE_OF_COLUMN)))])


def read(out: Path, *, needed: bool = False) -> dict[str, Record]:
    """Return the records of a run's folder that count, by cell id; see `Store.records`."""
    return Store(out).records(needed=needed)


def summaries(out: Path) -> dict[str, RecordSummary]:
    """Return the summaries of the same records, by cell id. This is many times faster than `read`, in less memory."""
    return Store(out).summaries()


def rows(out: Path, columns: Columns = ALL, *, counted: bool = True, needed: bool = True) -> pa.Table:
    """Return the records of a run's folder as a table; see `Store.rows`."""
    return Store(out).rows(columns, counted=counted, needed=needed)


def sidecars(out: Path, *folders: str) -> dict[str, str]:
    """Return the sidecars of a run's folder as texts, by file name; see `Store.sidecars`."""
    return Store(out).sidecars(*folders)


def folders_below(folder: Path) -> list[Path]:
    """Return the folders with records below a folder, at most three levels deep, as those of submissions are."""
    places: list[Path] = []
    for level in ("*", "*/*", "*/*/*"):
        places += (path.parent for path in folder.glob(f"{level}/records"))
    with_records = []
    for place in sorted(places):
        is_hidden = any(part.startswith(".") for part in place.relative_to(folder).parts)
        if not is_hidden and (segments(place) or sealed_files(place)):
            with_records.append(place)
    return with_records


def segments(out: Path) -> list[Path]:
    """Return the unsealed segments of a run's folder, sorted by name."""
    return files.files_in(out / "records", ".jsonl")


def sealed_files(out: Path) -> list[Path]:
    """Return the sealed files of a run's folder, sorted by name."""
    return files.files_in(out / "records", ".parquet")


def _segment(path: Path, columns: Columns = ALL) -> tuple[list[pa.Table], bool]:
    """Return the rows of a segment and whether the segment is whole. The rows are read in parts to save memory.

    Unreadable lines are left out with a warning. A segment with a torn last line is whole: its run was stopped.

    Raises:
        UserError: if a record has an unsupported version.
        OSError: if the segment cannot be read.
    """
    parts: list[pa.Table] = []
    errors: list[str] = []

    def records(lines: Iterable[bytes]) -> Iterator[tuple[Record, int]]:
        for number, line in enumerate(lines, 1):
            try:
                if line.endswith(b"\n"):
                    yield parse(line), zlib.crc32(line)
                else:
                    log.warning(f"{plain(path.name)}: line {number} is torn (a run was stopped, or is writing it)")
            except VersionError as error:
                raise UserError(f"{path} line {number}: {error}") from error
            except ValueError as error:
                errors.append(f"line {number} is left out: {error}")

    with path.open("rb") as file:
        read = records(file)
        while len(part := table.table_of(islice(read, table.BATCH))):
            parts.append(part.select(list(filter(columns, part.column_names))))
    if errors:
        more = f" (and {len(errors) - 1} more lines)" if len(errors) > 1 else ""
        log.warning(f"{plain(path.name)} {errors[0]}{more}")
    return parts, not errors


def parse(line: bytes) -> Record:
    """Return the record of a line. Raise VersionError for an unsupported version, else ValueError with one line."""
    try:
        record = Record.model_validate_json(line)
        if record.cell.id != record.cell_id:
            raise ValueError(f"its cell has hash {record.cell.id}, not {record.cell_id}")
    except VersionError:
        raise
    except (ValueError, UserError) as error:
        raise ValueError(reason_of(error)) from error
    return record


def counting(records: pa.Table, *, each_source: bool = False) -> pa.Table:
    """Return the rows that count.

    For each cell and source of its strategy (see `Origin.identity`) this is the newest success, or else the newest
    failure. For each cell it is the newest of these, or all of them with `each_source`. The order of rows does not
    matter, and parts may be reduced first.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.count_distinct(records["cell_id"]).as_py() == len(records):
        return records
    claims = records.select(table.CLAIM).to_pandas().astype({"distribution": str, "revision": str})
    claims["ok"] = claims["status"] == "ok"
    source = ["distribution", "revision"]
    claims = claims.sort_values(["ok", "started", "checksum"]).drop_duplicates(["cell_id", *source], keep="last")
    if not each_source:
        claims = claims.sort_values(["started", *source, "ok", "checksum"]).drop_duplicates("cell_id", keep="last")
    return records.take(pa.array(sorted(claims.index)))


def seal(out: Path) -> None:
    """Seal the segments of a run's folder that no process writes, each into a Parquet file of the same name.

    The sidecars are moved into the file. If the process is killed, unfinished segments stay unchanged. A segment with
    an unreadable line other than a torn last line, or one that grows meanwhile, stays unchanged too.

    Raises:
        UserError: if a file cannot be written.
    """
    for path in segments(out):
        with suppress(OSError), path.open("rb") as file:
            if _may_be_written(path, file.fileno()):
                continue
            size = os.fstat(file.fileno()).st_size
            parts, whole = _segment(path)
            if not whole:
                continue
            loose = {}
            if parts:
                loose = _loose_texts(out, SIDECARS)
                table.write(path.with_suffix(".parquet"), table.join(parts), loose)
            with path.open("rb") as again:  # network file systems show the true size to those who open the file
                grew = os.fstat(again.fileno()).st_size != size
            if grew:  # a later `seal` replaces the Parquet file
                continue
            path.unlink()
            _sync_folder(path.parent)
            for name in loose:
                (out / name).unlink(missing_ok=True)
    for folder in SIDECARS:
        with suppress(OSError):  # the folder does not exist or is not empty
            (out / folder).rmdir()


def _may_be_written(path: Path, file: int) -> bool:
    """Lock a segment; return whether a process may still write to it, or seals it.

    On network file systems, locks may hold on one machine only or do nothing. So they decide only if the name of the
    segment does not: the segment of another machine counts as written until it has had no new record for
    `DEAD_WRITER_AFTER`, and that of a process of this machine until the process has ended.
    """
    writer = SEGMENT.search(path.name)
    if writer is not None and writer["host"] != _host():
        written = time.time() - os.fstat(file).st_mtime < DEAD_WRITER_AFTER
    else:
        pid = int(writer["pid"]) if writer is not None else os.getpid()
        written = pid != os.getpid() and process_exists(pid)
    if written:
        return True
    try:
        files.lock(file)
    except BlockingIOError:
        return True
    except OSError:  # no locks
        return False
    return False


def _loose_texts(out: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return the sidecars in the given folders as texts, by file name. Files that are not text are left out."""
    texts = {}
    for path in (path for folder in folders for path in files.files_in(out / folder, ".json")):
        try:
            texts[f"{path.parent.name}/{path.name}"] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            files.leave_out(path, error)
    return texts


def merge(stores: Sequence[Path], out: Path) -> int:
    """Write the union of stores to a new folder, and return its number of records.

    For each cell and revision of its strategy one record is kept, see `counting`. So stores may be merged in several
    steps and in any order, and the same records count as in all stores together. Weights and checkpoints are left out.

    Raises:
        UserError: if a store has no records, or records of an unsupported version; if `out` exists and is not an empty
            folder, or cannot be written.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} already exists and is not overwritten", next_step="give another -o")
    several = [Store(folder) for folder in stores]
    records = counting(table.join([store.rows(counted=False) for store in several]), each_source=True)
    texts = (item for store in several for item in store.sidecars(*SIDECARS).items())
    table.write(out / "records" / "merged.parquet", records, dict(sorted(texts)))
    return len(records)
