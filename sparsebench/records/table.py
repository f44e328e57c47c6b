"""Records as a table with one row per record, for boards, exports and sealed Parquet files.

A row describes a record in plain columns. The other columns have the rest of the record, so that it can be restored.
docs/reference/records.md describes the columns. A file stores each text once if many rows share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sparsebench import files
from sparsebench.errors import UserError, plain, reason_of, shortage
from sparsebench.measure.metrics import Metric, kind_of
from sparsebench.records.record import (
    NETWORK,
    ON_TRAINED,
    SCHEMA,
    Cell,
    Origin,
    Part,
    Record,
    RecordSummary,
    Where,
    canonical,
)
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import is_named

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Row = dict[str, Any]
Columns = Callable[[str], bool]
ALL: Columns = bool
"""Selects all columns."""

ITEMS, LABELS, PREDICTIONS, RANKS = "test_items", "test_labels", "test_predictions", "test_ranks"
GROUPS, FOREGROUNDS, NEIGHBOURS = "test_groups", "test_foregrounds", "test_neighbours"
OUTCOMES = (ITEMS, LABELS, PREDICTIONS)
"""Columns of outcomes: the number n of test items, then (n,) integers each as bytes, see `numbers_of`."""
CHECKSUM = "checksum"
"""The column with the CRC-32 of the record's line. It decides which of several equally new records counts."""
CLAIM = ("cell_id", "distribution", "revision", "status", "started", CHECKSUM)
"""Columns that determine which of several records of a cell counts, see `store.counting`."""
SUMMARY = (*CLAIM, "notes", "plugin", "version", "setting", "seconds", "memory")
"""Columns from which a `RecordSummary` is made."""
OF_RECORD = ("cell_id", "status", "kind", "device", "started", "seconds", "environment", "memory")
OF_ORIGIN = tuple(Origin.model_fields)
"""Columns that are fields of a record (OF_RECORD) and of its origin (OF_ORIGIN)."""
ITEM = {
    LABELS: "label",
    GROUPS: "group",
    FOREGROUNDS: "foreground",
    PREDICTIONS: "predicted",
    RANKS: "rank",
    NEIGHBOURS: "neighbour",
}
"""Columns of bytes, and their fields of `Outcomes`."""
PARTS = ("cell", "init", "metrics", "trajectory", "schedule", "samples", "notes", "failure")
"""Columns of JSON: the rest of a record, see `row_of`. Values and intervals of metrics have their own columns."""
ADDED = frozenset({"schedule", NEIGHBOURS})
"""Columns that older files lack. A file has them only if one of its rows has a value."""
TYPE_OF_COLUMN = {
    **dict.fromkeys(
        (
            "cell_id",
            "status",
            "reason",
            "task",
            "model",
            "strategy",
            "kind",
            "budget",
            "track",
            "network",
            "setting",
            "device",
            "started",
            "plugin",
            "distribution",
            "version",
            "revision",
            "environment",
            "inactive",
            "cost_model",
        ),
        "string",
    ),
    **dict.fromkeys(("n_train", "repetition", ITEMS), "int64"),
    **dict.fromkeys(("macs_ratio_asked", "seconds"), "float64"),
    **dict.fromkeys(("memory", CHECKSUM), "int64"),
    **dict.fromkeys(ITEM, "binary"),
    **dict.fromkeys(PARTS, "string"),
}
"""The columns of every table, and their types. All other columns are numbers: metrics and the ends of intervals."""
FIXED = frozenset({*TYPE_OF_COLUMN, "checks", "checks_remark"})
"""Columns that do not belong to a metric."""
DIFFERENT = ("cell_id", "started", "samples", PREDICTIONS, RANKS, NEIGHBOURS)
"""Columns whose values mostly differ between rows."""
SHARED = tuple(name for name, kind in TYPE_OF_COLUMN.items() if kind in ("string", "binary") and name not in DIFFERENT)
"""Columns that are dictionary-encoded: each distinct value is stored once."""
ORDER = (
    "setting",
    "track",
    "n_train",
    "repetition",
    "network",
    "init",
    "strategy",
    "budget",
    "cell_id",
    "revision",
    CHECKSUM,
)
"""Sort keys of the rows of a file. They place similar predictions, of one network on the same items, side by side."""
BATCH = 20_000
"""Number of records in a row group."""
FORMAT, ABOUT = 1, b"sparsebench"
LEVEL = 12
"""Compression level of zstd. Higher levels take much longer and save a few percent."""
LONG = 1000
"""Maximum number of characters of a text in a row, except for a setting, which is JSON."""
WHERE = {"both": "", "train": ", in training only", "test": ", in the test only"}
"""Suffix of a budget's text: where the budget applies. The tracks ON_TRAINED need none: it is always the test."""
IDENTITY = (
    "strategy_name",
    "strategy_params",
    "budget_amount",
    "budget_value",
    "budget_rounding",
    "budget_places",
    "budget_where",
)
"""Columns with the parts of the labels `strategy` and `budget`, see `identity_of`. Files have them in `cell`."""


