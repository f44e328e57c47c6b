"""Records as the board reads them, and what is noted of them."""

from collections.abc import Callable
from typing import Any

import pytest
from flats import WHOLE, flat, flatten

from sparsebench.board.notes import cautions, inactive, notes_on
from sparsebench.budget import FULL, Budget
from sparsebench.records.cell import Cell, Part
from sparsebench.records.origin import Origin
from sparsebench.records.record import Failure, Metric, Record


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


def test_a_flat_record_says_what_it_is_about_and_each_metric(record: Callable[..., Record]) -> None:
    row = flatten(record())
    assert (row["task"], row["model"], row["strategy"], row["kind"]) == ("theory", "shallow", "mine(a=1)", "deployable")
    assert (row["n_train"], row["repetition"], row["status"], row["accuracy"]) == (8, 3, "ok", 0.25)
    assert row["budget"] == "keep 0.5 power-floor" and row["cell_id"] == record().cell.id


def test_the_budget_of_a_flat_record_says_where_tokens_are_removed(record: Callable[..., Record]) -> None:
    assert flatten(record(budget=FULL))["budget"] == "macs 1"
    assert flatten(record(where="train"))["budget"] == "keep 0.5 power-floor, in training only"
    assert flatten(record(where="test"))["budget"] == "keep 0.5 power-floor, in the test only"


def test_a_flat_failure_has_its_reason(record: Callable[..., Record]) -> None:
    row = flatten(record(status="failed", metrics={}, failure=Failure(reason="it broke")))
    assert (row["status"], row["reason"]) == ("failed", "it broke")
    assert "accuracy" not in row


def test_the_setting_is_the_task_and_model_and_neither_strategy_nor_seed(record: Callable[..., Record]) -> None:
    one = record()
    other = one.model_copy(update={"cell": one.cell.model_copy(update={"repetition": 4, "strategy": Part(name="x")})})
    assert flatten(one)["setting"] == flatten(other)["setting"]
    task = Part(name="theory", params={"tokens": 30})
    changed = one.model_copy(update={"cell": one.cell.model_copy(update={"task": task})})
    assert flatten(one)["setting"] != flatten(changed)["setting"]


def test_cautions_name_unfinished_training_missed_budgets_and_mixed_devices() -> None:
    assert cautions(WHOLE) == []
    stuck = flat("mine", 0, "theory", success=0.0, fitted=0.0, n_train=4)
    fitted = flat("mine", 1, "theory", success=0.0, fitted=1.0, n_train=4)
    dear = flat("mine", 0, macs_ratio=0.52, macs_ratio_planned=0.5, device="cuda:0 X")
    near = flat("mine", 1, macs_ratio=0.505, macs_ratio_planned=0.5)
    lines = cautions([stuck, fitted, dear, near])
    assert lines[0].startswith("mine: 1 of 2 trials reached the step limit")
    assert lines[1] == "mine, macs 0.5, on composite: realised MACs 0.520 of dense, planned 0.500"
    assert "several devices" in lines[2] and "cuda:0 X" in lines[2] and len(lines) == 3


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
