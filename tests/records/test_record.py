"""Cells and records: their hashes, their JSON, their lines and rows, and the bytes of their outcomes."""

import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsebench.errors import UserError
from sparsebench.measure.cost import Step
from sparsebench.records import store, table
from sparsebench.records.record import Cell, Failure, Metric, Outcomes, Part, Record, bytes_of, canonical, numbers_of
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.images import Composite


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


def test_a_cell_survives_json_with_its_hash():
    """A cell survives JSON with its hash whatever the order of parameters."""
    original = cell(init=cell(repetition=0), budget=Budget(keep_rate=0.7, blocks=(3, 6)))
    fresh = original.model_copy()
    assert original.id and original == fresh and original.model_dump() == fresh.model_dump()
    assert original.id != original.model_copy(update={"repetition": 3}).id
    again = Cell.model_validate_json(original.model_dump_json())
    assert again == original and again.id == original.id
    a, b = ({"tokens": 50, "d": 10}, {"d": 10, "tokens": 50})
    assert cell(task=Part(name="theory", params=a)).id == cell(task=Part(name="theory", params=b)).id


def test_a_part_spells_out_all_parameters_but_added_ones_that_are_not_used():
    task = Part.of(Composite(test=60))
    assert (task.name, task.params["test"], task.params["canvas"]) == ("composite", 60, 32)
    assert Composite(**task.params) == Composite(test=60)
    assert not Composite.added & set(task.params)
    for key, value in (("affine", 0.5), ("pretrain_each", True)):
        part = Part.of(Composite(**{key: value}))
        assert part.params == Part.of(Composite()).params | {key: value}
        assert Composite(**part.params) == Composite(**{key: value})


def test_parameters_that_a_class_adds_leave_those_that_its_bases_added():
    class Base(Strategy):
        name: ClassVar[str] = "adding"
        added: ClassVar[frozenset[str]] = frozenset({"late"})
        early: int = 1
        late: int = 2

    class Mine(Base):
        added: ClassVar[frozenset[str]] = frozenset({"latest"})
        latest: float = 3.0

    usual = {"disposal": "drop", "early": 1}
    assert Part.of(Mine()).params == usual
    assert Part.of(Mine(late=5)).params == usual | {"late": 5}
    assert Part.of(Mine(latest=1, returns=-1)).params == usual | {"latest": 1.0, "returns": -1}


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


@pytest.mark.parametrize("value", [math.nan, math.inf, "file \udcff.txt"])
def test_a_part_that_json_or_utf8_cannot_say_is_refused(value):
    with pytest.raises((ValueError, UserError), match=r"finite|udcff"):
        _ = cell(strategy=Part(name="mine", params={"x": value})).id


METRIC = st.builds(
    Metric, value=st.none() | st.floats(-1e75, 1e75), unit=st.sampled_from(["fraction", "MACs"]),
    n=st.integers(0, 2**62), low=st.none() | st.floats(0, 1), high=st.none() | st.floats(0, 1),
    method=st.sampled_from(["", "Wilson 95 %"]),
)  # fmt: skip
STEP = st.builds(
    Step, tokens_in=st.floats(0, 1e9), tokens_out=st.floats(0, 1e9), early=st.booleans(),
    scoring=st.sampled_from(["", "class", "received"]), own=st.floats(0, 1), rested=st.sampled_from([0.0, 0.5]),
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
    content = bytes_of(np.array(numbers))
    more = content if grouped else b""
    return Outcomes(n=len(numbers), predicted=content, label=content, group=more, rank=content, foreground=more)


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
    for content in (original.outcomes.predicted, original.outcomes.foreground) if original.outcomes else ():
        assert not content or numbers_of(content, len(numbers)).tolist() == numbers


def test_a_record_of_the_version_before_is_read(make_record: Callable[..., Record]) -> None:
    """It had a hash of its source as revision, and losses of items."""
    record = make_record(outcomes=packed([1, 2], True))
    old = json.loads(record.model_dump_json()) | {"schema_version": 3}
    old["origin"]["sha256"] = old["origin"].pop("revision")
    old["outcomes"]["loss"] = "abc"
    assert store.parse(json.dumps(old).encode()) == record


def test_too_many_foregrounds_are_not_stored() -> None:
    """Foregrounds of more than 16 bits are none and outcomes are of all items."""
    assert bytes_of(None) == b"" == bytes_of(np.array([3, 2**16]))
    assert len(bytes_of(np.arange(256))) == 256 and len(bytes_of(np.arange(257))) == 514
    for n in (0, 3, 5):
        with pytest.raises(ValueError, match=f"4 bytes for {n} test items"):
            Outcomes.model_validate(packed([0, 1, 2, 3], True).model_dump() | {"n": n})
