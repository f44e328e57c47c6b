"""The records of a large store as one Parquet file, flat: a cache that may be removed at any time.

OUT/cache/records.parquet holds a row for every record of the segments that it names, with their sizes and times.
Segments that are not among them, or are not as it says, are read themselves. Needs pyarrow (`sparsebench[scale]`);
without it all records are read one by one.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebench import budget, text
from sparsebench.errors import UserError
from sparsebench.records import cell, files, record, store
from sparsebench.records import row as flat_rows
from sparsebench.records.record import Record
from sparsebench.records.row import CHECKSUM, SEGMENT, Row, checked_names, metrics_of, row_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

log = logging.getLogger(__name__)

UNREAD = 32 * 2**20
"""Bytes of records outside the cache from which it is written anew: some 10,000 records, a second to read."""
BATCH = 20_000
SAFE = [14, 0, 1]
"""The first pyarrow that runs no code from a file that it reads (CVE-2023-47248)."""
MANIFEST, UNIT = b"sparsebench", b"unit"
PLAIN = ("cell_id", "started", "test_predictions")
"""Columns of texts that are all different; of others each text is stored once."""
Key = list[int]


def worth(out: Path) -> bool:
    """Say whether a store has a cache or is large enough for one, and pyarrow is there, and safe to read it with."""
    if not path_of(out).exists() and sum(size for size, *_ in _keys(out).values()) < UNREAD:
        return False
    try:
        import pyarrow
    except ImportError:
        return False
    return [int(number) for number in re.findall(r"\d+", pyarrow.__version__)][:3] >= SAFE


def path_of(out: Path) -> Path:
    """Return where the cache of a store lies."""
    return out / "cache" / "records.parquet"


def table(out: Path, metrics: Collection[str] | None = None) -> pa.Table | None:
    """Return the records that count, flat, a row a cell in the order of their hashes; None if there are none.

    The columns are those of `row_of`, then the metrics by name, those of `metrics` or all; the field of a metric says
    its unit. The cache is written anew where much is missing in it.

    Raises:
        UserError: a record was written by a later sparsebench.
    """
    keys = _keys(out)
    stored, manifest = _load(out, keys, metrics)
    fresh, tables = {}, [] if stored is None else [stored]
    for name in [name for name in keys if name not in manifest]:
        try:
            warnings, segment = _segment(out / "records" / name)
        except OSError as error:
            files.leave_out(out / "records" / name, error)
            continue
        fresh[name] = {"key": keys[name], "warnings": warnings}
        tables += segment
    if not tables:
        return None
    whole = _join(tables)
    if _is_much(keys, manifest):
        _save(out, whole, manifest | fresh)
    for entry in (manifest | fresh).values():
        for warning in entry["warnings"]:
            log.warning(warning)
    return _select(_newest(whole), metrics)


def _keys(out: Path) -> dict[str, Key]:
    """Return size and times of each segment, by name; no program can set the last of them, the change of the inode."""
    keys = {}
    for path in store.segments(out):
        try:
            status = path.lstat()
        except OSError:  # gone, or not to be read: as if it were not there
            continue
        keys[path.name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return keys


def _is_much(keys: dict[str, Key], manifest: dict[str, Any]) -> bool:
    return sum(key[0] for name, key in keys.items() if name not in manifest) >= UNREAD


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a hash of what makes rows of records: those of another version are not taken."""
    return (
        "-".join(files.content_hash(Path(str(m.__file__)))[:16] for m in (flat_rows, budget, cell, record, store, text))
        + (files.content_hash(Path(__file__))[:16])
    )


