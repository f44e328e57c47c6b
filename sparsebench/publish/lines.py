"""From a stranger's line to a record: typed, finite, spelled in one way, and of the cell that it names."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from sparsebench.errors import UserError
from sparsebench.publish.folder import Unfit, plain
from sparsebench.records import store
from sparsebench.records.cell import Part, canonical, digest
from sparsebench.records.record import MOST_ITEMS, Record, upgrade
from sparsebench.strategy import KINDS

LARGEST_REAL, LARGEST_WHOLE = 1e300, 2**63
LONGEST_NAME = 100


def record_of(line: bytes) -> tuple[Record, int]:
    """Return the record of a line, and the schema that it was written in.

    Raises:
        Unfit: it is none, or holds what no cell can have come to.
    """
    try:
        raw = json.loads(line)
        if canonical(raw).encode() != line:
            raise Unfit("it is not spelled as sparsebench spells records, or has a name twice")
        _check_numbers(raw)
        if digest(raw["cell"]) != raw["cell_id"]:
            raise Unfit("its cell has another hash than it says")
        newest = upgrade(raw)
        record = Record.model_validate(newest)
        if canonical(record.model_dump(mode="json")) != canonical(newest):
            raise Unfit("something in it is of another type, as a text that spells a number")
    except Unfit:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise Unfit(plain(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from error
    except (ValueError, TypeError, LookupError, RecursionError, UserError) as error:
        raise Unfit(plain(f"it is no record: {error}")) from error
    if wrong := _wrong(record):
        raise Unfit(wrong)
    return record, raw["schema_version"]


def _check_numbers(raw: Any) -> None:
    """Raise Unfit for a number that no double or 64-bit integer holds; NaN and infinities have no spelling."""
    todo = [raw]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
        elif isinstance(value, float) and abs(value) > LARGEST_REAL:
            raise Unfit(f"it holds the number {value}")
        elif isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            raise Unfit(f"it holds a number of {value.bit_length()} bits")


def _wrong_name(part: Part, label: str) -> str | None:
    name = part.name
    if not name.isidentifier() or len(name) > LONGEST_NAME:
        return f"its strategy is called '{plain(name, 60)}', which is no name of a class"
    if not label.isprintable():
        return f"its label '{plain(label, 60)}' holds characters that cannot be shown"
    if not _is_label(label, part):
        return f"its label '{plain(label, 60)}' is not that of strategy '{plain(name, 60)}' with its parameters"
    return None


def _is_label(label: str, part: Part) -> bool:
    """Say whether a label is as `spec.label` prints one: the name, and after it some of the cell's parameters."""
    left = {key: f"{key}={value}" for key, value in part.params.items()}
    rest = label.removeprefix(part.name)
    if rest == label or not rest:
        return not rest
    if not (rest.startswith("(") and rest.endswith(")")):
        return False
    rest = rest[1:-1] + ", "
    while rest:
        key = next((key for key, text in left.items() if rest.startswith(f"{text}, ")), None)
        if key is None:
            return False
        rest = rest.removeprefix(f"{left.pop(key)}, ")
    return True


def _wrong_start(started: str) -> str | None:
    """Return what is wrong with when a cell began; no record may come after all that are yet to come."""
    if not started:
        return None
    try:
        when = datetime.fromisoformat(started)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        return f"it began at '{plain(started, 60)}', which is no time in ISO 8601"
    return f"it began in the future, at {plain(started, 60)}" if when > datetime.now(UTC) + store.AHEAD else None


def _wrong(record: Record) -> str | None:
    """Return what no cell can have come to, or None."""
    counts = {
        "seconds": record.seconds,
        "memory": record.memory,
        "a number of test items": 0 if record.outcomes is None else record.outcomes.n,
        **{f"n of {name}": metric.n for name, metric in record.metrics.items()},
    }
    if negative := [name for name, count in counts.items() if count < 0]:
        return f"{plain(negative[0], 60)} is negative"
    if record.outcomes is not None and not 0 < record.outcomes.n <= MOST_ITEMS:
        return f"it has {record.outcomes.n} test items, allowed: 1 to {MOST_ITEMS}"
    if any(min(step.tokens_in, step.tokens_out, step.own, step.rested) < 0 for step in record.trajectory):
        return "its trajectory has a negative number"
    if record.kind not in KINDS:
        return f"its kind is '{plain(record.kind, 60)}', allowed: {', '.join(KINDS)}"
    if wrong := _wrong_name(record.cell.strategy, record.label) or _wrong_start(record.started):
        return wrong
    if (record.status == "ok") != (record.failure is None):
        return f"its status is {record.status}, and it has {'no' if record.failure is None else 'a'} failure"
    if record.status == "ok" and not (record.metrics and record.outcomes):
        return "its status is ok, and it has no metrics or no outcomes"
    return None
