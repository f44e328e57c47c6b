"""Records as a table, a row each: what boards and exports are made of, and the sealed Parquet file that holds one.

A row says what a record is about in plain columns, then the rest of it, from which the record can be made again but
for the losses of its test items. docs/reference/records.md says what the columns are. Of texts that many rows share a
file has each once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebench.errors import UserError
from sparsebench.measure.metrics import kind_of
from sparsebench.records import files
from sparsebench.records.cell import NETWORK, Cell, canonical
from sparsebench.records.origin import Origin
from sparsebench.records.record import MOST_METRICS, SCHEMA, Head, Metric, Outcomes, Record, pack, unpack
from sparsebench.text import plain

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = dict[str, Any]

ITEMS, LABELS, PREDICTIONS, RANKS = "test_items", "test_labels", "test_predictions", "test_ranks"
GROUPS, FOREGROUNDS = "test_groups", "test_foregrounds"
OUTCOMES = (ITEMS, LABELS, PREDICTIONS)
"""Columns of the test's outcomes: how many there are, then (n,) whole numbers each, as bytes; see `numbers_of`."""
CHECKSUM = "checksum"
"""The column of the CRC-32 of a record's line, which decides between records that nothing else does."""
CLAIM = ("cell_id", "distribution", "revision", "status", "started", CHECKSUM)
"""Columns that decide which of several records of a cell counts, see `store.counting`."""
HEAD = (*CLAIM, "notes", "plugin", "version", "setting", "n_train", "seconds", "memory")
"""Columns that a `Head` is made of."""
TEXTS = (
    "cell_id", "status", "reason", "task", "model", "strategy", "kind", "budget", "track", "network", "setting",
    "device", "started", "plugin", "distribution", "version", "revision", "environment", "inactive", "cost_model",
)  # fmt: skip
COUNTS = ("n_train", "repetition", ITEMS)
REALS = ("macs_ratio_asked", "seconds")
NUMBERS = (LABELS, GROUPS, FOREGROUNDS, PREDICTIONS, RANKS)
PARTS = ("cell", "init", "metrics", "trajectory", "samples", "notes", "failure")
"""Columns of JSON: the rest of a record, see `_parts`. The metrics' values and intervals are columns of their own."""
DIFFERENT = ("cell_id", "started", "samples", PREDICTIONS, RANKS)
"""Columns whose values are for the most part all different; of the others each value is stored once."""
ORDER = ("setting", "track", "n_train", "repetition", "network", "init", "strategy", "budget", "cell_id", "revision",
         CHECKSUM)  # fmt: skip
"""What rows of a file are sorted by: predictions of one network on the same items are alike, and stand together."""
BATCH = 20_000
"""Records of one row group."""
FORMAT, ABOUT = 1, b"sparsebench"
LEVEL = 12
"""Of zstd; higher ones take much longer for a few percent."""
LONG = 1000
"""Characters of a text in a row, but for a setting, which is JSON."""
TAKEN = frozenset({"checks", "checks_remark"})
"""Columns that a metric cannot have, besides those of rows."""
WHERE = {"both": "", "train": ", in training only", "test": ", in the test only"}
"""What a budget's text says of where it holds; in the frozen track it is the test everywhere."""


def setting_of(cell: Cell) -> str:
    """Return what a cell tests, in JSON: task, model, and what a network is trained on before.

    Networks of two trainings are two settings; their repetitions are not, nor are checkpoints of one architecture.
    """
    model = cell.model.model_dump()
    if cell.network:
        model["params"] = {name: value for name, value in model["params"].items() if name not in NETWORK}
    trainings = [] if cell.track == "scratch" else cell.inits
    network = [[part.task.model_dump(), part.model.model_dump(), part.n_train] for part in trainings]
    return plain(canonical([cell.task.model_dump(), model, *network]), None)


def row_of(record: Record) -> Row:
    """Return what a record is about, without its metrics and outcomes; its texts are plain, whoever wrote them."""
    cell, origin = record.cell, record.origin
    track = cell.track if cell.n_train else "frozen"  # without training samples weights are tested as they are
    about = {
        "cell_id": record.cell_id,
        "status": record.status,
        "reason": record.failure.reason if record.failure else "",
        "task": cell.task.name,
        "model": cell.model.name,
        "strategy": record.label,
        "kind": record.kind,
        "budget": cell.budget.label + ("" if track == "frozen" else WHERE[cell.where]),
        "n_train": cell.n_train,
        "track": track,
        "repetition": cell.repetition,
        "network": cell.network,
        "macs_ratio_asked": None if cell.where == "train" else cell.budget.macs,
        "setting": setting_of(cell),
        "device": record.device,
        "started": record.started,
        "seconds": record.seconds,
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
        "revision": origin.revision,
        "environment": record.environment,
        "inactive": record.notes.get("inactive", ""),
        "cost_model": record.notes.get("cost_model", ""),
        ITEMS: record.outcomes.n if record.outcomes else 0,
    }
    return {name: plain(x, LONG) if type(x) is str and name != "setting" else x for name, x in about.items()}