def _load(out: Path, keys: dict[str, Key], metrics: Collection[str] | None) -> tuple[pa.Table | None, dict[str, Any]]:
    """Return the rows of the cache that hold, and what it says of their segments."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with (
            files.open_file(path_of(out), files.MOST_BYTES) as opened,
            pq.ParquetFile(opened, page_checksum_verification=True) as file,
        ):
            schema = file.schema_arrow
            manifest = json.loads(schema.metadata[MANIFEST])
            if manifest["code"] != _code():
                return None, {}
            known = {name: entry for name, entry in manifest["segments"].items() if keys.get(name) == entry["key"]}
            wanted = None if metrics is None or _is_much(keys, known) else _columns(schema, metrics)
            rows = file.read(columns=wanted)
    except FileNotFoundError:
        return None, {}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("%s is not used: %s", path_of(out), error)
        return None, {}
    if len(known) < len(manifest["segments"]):
        rows = rows.filter(pc.is_in(rows[SEGMENT].cast(pa.string()), pa.array(list(known), pa.string())))
    return rows, known


def _columns(schema: pa.Schema, metrics: Collection[str]) -> list[str]:
    return [field.name for field in schema if field.name in metrics or UNIT not in (field.metadata or {})]


def _segment(path: Path) -> tuple[list[str], list[pa.Table]]:
    """Return the warnings and the rows of a segment."""
    warnings: list[str] = []
    stored, tables = store.scan(path, Record, warnings.append), []
    while len(batch := _table(islice(stored, BATCH))):
        tables.append(batch)
    return warnings, tables


def _table(stored: Iterable[store.Found[Record]]) -> pa.Table:
    """Return rows column by column; no record is kept, as many at once would occupy the garbage collector."""
    import pyarrow as pa

    about: list[tuple[Any, ...]] = []
    units: dict[str, str] = {}
    measured: dict[tuple[str, ...], list[Any]] = defaultdict(list)  # by the names of metrics: most have the same
    names: list[str] = []
    for number, each in enumerate(stored):
        row = row_of(each.item) | {SEGMENT: each.path.name, CHECKSUM: each.checksum}
        names = names or list(row)
        about.append(tuple(row.values()))
        metrics = metrics_of(each.item, row)
        if (alike := tuple(metrics)) not in measured:
            units |= {name: metric.unit for name, metric in metrics.items()}
        measured[alike].append((number, *[metric.value for metric in metrics.values()]))
    columns = {name: np.full(len(about), None) for name in checked_names(units)}
    for alike, rows in measured.items():
        at, *values = zip(*rows, strict=True)
        for name, column in zip(alike, values, strict=True):
            columns[name][list(at)] = column
    arrays = [_array(name, values) for name, values in zip(names, zip(*about, strict=True), strict=True)]
    fields = [pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)]
    fields += [pa.field(name, pa.float64(), metadata={UNIT: units[name]}) for name in columns]
    return pa.table([*arrays, *columns.values()], schema=pa.schema(fields))


def _array(name: str, values: Sequence[Any]) -> pa.Array:
    import pyarrow as pa

    array = pa.array(values)
    return array if name in PLAIN or not pa.types.is_string(array.type) else array.dictionary_encode()


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables in the order of their cells' hashes; a metric that one has not is null there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    ids = whole["cell_id"]
    if len(whole) > 1 and not pc.all(pc.less_equal(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py():
        whole = whole.take(pc.sort_indices(ids))
    return whole


def _save(out: Path, whole: pa.Table, segments: dict[str, Any]) -> None:
    """Write the cache, if it can be written, and never through a link."""
    import pyarrow.parquet as pq

    if path_of(out).parent.is_symlink():
        return
    manifest = json.dumps({"code": _code(), "segments": segments})
    try:
        with files.whole_file(path_of(out)) as file:
            pq.write_table(whole.replace_schema_metadata({MANIFEST: manifest}), file, write_page_checksum=True)
    except UserError as error:
        log.info("no cache of the records: %s", error)


def _newest(whole: pa.Table) -> pa.Table:
    """Return the rows of the records that count; of most cells there is only one."""
    import pyarrow as pa

    cells = whole["cell_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    keep = np.bincount(cells)[cells] == 1
    several = np.flatnonzero(~keep)
    if not several.size:
        return whole
    named = (
        whole.select(["cell_id", "distribution", "revision", "status", "started", CHECKSUM])
        .take(pa.array(several))
        .to_pylist()
    )
    claims = (
        (c["cell_id"], f"{c['distribution']} {c['revision']}", c["status"] == "ok", c["started"], c[CHECKSUM])
        for c in named
    )
    keep[
        list(store.newest((store.Claim(*claim), row) for claim, row in zip(claims, several, strict=True)).values())
    ] = True
    return whole.filter(pa.array(keep))


def _select(rows: pa.Table, metrics: Collection[str] | None) -> pa.Table:
    about = [field.name for field in rows.schema if UNIT not in (field.metadata or {})]
    names = sorted(set(rows.column_names) - set(about))
    others = [name for name in about if name not in (SEGMENT, CHECKSUM)]
    return rows.select(others + [name for name in names if metrics is None or name in metrics])


def frame(table: pa.Table) -> pd.DataFrame:
    """Return a table as pandas has it; texts that are all different stay where they are."""
    import pandas as pd
    import pyarrow as pa

    plain = pa.string()
    loaded: pd.DataFrame = table.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if kind == plain else None)
    return loaded


def rows(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table; equal texts share one object."""
    shared: dict[str, str] = {}
    names = table.column_names
    for batch in table.to_batches(max_chunksize=BATCH):
        columns = [_values(column, shared) for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _values(column: pa.Array, shared: dict[str, str]) -> Iterable[Any]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        texts = [shared.setdefault(text, text) for text in column.dictionary.to_pylist()]
        return map(texts.__getitem__, column.indices.to_pylist())
    if pa.types.is_floating(column.type) and column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        values = column.to_numpy(zero_copy_only=False).astype(object)
        values[~valid] = None
        return values.tolist()
    return (
        column.to_pylist()
        if column.null_count or not pa.types.is_primitive(column.type)
        else column.to_numpy().tolist()
    )
