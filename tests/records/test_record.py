"""A record comes back from JSON as it was, and its outcomes from their packed texts; what is none is refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebench.budget import Budget
from sparsebench.records import store, table
from sparsebench.records.cell import Cell, Part, canonical
from sparsebench.records.origin import Origin
from sparsebench.records.record import (
    Failure,
    Metric,
    Outcomes,
    Record,
    TokenStep,
    pack,
    pack_foregrounds,
    unpack,
)


def record(**changes: Any) -> Record:
    cell = Cell(
        task=Part(name="theory"), model=Part(name="shallow"), strategy=Part(name="random"), budget=Budget(macs=0.5),
        n_train=30, repetition=0,
    )  # fmt: skip
    fields = {
        "cell": cell, "cell_id": cell.id, "status": "ok", "kind": "baseline", "label": "random",
        "metrics": {"accuracy": Metric(value=0.75, unit="fraction", n=100, low=0.66, high=0.83, method="Wilson 95%")},
        "trajectory": (TokenStep(tokens_in=50, tokens_out=25, early=True, scoring=""),),
        "samples": {"seconds": (0.1, 0.2)},
        "outcomes": Outcomes(
            n=3, predicted=pack(np.array([0, 1, 1])), label=pack(np.zeros(3)), group=pack(np.zeros(3)),
            rank=pack(np.array([0, 1, 3])), foreground=pack(np.array([7, 7, 65535])),
        ),
        "notes": {"attention": "class"},
        "origin": Origin(plugin="random", distribution="sparsebench", version="0.1.0", revision="ab"),
    }  # fmt: skip
    return Record(**(fields | changes))


TEXTS = st.dictionaries(st.text(max_size=5), st.text(), max_size=3)
NUMBERS = st.lists(st.integers(0, 65535), min_size=1, max_size=9).map(np.array)
METRIC = st.builds(
    Metric, value=st.none() | st.floats(-1e75, 1e75), unit=st.sampled_from(["fraction", "MACs"]),
    n=st.integers(0, 2**62), low=st.none() | st.floats(0, 1), high=st.none() | st.floats(0, 1),
    method=st.sampled_from(["", "Wilson 95 %"]),
)  # fmt: skip
STEP = st.builds(
    TokenStep, tokens_in=st.floats(0, 1e9), tokens_out=st.floats(0, 1e9), early=st.booleans(), scoring=st.text(),
    own=st.floats(0, 1), rested=st.sampled_from([0.0, 0.5]),
)  # fmt: skip


@settings(deadline=None)
@given(
    changes=st.fixed_dictionaries({
        "notes": TEXTS,
        "label": st.text(),
        "metrics": st.dictionaries(st.sampled_from(["accuracy", "macs", "accuracy: 3 on china", "own"]), METRIC),
        "samples": st.dictionaries(st.text(max_size=3), st.lists(st.none() | st.floats(0, 1e9), max_size=3).map(tuple)),
        "trajectory": st.lists(STEP, max_size=3).map(tuple),
        "status": st.sampled_from(["ok", "failed", "oom"]),
        "failure": st.none() | st.builds(Failure, reason=st.text(), kind=st.text(), traceback=st.text()),
        "memory": st.integers(0, 2**62),
    }),
    numbers=st.none() | NUMBERS,
    grouped=st.booleans(),
)  # fmt: skip
def test_any_record_comes_back_from_its_line_and_from_its_row(
    changes: dict[str, Any], numbers: np.ndarray | None, grouped: bool
) -> None:
    if numbers is not None:
        packed = pack(numbers)
        group = packed if grouped else ""
        changes["outcomes"] = Outcomes(
            n=len(numbers), predicted=packed, label=packed, group=group, rank=packed, foreground=group
        )
    original = record(**changes)
    line = canonical(original.model_dump(mode="json")).encode()
    assert b"\n" not in line and store.parse(line) == original
    (row,) = table.rows_of(table.table_of([(original, 7)]))
    texts = {"label": row["strategy"]}  # as it is shown
    assert table.record_of(row) == original.model_copy(update=texts)


def test_a_record_of_the_version_before_is_read() -> None:
    """It had a hash of its source as revision, and losses of items."""
    old = json.loads(record().model_dump_json()) | {"schema_version": 3}
    old["origin"]["sha256"] = old["origin"].pop("revision")
    old["outcomes"]["loss"] = "abc"
    assert Record.model_validate(old) == record()


@given(st.lists(st.integers(0, 2**16 - 1), max_size=200))
def test_what_is_packed_comes_out_again(numbers: list[int]) -> None:
    found = unpack(pack(np.array(numbers, dtype=np.int64)), len(numbers))
    assert found.tolist() == numbers and found.dtype == np.int64


def test_only_numbers_of_16_bits_are_packed_and_foregrounds_that_are_more_are_none() -> None:
    for number in (-1, 2**16):
        with pytest.raises(ValueError, match=r"0\.\.65535"):
            pack(np.array([number]))
    assert pack_foregrounds(None) == "" == pack_foregrounds(np.array([3, 2**16]))
    assert unpack(pack_foregrounds(np.array([2**16 - 1, 0])), 2).tolist() == [2**16 - 1, 0]
    assert len(pack(np.random.default_rng(0).integers(0, 10, 10_000))) < 10_000


@pytest.mark.parametrize(
    ("text", "n"),
    [
        *((pack(np.arange(4)), n) for n in (0, 1, 3, 5, 100)),
        (pack(np.zeros(10**7)), 3),  # which stops early
        *(
            (text, 4)
            for text in ("", "no base 64!", "abc", "AAAA", pack(np.arange(50))[:20], "x" + pack(np.ones(4))[1:])
        ),
    ],
)
def test_what_is_not_so_many_packed_numbers_is_a_value_error(text: str, n: int) -> None:
    with pytest.raises(ValueError):
        unpack(text, n)