def numbers_of(content: bytes, n: int) -> np.ndarray:
    """Return the (n,) whole numbers of a cell of a column of outcomes: little-endian, of one byte or two each."""
    return np.frombuffer(content, "<u1" if len(content) == n else "<u2").astype(np.int64)


def bytes_of(numbers: np.ndarray) -> bytes:
    """Return (n,) whole numbers from 0 to 65535 as `numbers_of` reads them."""
    return numbers.astype("<u1" if numbers.max(initial=0) < 256 else "<u2").tobytes()


def _unpacked(text: str, n: int) -> bytes:
    """Return the numbers that a record packs; none where it has none."""
    return bytes_of(unpack(text, n)) if text else b""


_shared = lru_cache(maxsize=256)(_unpacked)
"""Of labels, groups and foregrounds, which many records have the same."""


def _numbers(outcomes: Outcomes | None) -> tuple[bytes, ...]:
    if outcomes is None:
        return (b"",) * len(NUMBERS)
    shared = (_shared(text, outcomes.n) for text in (outcomes.label, outcomes.group, outcomes.foreground))
    return (*shared, _unpacked(outcomes.predicted, outcomes.n), _unpacked(outcomes.rank, outcomes.n))


def _parts(record: Record) -> tuple[str | None, ...]:
    """Return what of a record the plain columns do not say, as JSON; None for what is empty.

    Of the cell all but what it starts from, which is `init`, and what plain columns say of it: n_train and repetition.
    Of a metric unit, n and method.
    """
    cell = record.cell.model_dump(mode="json", exclude={"init", "n_train", "repetition"})
    init = record.cell.init
    metrics = {name: [metric.unit, metric.n, metric.method] for name, metric in metrics_of(record).items()}
    failure = None if record.failure is None else record.failure.model_dump(mode="json")
    steps = [step.model_dump(mode="json") for step in record.trajectory]
    parts = (cell, init and init.model_dump(mode="json"), metrics, steps, record.samples, record.notes, failure)
    return tuple(canonical(part) if part else None for part in parts)


def metrics_of(record: Record) -> dict[str, Metric]:
    """Return a record's metrics by their names, made plain, without those that are called as other columns."""
    named = {plain(name): metric for name, metric in record.metrics.items()}
    return {name: metric for name, metric in named.items() if is_metric(name)}


def table_of(stored: Iterable[tuple[Record, int]]) -> pa.Table:
    """Return records, each with the checksum of its line, as a table; see `row_of`, NUMBERS and `_parts`."""
    import pyarrow as pa

    rows: list[tuple[Any, ...]] = []
    places: dict[str, list[int]] = defaultdict(list)
    measured: dict[str, list[Metric]] = defaultdict(list)
    for number, (record, checksum) in enumerate(stored):
        row = row_of(record)
        whole = (row[name] for name in (*TEXTS, *COUNTS, *REALS))
        rows.append((*whole, record.memory, checksum, *_numbers(record.outcomes), *_parts(record)))
        for name, metric in metrics_of(record).items():
            places[name].append(number)
            measured[name].append(metric)
    fields = _fields()
    columns = zip(*rows, strict=True) if rows else ([] for _ in fields)
    arrays = {field.name: _array(values, field.type) for field, values in zip(fields, columns, strict=True)}
    for name in sorted(places):
        where = np.full(len(rows), -1)
        where[places[name]] = np.arange(len(places[name]))
        take = pa.array(where, mask=where < 0)
        for end in ("value", "low", "high"):
            values = pa.array([getattr(metric, end) for metric in measured[name]], pa.float64())
            if end == "value" or values.null_count < len(values):
                arrays[name if end == "value" else f"{name}.{end}"] = values.take(take)
    return pa.table(arrays)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


