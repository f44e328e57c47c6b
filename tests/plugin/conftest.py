from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsebench.records.record import Cell, Failure, Metric, Origin, Part, Record
from sparsebench.strategy.budget import Budget

HOSTILE = {
    "slashes": "../../a/b\\c:d",
    "dots": "..",
    "long": "x" * 10_000,
    "letters": "é中\U0001f600\n\x00\x7f",
    "empty": "",
}


def record_of(
    status: Any = "ok", *, repetition: int = 0, accuracy: float = 0.75, strange: str = "mine", n_samples: int = 3
) -> Record:
    """Return a record with a recorded training; all names that a plugin chooses are `strange`."""
    cell = Cell(
        task=Part(name="composite", params={"name": "inner", "widths": [1, 2], "lr": 0.5, "nothing": None}),
        model=Part(name="vit"), strategy=Part(name="mine", params={"on": True, "word": strange}),
        budget=Budget(macs=0.5), n_train=8, repetition=repetition,
    )  # fmt: skip
    good = status == "ok"
    steps = tuple(10.0 * i for i in range(n_samples))
    return Record(
        cell=cell, cell_id=cell.id, status=status, origin=Origin(plugin="mine", revision="a"), kind="deployable",
        label=f"mine({strange})", started="2026-01-01T00:00:00+00:00" if good else "", seconds=2.5,
        metrics={
            "accuracy": Metric(value=accuracy, unit="fraction", n=20),
            "sample_complexity": Metric(value=None, unit="samples", n=1),
            **({strange: Metric(value=0.5, unit="fraction", n=1)} if strange != "mine" else {}),
        } if good else {},
        samples={
            "watched_steps": steps, "watched_loss": (*(1 / (1 + s) for s in steps[:-1]), None), "batch": (1.0,),
        } if good else {},
        failure=None if good else Failure(reason=f"it broke: {strange}"),
    )  # fmt: skip


@pytest.fixture
def make_record() -> Callable[..., Record]:
    return record_of


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def strange(request: pytest.FixtureRequest) -> str:
    return request.param
