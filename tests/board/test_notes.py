"""The notes of a board."""

from typing import Any

import numpy as np
import pytest
from flats import WHOLE, flat, flatten

from sparsebench.board.notes import notes_on
from sparsebench.records.record import Cell, Origin, Part, Record, bytes_of, canonical
from sparsebench.strategy.budget import Budget


def record(**more: Any) -> dict[str, Any]:
    """Return the flat row of a record."""
    cell = Cell(
        task=Part(name="theory", params={"tokens": 20}), model=Part(name="shallow"), strategy=Part(name="mine"),
        budget=Budget(macs=0.37), n_train=8, repetition=3,
    )  # fmt: skip
    return flatten(
        Record(cell=cell, cell_id=cell.id, origin=Origin(plugin="mine"), kind="deployable", label="mine(a=1)",
               status="ok", metrics={}, **more)
    )  # fmt: skip


def test_unfinished_training_and_mixed_devices_are_named() -> None:
    assert not any("step limit" in line or line.startswith("made on") for line in notes_on(WHOLE))
    stuck = flat("mine", 0, "theory", success=0.0, fitted=0.0, n_train=4)
    fitted = flat("mine", 1, "theory", success=0.0, fitted=1.0, n_train=4)
    elsewhere = flat("mine", 0, device="cuda:0 X")
    lines = notes_on([stuck, fitted, elsewhere])
    assert any(line.startswith("mine: 1 of 2 trials reached the step limit") for line in lines)
    assert any(line.startswith("made on cpu, cuda:0 X") for line in lines)


@pytest.mark.parametrize(
    ("networks", "labels", "moved", "n", "expected"),
    [
        ([""], "numbers", 1, 40, "vit: dense is right in 0 of 40 pictures, and chance would be 10"),
        (["a", "b"], "numbers", 1, 40, "vit with b: dense is right in 0 of 40 pictures, and chance would be 10"),
        (["a", "b"], "numbers", 1, 20, None),  # which comes about by chance
        (["a", "b"], "numbers", 0, 40, None),
        (["a", "b"], "", 1, 40, None),  # classes that were not numbered by their folders
    ],
)
def test_answers_that_are_right_less_often_than_chance_are_named(
    networks: list[str], labels: str, moved: int, n: int, expected: str | None
) -> None:
    """The last network answers with the next class."""
    setting = canonical([{"name": "folder", "params": {"labels": labels}}, {"name": "timm", "params": {}}])
    truth = np.arange(n) % 4
    records = [
        flat(name, 0, "folder", cell_id=f"{name} {network}", setting=setting, network=network, test_items=n,
             test_labels=bytes_of(truth), accuracy=0.5,
             test_predictions=bytes_of((truth + moved * (network == networks[-1])) % 4))
        for name in ("dense", "mine") for network in networks
    ]  # fmt: skip
    notes = [line.partition(": the class")[0] for line in notes_on(records) if "chance" in line]
    assert notes == ([f"folder, {expected}"] if expected else [])


def test_terms_that_were_not_in_a_loss_are_named_by_strategy_and_task() -> None:
    def inactive(*records: dict[str, Any]) -> list[str]:
        return [line for line in notes_on(records) if "inactive" in line]

    noted = record(notes={"inactive": "ratio, kl: weight 0; distillation: no teacher", "memory": "2 parts"})
    assert inactive(*WHOLE) == inactive(record()) == []
    assert inactive(noted, noted, record()) == [
        "mine(a=1) on theory: published terms inactive: ratio, kl (weight 0), distillation (no teacher)"
    ]
    more = [flat("mine", 0, inactive="kl: weight 0"), flat("mine", 1, "spurious", inactive="kl: weight 0")]
    assert [line.partition(":")[0] for line in inactive(*more)] == ["mine on composite", "mine on spurious"]
