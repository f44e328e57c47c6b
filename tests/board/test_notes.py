"""What is noted under a board."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from flats import WHOLE, flat, flatten

from sparsebench.board.notes import cautions, notes_on
from sparsebench.records.cell import Cell, Origin, Part
from sparsebench.records.record import Metric, Record
from sparsebench.strategy.budget import Budget


@pytest.fixture
def record() -> Callable[..., Record]:
    def make(**more: Any) -> Record:
        cell = Cell(
            task=Part(name="theory", params={"tokens": 20}), model=Part(name="shallow"), strategy=Part(name="mine"),
            budget=more.pop("budget", Budget(keep_rate=0.5)), n_train=8, repetition=3, where=more.pop("where", "both"),
        )  # fmt: skip
        given = {"status": "ok", "metrics": {"accuracy": Metric(value=0.25, unit="fraction", n=20)}} | more
        return Record(
            cell=cell, cell_id=cell.id, origin=Origin(plugin="mine"), kind="deployable", label="mine(a=1)", **given
        )

    return make


def test_cautions_name_unfinished_training_missed_budgets_and_mixed_devices() -> None:
    assert cautions(WHOLE) == []
    stuck = flat("mine", 0, "theory", success=0.0, fitted=0.0, n_train=4)
    fitted = flat("mine", 1, "theory", success=0.0, fitted=1.0, n_train=4)
    dear = flat("mine", 0, macs_ratio=0.52, macs_ratio_planned=0.5, device="cuda:0 X")
    near = flat("mine", 1, macs_ratio=0.505, macs_ratio_planned=0.5)
    lines = cautions([stuck, fitted, dear, near])
    assert lines[0].startswith("mine: 1 of 2 trials reached the step limit")
    assert lines[1] == "mine, macs 0.5, on composite: realised MACs 0.520 of dense, planned 0.500"
    assert len(lines) == 2 and "made on cpu, cuda:0 X" in notes_on([stuck, dear], technical=False)[-1]


def inactive(records: list[Any]) -> list[str]:
    return [line for line in notes_on(records) if "inactive" in line]


def test_terms_that_were_not_in_a_loss_are_named_by_strategy_and_task(record: Callable[..., Record]) -> None:
    noted = record(notes={"inactive": "ratio, kl: weight 0; distillation: no teacher", "memory": "2 parts"})
    assert flatten(noted)["inactive"] == "ratio, kl: weight 0; distillation: no teacher"
    assert flatten(record())["inactive"] == "" and inactive(WHOLE) == inactive([flatten(record())]) == []
    (line,) = inactive([flatten(noted), flatten(noted), flatten(record())])
    assert line == "mine(a=1) on theory: published terms inactive: ratio, kl (weight 0), distillation (no teacher)"
    more = [flat("mine", 0, inactive="kl: weight 0"), flat("mine", 1, "spurious", inactive="kl: weight 0")]
    assert [line.partition(":")[0] for line in inactive(more)] == ["mine on composite", "mine on spurious"]
    assert line in notes_on([flatten(noted)])


def test_a_budget_that_was_planned_but_not_reached_is_named_with_what_was_asked_for(
    record: Callable[..., Record],
) -> None:
    def made(real: float, planned: float, **more: Any) -> Record:
        ratios = {"macs_ratio": real, "macs_ratio_planned": planned}
        return record(metrics={k: Metric(value=v, unit="fraction", n=20) for k, v in ratios.items()}, **more)

    def said(*records: Record) -> list[str]:
        return cautions([flatten(each) for each in records])

    asked = Budget(macs=0.37)
    (line,) = said(made(0.4963, 0.4963, budget=asked))
    assert line == "mine(a=1), macs 0.37, on theory: realised MACs 0.496 of dense, asked for 0.370"
    assert said(made(0.3773, 0.3773, budget=asked)) == [] != said(made(0.3775, 0.3775, budget=asked))
    assert said(made(0.3627, 0.3627, budget=asked)) == [] != said(made(0.3625, 0.3625, budget=asked))
    # Keep rates promise no fraction of MACs, and a dense test of what was pruned in training costs what it costs.
    assert said(made(0.6, 0.6)) == said(made(1.0, 1.0, budget=asked, where="train")) == []
    near, far = made(0.4, 0.4, budget=asked), made(0.5, 0.5, budget=asked)
    assert said(near, far) == said(far, near) == said(far)


def test_notes_do_not_hang_on_how_texts_are_stored() -> None:
    """What comes from a cache is categories, whose order is that in which they came."""
    texts = pd.DataFrame(
        [
            {"cell_id": f"{name}{asked}", "status": "ok", "task": "composite", "strategy": name, "kind": "deployable",
             "budget": f"macs {asked}", "macs_ratio": 0.37, "macs_ratio_asked": asked, "device": "cpu"}
            for name in "bca" for asked in (0.7, 0.4, 0.85)
        ]
    )  # fmt: skip
    categories = {name: pd.Categorical(texts[name], texts[name].unique()) for name in ("strategy", "budget", "task")}
    lines = cautions(texts)
    assert len(lines) == 9 and lines == sorted(lines) == cautions(texts.assign(**categories))
