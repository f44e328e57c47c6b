import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebench.budget import Budget
from sparsebench.records.cell import Cell, Part
from sparsebench.records.origin import Origin
from sparsebench.records.record import (
    SCHEMA,
    Failure,
    Metric,
    Outcomes,
    Record,
    TokenStep,
    pack,
    pack_foregrounds,
    unpack,
)

CELL = Cell(
    task=Part(name="theory"), model=Part(name="shallow"), strategy=Part(name="random"), budget=Budget(macs=0.5),
    n_train=30, repetition=0,
)  # fmt: skip


def record(**changes):
    fields = {
        "cell": CELL,
        "cell_id": CELL.id,
        "status": "ok",
        "metrics": {"accuracy": Metric(value=0.75, unit="fraction", n=100, low=0.66, high=0.83, method="Wilson 95%")},
        "trajectory": (TokenStep(tokens_in=50, tokens_out=25, early=True, scoring=""),),
        "samples": {"seconds": (0.1, 0.2)},
        "outcomes": Outcomes(
            n=3,
            predicted=pack(np.array([0, 1, 1])),
            label=pack(np.zeros(3)),
            group=pack(np.zeros(3)),
            rank=pack(np.array([0, 1, 3])),
            foreground=pack(np.array([7, 7, 65535])),
        ),
        "notes": {"attention": "class"},
        "origin": Origin(plugin="random", distribution="sparsebench", version="0.1.0", revision="ab"),
        "kind": "baseline",
        "label": "random",
    }
    return Record(**(fields | changes))


def test_a_record_survives_json():
    for original in (
        record(),
        record(status="failed", metrics={}, outcomes=None, failure=Failure(reason="no", kind="StrategyError")),
        record(metrics={"auroc": Metric(value=None, unit="fraction", n=0)}),
    ):
        again = Record.model_validate_json(original.model_dump_json())
        assert again == original
        assert again.cell.id == original.cell_id


def test_a_record_of_the_version_before_is_read():
    """It had a hash of its source as revision, and losses of items."""
    old = json.loads(record().model_dump_json()) | {"schema_version": 3}
    old["origin"]["sha256"] = old["origin"].pop("revision")
    old["outcomes"]["loss"] = "abc"
    assert Record.model_validate(old) == record()


def test_a_record_says_its_schema():
    assert json.loads(record().model_dump_json())["schema_version"] == SCHEMA


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"status": "fine"}, "status"),
        ({"extra": 1}, "extra"),
        ({"metrics": {"a": {"value": "many", "unit": "", "n": 1}}}, "metrics"),
        ({"metrics": {"a": {"value": 1.0, "n": 1}}}, "unit"),
        ({"metrics": {"a": {"value": 1.0, "unit": "", "n": 1, "stderr": 0}}}, "stderr"),
        ({"trajectory": ({"tokens_in": 1},)}, "tokens_out"),
        ({"origin": {"plugin": "x", "path": "here"}}, "path"),
    ],
)
def test_a_field_that_is_wrong_or_unknown_is_refused(wrong, said):
    with pytest.raises(ValidationError, match=said):
        record(**wrong)


def test_a_record_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        record().status = "failed"


@given(st.lists(st.integers(0, 2**16 - 1), max_size=200))
def test_what_is_packed_comes_out_again(numbers):
    found = unpack(pack(np.array(numbers, dtype=np.int64)), len(numbers))
    assert found.tolist() == numbers and found.dtype == np.int64


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50))
def test_a_record_with_foregrounds_survives_json(numbers):
    outcomes = record().outcomes.model_copy(
        update={"n": len(numbers), "foreground": pack_foregrounds(np.array(numbers))}
    )
    again = Record.model_validate_json(record(outcomes=outcomes).model_dump_json())
    assert again == record(outcomes=outcomes)
    assert unpack(again.outcomes.foreground, len(numbers)).tolist() == numbers


def test_foregrounds_that_are_not_there_or_too_many_are_an_empty_text():
    assert pack_foregrounds(None) == "" == pack_foregrounds(np.array([3, 2**16]))
    assert unpack(pack_foregrounds(np.array([2**16 - 1, 0])), 2).tolist() == [2**16 - 1, 0]


def test_class_numbers_pack_small():
    assert len(pack(np.random.default_rng(0).integers(0, 10, 10_000))) < 10_000


@pytest.mark.parametrize("n", [0, 1, 3, 5, 100])
def test_more_or_fewer_numbers_than_said_are_an_error(n):
    with pytest.raises(ValueError, match=f"do not hold {n} numbers"):
        unpack(pack(np.arange(4)), n)


def test_a_text_that_unpacks_to_far_more_than_said_is_stopped_early():
    with pytest.raises(ValueError, match="do not hold 3"):
        unpack(pack(np.zeros(10**7)), 3)


@pytest.mark.parametrize(
    "text", ["", "no base 64!", "abc", "AAAA", pack(np.arange(50))[:20], "x" + pack(np.arange(4))[1:]]
)
def test_a_text_that_is_not_packed_numbers_is_a_value_error(text):
    with pytest.raises(ValueError):
        unpack(text, 4)
