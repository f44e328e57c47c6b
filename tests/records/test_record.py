"""Cells and records: their hashes, their JSON, their lines and rows, and the packed texts of their outcomes."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsebench.budget import Budget
from sparsebench.errors import UserError
from sparsebench.models.shipped import Shallow
from sparsebench.records import store, table
from sparsebench.records.cell import Cell, Part, canonical
from sparsebench.records.record import Failure, Metric, Outcomes, Record, TokenStep, pack, pack_foregrounds, unpack
from sparsebench.tasks.theory import Theory


def cell(**changes):
    parts = {
        "task": Part(name="theory", params={"tokens": 50}), "model": Part(name="shallow"),
        "strategy": Part(name="random"), "budget": Budget(macs=0.5), "n_train": 30, "repetition": 2,
    }  # fmt: skip
    return Cell(**(parts | changes))


def test_every_field_changes_the_hash_which_is_pinned():
    assert cell().id == "349071f0116e3a4d"
    other = Part(name="theory", params={"tokens": 51}), Part(name="composite", params={"tokens": 50})
    changes = [
        {}, {"task": other[0]}, {"task": other[1]}, {"model": Part(name="vit")},
        {"strategy": Part(name="random", params={"a": 1})}, {"budget": Budget(macs=0.65)},
        {"budget": Budget(keep_rate=0.5)}, {"budget": Budget(keep_rate=0.5, convention="compound-ceil")},
        {"budget": Budget(macs=0.5, blocks=(1, 2))}, {"n_train": 31}, {"repetition": 3}, {"where": "train"},
        {"where": "test"}, {"track": "tuned"}, {"init": cell()}, {"init": cell(repetition=3)},
    ]  # fmt: skip
    assert len({cell(**change).id for change in changes}) == len(changes)


def test_a_cell_survives_json_with_its_hash_whatever_the_order_of_parameters():
    original = cell(init=cell(repetition=0), budget=Budget(keep_rate=0.7, blocks=(3, 6)))
    fresh = original.model_copy()
    assert original.id and original == fresh and original.model_dump() == fresh.model_dump()
    again = Cell.model_validate_json(original.model_dump_json())
    assert again == original and again.id == original.id
    a, b = ({"tokens": 50, "d": 10}, {"d": 10, "tokens": 50})
    assert cell(task=Part(name="theory", params=a)).id == cell(task=Part(name="theory", params=b)).id


def test_a_changed_copy_has_a_hash_of_its_own():
    original = cell()
    assert original.id != original.model_copy(update={"repetition": 3}).id == cell(repetition=3).id


def test_a_part_spells_out_all_parameters_but_added_ones_that_are_not_used():
    task = Part.of(Theory(tokens=60))
    assert (task.name, task.params["tokens"], task.params["d"]) == ("theory", 60, 10)
    assert Theory(**task.params) == Theory(tokens=60)
    assert not {"criterion", "error", "repacked"} & {*task.params, *Part.of(Shallow()).params}
    for cls, key, value in ((Theory, "criterion", "error"), (Theory, "error", 0.05), (Shallow, "repacked", True)):
        part = Part.of(cls(**{key: value}))
        assert part.params == Part.of(cls()).params | {key: value} and cls(**part.params) == cls(**{key: value})
    dense = Part(name="dense", params={"disposal": "drop"})
    older = cell(task=Part.of(Theory()), model=Part.of(Shallow()), strategy=dense, budget=Budget(macs=1.0), n_train=4,
                 repetition=0)  # fmt: skip
    assert older.id == "a4a35b5a675c0d7f"  # as before there were any


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES)
def test_canonical_json_is_json_and_depends_on_no_order(value):
    text = canonical(value)
    assert json.loads(text) == value
    assert canonical(json.loads(text)) == text
    if isinstance(value, dict):
        assert canonical(dict(reversed(value.items()))) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical({"x": value})


def test_half_a_surrogate_pair_is_told_in_the_users_words():
    broken = cell(strategy=Part(name="mine", params={"word": "file \udcff.txt"}))
    with pytest.raises(UserError, match=r"surrogate.*got .*\\udcff.*; allowed: text.*; give it anew"):
        _ = broken.id


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
@example({}, [255], False)  # the largest of one byte, and the least of two
@example({}, [256], False)
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