@lru_cache(maxsize=1)
def _fields() -> tuple[pa.Field, ...]:
    """Return the columns that every table has."""
    import pyarrow as pa

    kinds = {
        **dict.fromkeys(TEXTS, pa.string()),
        **dict.fromkeys(COUNTS, pa.int64()),
        **dict.fromkeys(REALS, pa.float64()),
        "memory": pa.int64(),
        CHECKSUM: pa.int64(),
        **dict.fromkeys(NUMBERS, pa.binary()),
        **dict.fromkeys(PARTS, pa.string()),
    }
    shared = {name: pa.dictionary(pa.int32(), kind) for name, kind in kinds.items()
              if name in (*TEXTS, *NUMBERS, *PARTS) and name not in DIFFERENT}  # fmt: skip
    return tuple(pa.field(name, kind) for name, kind in (kinds | shared).items())


@lru_cache(maxsize=MOST_METRICS)
def is_metric(name: str) -> bool:
    """Say whether a column is a metric's, or one of the ends of its interval."""
    taken = {*TEXTS, *COUNTS, *REALS, "memory", CHECKSUM, *NUMBERS, *PARTS, *TAKEN}
    return name not in taken


def join(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables; a metric that one has not is null there."""
    import pyarrow as pa

    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries()


# Files


def write(path: Path, table: pa.Table, beside: Mapping[str, str]) -> None:
    """Write a sealed file, which is there whole or not at all.

    Args:
        path: the file.
        table: from `table_of`.
        beside: what lies beside records, by file name; see `store.beside`.

    Raises:
        UserError: it cannot be written.
    """
    import pyarrow.parquet as pq

    about = {"format": FORMAT, "schema_version": SCHEMA, "beside": dict(sorted(beside.items())),
             "metrics": _described(filter(is_metric, table.column_names))}  # fmt: skip
    table = _in_order(table).replace_schema_metadata({ABOUT: canonical(about)})
    with files.whole_file(path) as file:
        pq.write_table(
            table, file, compression="zstd", compression_level=LEVEL, row_group_size=BATCH, write_statistics=False,
            use_dictionary=[field.name for field in _fields() if field.name not in DIFFERENT],
            dictionary_pagesize_limit=2**30, data_page_size=2**24, write_page_checksum=True,
        )  # fmt: skip


def _described(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what sparsebench's metrics are, by name; what tasks declare lies beside the records."""
    known = {}
    for name in names:
        with suppress(KeyError):
            known[name] = asdict(kind_of(name))
    return known


def _in_order(table: pa.Table) -> pa.Table:
    """Return rows and columns in one order, whatever order they were in, and each shared value once."""
    import pyarrow as pa

    table = table.take(np.lexsort([_ranks(table[name]) for name in reversed(ORDER)]))
    fixed = [field.name for field in _fields()]
    own = [name for name in table.column_names if name not in fixed and table[name].null_count < len(table)]
    arrays = {name: table[name] for name in (*fixed, *sorted(own))}
    for name, column in arrays.items():
        if pa.types.is_dictionary(column.type):
            arrays[name] = _in_order_of_use(column.unify_dictionaries().combine_chunks())
    return pa.table(arrays).combine_chunks()


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Return numbers that sort as the values of a column do, nulls first."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type) and not pa.types.is_string(column.type):
        return np.asarray(column)
    values = column.unify_dictionaries().combine_chunks()
    values = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    rank = np.argsort(np.argsort(np.array(values.dictionary.to_pylist(), object), kind="stable"), kind="stable")
    places = values.indices.fill_null(-1).to_numpy()
    return np.where(places < 0, -1, rank[places] if len(rank) else -1)


def _in_order_of_use(column: pa.DictionaryArray) -> pa.DictionaryArray:
    import pyarrow as pa

    places = column.indices.fill_null(-1).to_numpy()
    used, first = np.unique(places, return_index=True)
    order = used[np.argsort(first)]
    order = order[order >= 0]
    new = np.zeros(len(column.dictionary) + 1, np.int32)
    new[order] = np.arange(len(order))
    indices = pa.array(new[places], mask=places < 0)
    return pa.DictionaryArray.from_arrays(indices, column.dictionary.take(pa.array(order)))


def read(path: Path, columns: Callable[[str], bool] = lambda name: True) -> pa.Table:
    """Return the rows of a sealed file, of the columns that are wanted.

    Raises:
        UserError: it is torn, or none, or a later sparsebench wrote it.
    """
    with _open(path) as file:
        return file.read([field.name for field in file.schema_arrow if columns(field.name)])


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a sealed file; what is wrong with it, then or while it is read, is an error of one line; see `read`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as stream, pq.ParquetFile(stream, page_checksum_verification=True) as file:
            _check(path, file.schema_arrow)
            yield file
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is no sealed file of records, or is damaged: {plain(' '.join(str(error).split()), 200)}",
            next_step="fetch it anew, or take it out of the folder: its cells then count as not run",
        ) from error


