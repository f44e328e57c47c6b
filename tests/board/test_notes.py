"""What is noted under a board."""

from typing import Any

import pandas as pd
import pytest
from flats import WHOLE, flat, flatten

from sparsebench.board.entries import frame_of
from sparsebench.board.notes import cautions, notes_on
from sparsebench.records.cell import Cell, Origin, Part
from sparsebench.records.record import Metric, Record
from sparsebench.strategy.budget import Budget

ASKED = Budget(macs=0.37)


def record(real: float = 0.5, planned: float = 0.5, budget: Budget = ASKED, **more: Any) -> dict[str, Any]:
    """Return the flat row of a record."""
    cell = Cell(
        task=Part(name="theory", params={"tokens": 20}), model=Part(name="shallow"), strategy=Part(name="mine"),
        budget=budget, n_train=8, repetition=3, where=more.pop("where", "both"),
    )  # fmt: skip
    ratios = {"macs_ratio": real, "macs_ratio_planned": planned}
    metrics = {name: Metric(value=value, unit="fraction", n=20) for name, value in ratios.items()}
    return flatten(
        Record(cell=cell, cell_id=cell.id, origin=Origin(plugin="mine"), kind="deployable", label="mine(a=1)",
               status="ok", metrics=metrics, **more)
    )  # fmt: skip


def test_cautions_name_unfinished_training_missed_budgets_and_mixed_devices() -> None:
    assert cautions(frame_of(WHOLE)) == []
    stuck = flat("mine", 0, "theory", success=0.0, fitted=0.0, n_train=4)
    fitted = flat("mine", 1, "theory", success=0.0, fitted=1.0, n_train=4)
    dear = flat("mine", 0, macs_ratio=0.52, macs_ratio_planned=0.5, device="cuda:0 X")
    near = flat("mine", 1, macs_ratio=0.505, macs_ratio_planned=0.5)
    lines = cautions(frame_of([stuck, fitted, dear, near]))
    assert lines[0].startswith("mine: 1 of 2 trials reached the step limit")
    assert lines[1] == "mine, macs 0.5, on composite: realised MACs 0.520 of dense, planned 0.500"
    assert len(lines) == 2 and "made on cpu, cuda:0 X" in notes_on([stuck, dear], technical=False)[-1]


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


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record(0.4963, 0.4963)], "mine(a=1), macs 0.37, on theory: realised MACs 0.496 of dense, asked for 0.370"),
        ([record(0.4, 0.4), record(0.5, 0.5)], "realised MACs 0.500"),  # the farthest, in any order
        ([record(0.5, 0.5), record(0.4, 0.4)], "realised MACs 0.500"),
        ([record(0.3775, 0.3775)], "realised MACs 0.378"),
        ([record(0.3625, 0.3625)], "realised MACs 0.362"),
        ([record(0.3773, 0.3773)], ""),
        ([record(0.3627, 0.3627)], ""),
        ([record(0.6, 0.6, Budget(keep_rate=0.5))], ""),  # promises no fraction of MACs
        ([record(1.0, 1.0, where="train")], ""),  # a dense test of what was pruned in training costs what it costs
    ],
)
def test_a_budget_that_was_planned_but_not_reached_is_named_with_what_was_asked_for(
    records: list[dict[str, Any]], said: str
) -> None:
    lines = cautions(frame_of(records))
    assert said in lines[0] if said else lines == []
    assert len(lines) == bool(said)


def test_notes_do_not_hang_on_how_texts_are_stored() -> None:
    """What comes from a cache is categories, whose order is that in which they came."""
    texts = pd.DataFrame(
        [flat(name, budget=f"macs {asked}", macs_ratio=0.37, macs_ratio_asked=asked)
         for name in "bca" for asked in (0.7, 0.4, 0.85)]
    )  # fmt: skip
    categories = {name: pd.Categorical(texts[name], texts[name].unique()) for name in ("strategy", "budget", "task")}
    lines = cautions(frame_of(texts))
    assert len(lines) == 9 and lines == sorted(lines) == cautions(frame_of(texts.assign(**categories)))