def setting_text(cell: Cell) -> str:
    """Return the setting of a cell as JSON: task, model with the precision of the test, previous trainings, the probe.

    Repetitions of one training have the same setting, and so have checkpoints of one architecture.
    """
    weights = NETWORK if cell.network else ()
    model = cell.model.model_dump()
    model["params"] = {name: value for name, value in cell.model_params.items() if name not in weights}
    trainings = [] if cell.track == "scratch" else cell.inits
    network = [[part.task.model_dump(), part.model.model_dump(), part.n_train] for part in trainings]
    probe = [] if cell.probe is None else [cell.probe.model_dump()]
    return plain(canonical([cell.task.model_dump(), model, *network, *probe]), None)


def row_of(record: Record, checksum: int = 0) -> Row:
    """Return a record and the checksum of its line as a row. Texts are escaped, because records may be untrusted.

    The JSON of the cell omits `init`, `n_train` and `repetition`, which have their own columns. The JSON of a metric
    has unit, n and method. A metric that has the name of another column is left out.
    """
    row: Row = {}
    for name, value in _about(record, checksum).items():
        row[name] = plain(value, LONG) if type(value) is str else value
    row["setting"] = setting_text(record.cell)
    for name, field in ITEM.items():
        row[name] = getattr(record.outcomes, field, b"")
        if name in ADDED:
            row[name] = row[name] or None
    metrics = _metrics_with_columns(record)
    for name, part in _json_parts(record, metrics).items():
        row[name] = canonical(part) if part else None
    for name, metric in metrics.items():
        row[name] = metric.value
        for end, value in (("low", metric.low), ("high", metric.high)):
            if value is not None:
                row[f"{name}.{end}"] = value
    return row


def _about(record: Record, checksum: int) -> Row:
    """Return what a record says of its cell, its strategy and its run, by column; texts are not escaped."""
    cell = record.cell
    outcomes = record.outcomes
    track = cell.track if cell.n_train else "frozen"  # without training samples trained weights are only tested
    return {
        "reason": record.failure.reason if record.failure else "",
        "task": cell.task.name,
        "model": cell.model.name,
        "strategy": record.label,
        "budget": cell.budget.label + ("" if track in ON_TRAINED else WHERE[cell.where]),
        "n_train": cell.n_train,
        "track": track,
        "repetition": cell.repetition,
        "network": cell.network,
        "macs_ratio_asked": None if cell.where == "train" else cell.budget.macs,
        "inactive": record.notes.get("inactive", ""),
        "cost_model": record.notes.get("cost_model", ""),
        ITEMS: outcomes.n if outcomes else 0,
        CHECKSUM: checksum,
        **{name: getattr(record, name) for name in OF_RECORD},
        **{name: getattr(record.origin, name) for name in OF_ORIGIN},
    }


def _metrics_with_columns(record: Record) -> dict[str, Metric]:
    """Return the metrics of a record whose escaped names are no other columns, by these names."""
    names = {key: plain(key) for key in record.metrics}
    return {name: record.metrics[key] for key, name in names.items() if is_metric(name)}