def _check(path: Path, schema: pa.Schema) -> None:
    """Raise UserError unless a file's columns are those of this version."""
    about = json.loads((schema.metadata or {})[ABOUT])
    version, here = (about["format"], about["schema_version"]), (FORMAT, SCHEMA)
    if version != here:
        raise UserError(
            f"{path} has records of version {version[0]}.{version[1]}", allowed=f"{here[0]}.{here[1]}",
            next_step="upgrade sparsebench" if version > here else "read it with the sparsebench that wrote it",
        )  # fmt: skip
    fixed = {field.name: field.type for field in _fields()}
    kinds = {name: None for name in fixed} | {field.name: field.type for field in schema}
    for name, kind in kinds.items():
        if kind != (wanted := fixed.get(name, "double")):
            raise UserError(f"{path}: the type of column '{plain(name, 60)}'", got=str(kind), allowed=str(wanted))


@lru_cache(maxsize=256)
def _beside(path: Path, size: int, changed: int) -> Mapping[str, str]:
    with _open(path) as file:
        beside: dict[str, str] = json.loads(file.schema_arrow.metadata[ABOUT])["beside"]
    return beside


def beside(path: Path) -> Mapping[str, str]:
    """Return what a sealed file says that lay beside its records, by file name."""
    status = path.stat()
    return _beside(path, status.st_size, status.st_mtime_ns)


# Rows as records


def _origin(row: Row) -> Origin:
    return Origin.model_construct(**{name: row[name] for name in ("plugin", "distribution", "version", "revision")})


def head_of(row: Row) -> Head:
    """Return the head of a row, which has the columns HEAD."""
    notes = {} if row["notes"] is None else json.loads(row["notes"])
    about = (row[name] for name in ("setting", "n_train", "seconds", "memory"))
    return Head(row["cell_id"], row["status"], notes, _origin(row), row["started"], *about)


@lru_cache(maxsize=1000)
def _init(text: str) -> Cell:
    return Cell.model_validate_json(text)


def record_of(row: Row) -> Record:
    """Return the record of a row; ValueError where it is none."""
    parts: Row = {name: None if row[name] is None else json.loads(row[name]) for name in PARTS if name != "init"}
    init = None if row["init"] is None else _init(row["init"])
    cell = Cell.model_validate(parts["cell"] | {name: row[name] for name in ("n_train", "repetition")} | {"init": init})
    if cell.id != row["cell_id"]:
        raise ValueError(f"its cell has hash {cell.id}, not {row['cell_id']}")
    metrics = {
        name: Metric(value=row.get(name), unit=unit, n=n, low=row.get(f"{name}.low"), high=row.get(f"{name}.high"),
                     method=method)
        for name, (unit, n, method) in (parts["metrics"] or {}).items()
    }  # fmt: skip
    n = row[ITEMS]
    packed = {name: pack(numbers_of(row[name], n)) if row[name] else "" for name in NUMBERS}
    outcomes = None if not n else Outcomes(
        n=n, predicted=packed[PREDICTIONS], label=packed[LABELS], group=packed[GROUPS], rank=packed[RANKS],
        foreground=packed[FOREGROUNDS],
    )  # fmt: skip
    plain_columns = ("cell_id", "status", "started", "kind", "environment", "device", "seconds", "memory")
    return Record.model_validate({name: row[name] for name in plain_columns} | {
        "cell": cell, "label": row["strategy"], "metrics": metrics, "trajectory": parts["trajectory"] or (),
        "samples": parts["samples"] or {}, "outcomes": outcomes, "notes": parts["notes"] or {},
        "failure": parts["failure"], "origin": _origin(row),
    })  # fmt: skip


def rows_of(table: pa.Table | pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a table; equal texts share one object."""
    names = table.schema.names
    batches = [table] if not hasattr(table, "to_batches") else table.to_batches(max_chunksize=BATCH)
    for batch in batches:
        columns = [_values(column) for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> Iterable[Any]:
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    values, places = column.dictionary.to_pylist(), column.indices.to_pylist()
    return [None if place is None else values[place] for place in places]
