"""A record comes back from its line and its row as it was, and its outcomes from their packed texts."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.records import store, table
from sparsebench.records.cell import canonical
from sparsebench.records.record import Failure, Metric, Outcomes, Record, TokenStep, pack, pack_foregrounds, unpack

METRIC = st.builds(
    Metric, value=st.none() | st.floats(-1e75, 1e75), unit=st.sampled_from(["fraction", "MACs"]),
    n=st.integers(0, 2**62), low=st.none() | st.floats(0, 1), high=st.none() | st.floats(0, 1),
    method=st.sampled_from(["", "Wilson 95 %"]),
)  # fmt: skip
STEP = st.builds(
    TokenStep, tokens_in=st.floats(0, 1e9), tokens_out=st.floats(0, 1e9), early=st.booleans(), scoring=st.text(),
    own=st.floats(0, 1), rested=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
CHANGES = st.fixed_dictionaries({
    "notes": st.dictionaries(st.text(max_size=5), st.text(), max_size=3),
    "label": st.text(),
    "metrics": st.dictionaries(st.sampled_from(["accuracy", "macs", "accuracy: 3 on china", "own"]), METRIC),
    "samples": st.dictionaries(st.text(max_size=3), st.lists(st.none() | st.floats(0, 1e9), max_size=3).map(tuple)),
    "trajectory": st.lists(STEP, max_size=3).map(tuple),
    "status": st.sampled_from(["ok", "failed", "oom"]),
    "failure": st.none() | st.builds(Failure, reason=st.text(), kind=st.text(), traceback=st.text()),
    "memory": st.integers(0, 2**62),
})  # fmt: skip


def packed(numbers: list[int], grouped: bool) -> Outcomes:
    text = pack(np.array(numbers))
    more = text if grouped else ""
    return Outcomes(n=len(numbers), predicted=text, label=text, group=more, rank=text, foreground=more)


@given(CHANGES, st.lists(st.integers(0, 2**16 - 1), max_size=50), st.booleans())
def test_any_record_comes_back_from_its_line_and_from_its_row(
    make_record: Callable[..., Record], changes: dict[str, Any], numbers: list[int], grouped: bool
) -> None:
    outcomes = packed(numbers, grouped) if numbers else None
    original = make_record().model_copy(update={**changes, "outcomes": outcomes})
    line = canonical(original.model_dump(mode="json")).encode()
    assert b"\n" not in line and store.parse(line) == original
    (row,) = table.rows_of(table.table_of([(original, 7)]))
    assert table.record_of(row) == original.model_copy(update={"label": row["strategy"]})  # as it is shown
    for text in (original.outcomes.predicted, original.outcomes.foreground) if original.outcomes else ():
        assert not text or unpack(text, len(numbers)).tolist() == numbers


def test_a_record_of_the_version_before_is_read(make_record: Callable[..., Record]) -> None:
    """It had a hash of its source as revision, and losses of items."""
    record = make_record(outcomes=packed([1, 2], True))
    old = json.loads(record.model_dump_json()) | {"schema_version": 3}
    old["origin"]["sha256"] = old["origin"].pop("revision")
    old["outcomes"]["loss"] = "abc"
    assert Record.model_validate(old) == record


def test_only_numbers_of_16_bits_are_packed_and_foregrounds_that_are_more_are_none() -> None:
    for number in (-1, 2**16):
        with pytest.raises(ValueError, match=r"0\.\.65535"):
            pack(np.array([number]))
    assert pack_foregrounds(None) == "" == pack_foregrounds(np.array([3, 2**16]))
    assert unpack(pack_foregrounds(np.array([2**16 - 1, 0])), 2).tolist() == [2**16 - 1, 0]
    assert len(pack(np.random.default_rng(0).integers(0, 10, 10_000))) < 10_000


@pytest.mark.parametrize("n", [0, 3, 5])
def test_more_or_fewer_numbers_than_said_are_an_error(n: int) -> None:
    with pytest.raises(ValueError, match=f"do not hold {n} numbers"):
        unpack(pack(np.arange(4)), n)