def _json_parts(record: Record, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return the contents of the columns PARTS of a record."""
    cell = record.cell
    return {
        "cell": cell.model_dump(mode="json", exclude={"init", "n_train", "repetition"}),
        "init": cell.init and cell.init.model_dump(mode="json"),
        "metrics": {name: [metric.unit, metric.n, metric.method] for name, metric in metrics.items()},
        **record.model_dump(mode="json", include={"trajectory", "schedule", "samples", "notes", "failure"}),
    }


def identity_of(cell: str, strategy: str, track: str) -> Row:
    """Return the parts that the labels of a row's strategy and budget are made of, as the columns IDENTITY.

    `strategy_params` is JSON of the parameters that differ from their defaults, which are those in the label. The
    amount, value, rounding and places of a budget are those of `Budget`. `budget_where` is a key of WHERE.

    Args:
        cell: the row's cell as JSON.
        strategy: the label of its strategy.
        track: its track.

    Raises:
        ValueError: the cell is not valid.
    """
    parts = _LabelParts.model_validate_json(cell)
    params = {plain(key): _plain(value) for key, value in parts.strategy.params.items()}
    changed = {key: value for key, value in params.items() if is_named(strategy, key, value)}
    budget = parts.budget
    return {
        "strategy_name": plain(parts.strategy.name, LONG),
        "strategy_params": canonical(changed),
        "budget_amount": budget.amount,
        "budget_value": plain(budget.value, LONG),
        "budget_rounding": budget.rounding,
        "budget_places": budget.places,
        "budget_where": "both" if track in ON_TRAINED else parts.where,
    }


class _LabelParts(BaseModel):
    """The fields of a cell that labels are made of."""

    strategy: Part
    budget: Budget
    where: Where = "both"


def _plain(value: Any) -> Any:
    """Return a value of JSON with all texts escaped, see `plain`."""
    if isinstance(value, str):
        return plain(value, LONG)
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {plain(key): _plain(part) for key, part in value.items()}
    return value


def table_of(pairs: Iterable[tuple[Record, int]]) -> pa.Table:
    """Return pairs of a record and the checksum of its line as a table; see `row_of`."""
    import pyarrow as pa

    rows = [row_of(record, checksum) for record, checksum in pairs]
    metrics = sorted({name for row in rows for name in row if is_metric(name)})
    return pa.Table.from_pylist(rows, pa.schema(_types() | dict.fromkeys(metrics, pa.float64())))


def _types() -> dict[str, pa.DataType]:
    """Return the types of the columns of every table."""
    import pyarrow as pa

    types = {name: pa.type_for_alias(kind) for name, kind in TYPE_OF_COLUMN.items()}
    return types | {name: pa.dictionary(pa.int32(), types[name]) for name in SHARED}


def is_metric(name: str) -> bool:
    """Return whether a column is a metric or an end of its interval."""
    return name not in FIXED


def join(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables. A metric that a table lacks is null."""
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default").unify_dictionaries()


def in_order(table: pa.Table) -> pa.Table:
    """Return the table with sorted rows and columns, and with the dictionaries of shared values in order of use.

    The result does not depend on the order of the input. Metrics without values are left out.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = {name: table[name].cast(TYPE_OF_COLUMN[name]) for name in ORDER}
    keys["init"] = keys["init"].fill_null("")  # rows without init come first
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in ORDER])

    def has_values(name: str) -> bool:
        return name in table.column_names and table[name].null_count < len(table)

    fixed = [name for name in TYPE_OF_COLUMN if name not in ADDED or has_values(name)]
    metrics = sorted(name for name in table.column_names if is_metric(name) and has_values(name))
    table = table.select([*fixed, *metrics]).take(order)
    shared = [name for name in SHARED if name in fixed]
    batches = []
    for batch in table.to_batches(max_chunksize=BATCH):
        columns = {name: batch[name] for name in batch.schema.names}
        columns |= {name: columns[name].cast(TYPE_OF_COLUMN[name]).dictionary_encode() for name in shared}
        batches.append(pa.record_batch(columns))
    return pa.Table.from_batches(batches, table.schema).unify_dictionaries().combine_chunks()


# Files


def write(path: Path, table: pa.Table, sidecars: Mapping[str, str]) -> None:
    """Write a sealed file atomically, with the texts of the sidecars by file name. Raise UserError if that fails."""
    import pyarrow.parquet as pq

    kinds = {}
    for name in filter(is_metric, table.column_names):
        with suppress(KeyError):  # metrics of a task are described by a sidecar
            kinds[name] = asdict(kind_of(name))
    about = {"format": FORMAT, "schema_version": SCHEMA, "beside": dict(sorted(sidecars.items())), "metrics": kinds}
    table = in_order(table).replace_schema_metadata({ABOUT: canonical(about)})
    with files.whole_file(path) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=LEVEL,
            row_group_size=BATCH,
            write_statistics=False,
            use_dictionary=[name for name in TYPE_OF_COLUMN if name in table.column_names and name not in DIFFERENT],
            dictionary_pagesize_limit=2**30,
            data_page_size=2**24,
            write_page_checksum=True,
        )


def read(path: Path, columns: Columns = ALL) -> pa.Table:
    """Return the selected columns of the rows of a sealed file. Selected columns that only newer files have are null.

    Raises:
        UserError: if the file is damaged or not a sealed file, or another version of sparsebench wrote it.
    """
    with _open(path) as file:
        return _read_columns(file, columns)


def _read_columns(file: pq.ParquetFile, columns: Columns) -> pa.Table:
    import pyarrow as pa

    rows = file.read(list(filter(columns, file.schema_arrow.names)))
    rows.validate(full=True)  # the checksums of pages do not cover the headers with the numbers of values
    for name in filter(columns, sorted(ADDED)):
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.nulls(len(rows), _types()[name]))
    return rows


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a sealed file. Raise UserError in one line if opening or reading fails; see `read`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as stream, pq.ParquetFile(stream, page_checksum_verification=True) as file:
            about = json.loads((file.schema_arrow.metadata or {})[ABOUT])
            version = (about["format"], about["schema_version"])
            current = (FORMAT, SCHEMA)
            if version != current:
                step = "upgrade sparsebench" if version > current else "read it with the sparsebench that wrote it"
                got, allowed = (f"{pair[0]}.{pair[1]}" for pair in (version, current))
                raise UserError(f"{path} has records of version {got}", allowed=allowed, next_step=step)
            fixed = _types()
            types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            for name in fixed | types:
                if name in ADDED and name not in types:
                    continue
                if types.get(name) != (dtype := fixed.get(name, pa.float64())):
                    text = f"{path}: the type of column '{plain(name, 60)}'"
                    raise UserError(text, got=str(types.get(name)), allowed=str(dtype))
            yield file
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        if (short := shortage(error)) is not None:
            raise UserError(f"{path} cannot be read: {short}") from error
        raise UserError(
            f"{path} is not a sealed file of records, or is damaged: {reason_of(error)}",
            next_step="restore the file, or move it out of the folder: its cells then count as not run",
        ) from error


def sidecars(path: Path) -> dict[str, str]:
    """Return the texts of the sidecars in a sealed file, by file name."""
    _, texts = read_with_sidecars(path, lambda name: False)
    return texts


def read_with_sidecars(path: Path, columns: Columns) -> tuple[pa.Table, dict[str, str]]:
    """Return what `read` and `sidecars` return, from one opening of the file."""
    with _open(path) as file:
        rows = _read_columns(file, columns)
        texts: dict[str, str] = json.loads(file.schema_arrow.metadata[ABOUT])["beside"]
    return rows, texts


# Rows as records


def summaries_of(table: pa.Table) -> Iterator[RecordSummary]:
    """Yield the summaries of the rows of a table with the columns SUMMARY. Equal notes and origins share one object."""
    notes_of = lru_cache(maxsize=None)(lambda text: json.loads(text or "{}"))
    for row in rows_of(table):
        row |= {"notes": notes_of(row["notes"]), "origin": _origin(*map(row.get, OF_ORIGIN))}
        yield RecordSummary(**{name: row[name] for name in RecordSummary._fields})


@lru_cache(maxsize=1000)
def _origin(*values: Any) -> Origin:
    return Origin.model_construct(**dict(zip(OF_ORIGIN, values, strict=True)))


_init = lru_cache(maxsize=1000)(Cell.model_validate_json)


def record_of(row: Row) -> Record:
    """Return the record of a row. Raise ValueError if the row is not a record."""
    parts: Row = {name: json.loads(row[name]) for name in PARTS if name != "init" and row.get(name) is not None}
    about = {"n_train": row["n_train"], "repetition": row["repetition"], "init": row["init"] and _init(row["init"])}
    cell = Cell.model_validate(parts["cell"] | about)
    if cell.id != row["cell_id"]:
        raise ValueError(f"its cell has hash {cell.id}, not {row['cell_id']}")
    metrics = {
        name: {
            "value": row.get(name),
            "unit": unit,
            "n": n,
            "low": row.get(f"{name}.low"),
            "high": row.get(f"{name}.high"),
            "method": method,
        }
        for name, (unit, n, method) in parts.get("metrics", {}).items()
    }
    outcomes: Row | None = None
    if row[ITEMS]:
        outcomes = {"n": row[ITEMS]} | {field: row.get(name) or b"" for name, field in ITEM.items()}
    return Record.model_validate(
        parts
        | {name: row[name] for name in OF_RECORD}
        | {
            "cell": cell,
            "label": row["strategy"],
            "metrics": metrics,
            "outcomes": outcomes,
            "origin": _origin(*map(row.get, OF_ORIGIN)),
        }
    )


def rows_of(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table. Equal texts share one object."""
    for batch in table.to_batches(max_chunksize=BATCH):
        names = batch.schema.names
        for values in zip(*map(_values, batch.columns), strict=True):
            yield dict(zip(names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    if not hasattr(column, "dictionary"):
        return column.to_pylist()
    values, indices = column.dictionary.to_pylist(), column.indices.to_pylist()
    return [None if index is None else values[index] for index in indices]
