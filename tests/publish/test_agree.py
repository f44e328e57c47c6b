"""Cells that are run again, and what they may differ by."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebench.measure.scores import Items
from sparsebench.publish.agree import Agreement, compare
from sparsebench.publish.folder import read_records
from sparsebench.records.record import Record, pack

ELSEWHERE = "0" * 16


@pytest.fixture(scope="module")
def record(sound: Path) -> Record:
    """Return a record of a trained cell."""
    return next(r for r in read_records(sound) if r.label == "norm" and r.cell.task.name == "theory")


def made(record: Record, items: Items, repetition: int = 0, **metrics: float) -> Record:
    """Return the record with these outcomes."""
    arrays = {"predicted": items.predicted, "label": items.labels, "group": items.groups, "rank": items.ranks}
    outcomes = {name: pack(values) for name, values in arrays.items()} | {"loss": ""}
    metrics = {"test_loss": items.loss, **metrics}
    known = {name: record.metrics[name].model_copy(update={"value": value}) for name, value in metrics.items()}
    return record.model_copy(update={
        "outcomes": record.outcomes.model_copy(update=outcomes | {"n": len(items.labels), "foreground": ""}),
        "metrics": record.metrics | known, "cell_id": f"{repetition:016x}",
    })  # fmt: skip


def items(wrong: Any, n: int = 400, loss: float = 0.5) -> Items:
    labels, predicted = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    predicted[wrong] = 1
    return Items(predicted, labels, labels, predicted, np.full(n, loss, np.float32))


def elsewhere(record: Record, pairs: list[tuple[Items, Items]], **metrics: float) -> Agreement:
    """Return how cells agree of which the first is said to come from another machine."""
    here = [made(record, new, k, success=0.0) for k, (_, new) in enumerate(pairs)]
    there = [
        made(record, old, k, **({"success": 0.0} | metrics)).model_copy(update={"environment": ELSEWHERE})
        for k, (old, _) in enumerate(pairs)
    ]
    return compare(list(zip(there, here, strict=True)), ())


def cells(better: int, number: int, noise: int = 0) -> list[tuple[Items, Items]]:
    """Return cells with so many more items right there than here, and so many that differ either way."""
    return [(items(range(noise, 2 * noise)), items([*range(noise), *range(200, 200 + better)]))] * number


@pytest.mark.parametrize(
    ("better", "number", "noise", "agrees"),
    [
        (0, 5, 0, True),
        (2, 1, 0, True),  # half a point
        (40, 1, 0, False),
        (40, 10, 0, False),  # ten points in each of more cells
        (5, 10, 20, True),
        (25, 1, 100, False),  # noise hides it from the test, and it is more than 5 points
        (10, 10, 20, False),  # of one cell no more than noise
    ],
)
def test_cells_of_another_machine_are_not_better_than_here(
    record: Record, better: int, number: int, noise: int, agrees: bool
) -> None:
    agreement = elsewhere(record, cells(better, number, noise))
    assert (agreement.wrong == []) == agrees, agreement
    assert agreement.elsewhere == number and agreement.points == pytest.approx(better / 4)


def test_worse_there_than_here_is_no_forgery_and_is_told(record: Record) -> None:
    agreement = elsewhere(record, [(new, old) for old, new in cells(30, 2)])
    assert agreement.wrong == [] and agreement.points == pytest.approx(7.5)


def test_a_strategy_beside_the_published_one_is_not_reported_worse(record: Record) -> None:
    pairs = [(new, old) for old, new in cells(30, 4)]
    beside = record.model_copy(update={"kind": "baseline"})
    assert "points fewer of the test items" in elsewhere(beside, pairs).wrong[0]
    assert elsewhere(record, pairs).wrong == []


@pytest.mark.parametrize("better", [8, 12, 20])
def test_to_ask_for_more_cells_lets_no_more_through(record: Record, better: int) -> None:
    found = [bool(elsewhere(record, cells(better, number, 10)).wrong) for number in (1, 2, 4, 8, 46)]
    assert found == sorted(found) and found[-1]


@pytest.mark.parametrize(
    ("there", "here", "agrees"), [(0.5, 0.5, True), (0.47, 0.5, True), (0.4, 0.5, False), (0, 1e-4, True)]
)
def test_losses_are_compared_too(record: Record, there: float, here: float, agrees: bool) -> None:
    agreement = elsewhere(record, [(items([], loss=there), items([], loss=here))])
    assert (agreement.wrong == []) == agrees, agreement


def test_successes_are_compared_too(record: Record) -> None:
    agreement = elsewhere(record, cells(0, 3), success=1.0)
    assert "in 3 cells the mean success is 1 there and 0 here" in agreement.wrong[0]
    (one,) = cells(0, 1)
    pairs = [(made(record, one[0], 0, success=1.0), made(record, one[1], 0, success=0.0))]
    assert compare([(pairs[0][1], pairs[0][0])], ()).wrong and compare(pairs, ()).wrong  # on the same machine


def test_token_counts_are_the_same_wherever_unless_they_hang_on_images(record: Record) -> None:
    steps = [step.model_copy(update={"tokens_out": step.tokens_out * 0.99}) for step in record.trajectory]
    there = record.model_copy(update={"trajectory": tuple(steps), "environment": ELSEWHERE})
    assert "keeps other numbers of tokens" in compare([(there, record)], ()).wrong[0]
    assert compare([(there, record)], {"norm"}).wrong == []


def test_untrained_weights_class_alike_wherever(record: Record) -> None:
    frozen = record.model_copy(update={"cell": record.cell.model_copy(update={"track": "frozen"})})
    assert elsewhere(frozen, [(items(range(4)), items([]))]).wrong == []
    assert "98.75% of its predictions" in elsewhere(frozen, [(items(range(5)), items([]))]).wrong[0]


def test_the_same_machine_is_exactly_the_same(record: Record) -> None:
    assert compare([(record, record)], ()) == Agreement([], 0, 0.0)
    loss = record.metrics["test_loss"]
    close = loss.model_copy(update={"value": (loss.value or 0.0) * (1 + 1e-7)})
    other = record.model_copy(update={"metrics": record.metrics | {"test_loss": close}})
    assert "other outcomes here, on the same machine" in compare([(other, record)], ()).wrong[0]
    older = record.model_copy(update={"metrics": {k: v for k, v in record.metrics.items() if k != "p_label"}})
    assert compare([(older, record)], ()).wrong == []  # which had no p_label


def test_cells_of_other_things_do_not_agree(record: Record) -> None:
    assert record.outcomes is not None
    shown = record.outcomes.model_copy(update={"foreground": pack(np.arange(record.outcomes.n))})
    moved = record.model_copy(update={"outcomes": shown})
    assert "test items with other foregrounds here" in compare([(moved, record)], ()).wrong[0]
    assert "is oracle there" in compare([(record.model_copy(update={"kind": "oracle"}), record)], ()).wrong[0]
    lost = record.model_copy(update={"status": "timeout", "outcomes": None, "metrics": {}})
    assert "is timeout here" in compare([(record, lost)], ()).wrong[0]
