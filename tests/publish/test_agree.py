"""Cells that are run again, and what they may differ by."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebench.measure.metrics import Items
from sparsebench.publish.agreement import compare
from sparsebench.publish.submission import read_records
from sparsebench.records.record import Record, bytes_of

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ELSEWHERE = "0" * 16
Pairs = list[tuple[Items, Items]]


@pytest.fixture(scope="module")
def record(sound: Path) -> Record:
    """Return a record of a trained cell."""
    return next(r for r in read_records(sound) if r.label == "norm" and r.cell.task.name == "spurious")


def changed(record: Record, **metrics: float) -> Record:
    usual = record.metrics["accuracy"]
    known = {name: record.metrics.get(name, usual).model_copy(update={"value": v}) for name, v in metrics.items()}
    return record.model_copy(update={"metrics": record.metrics | known})


def made(record: Record, items: Items, repetition: int = 0, **metrics: float) -> Record:
    """Return the record with these outcomes."""
    arrays = {"predicted": items.predicted, "label": items.labels, "group": items.groups, "rank": items.ranks}
    outcomes = {name: bytes_of(values) for name, values in arrays.items()} | {"n": len(items.labels), "foreground": b""}
    assert record.outcomes is not None
    update = {"outcomes": record.outcomes.model_copy(update=outcomes), "cell_id": f"{repetition:016x}"}
    return changed(record.model_copy(update=update), **{"test_loss": items.loss, **metrics})


def items(wrong: Any, n: int = 400, loss: float = 0.5) -> Items:
    labels, predicted = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    predicted[wrong] = 1
    return Items(predicted, labels, labels, predicted, np.full(n, loss, np.float32))


def elsewhere(record: Record, pairs: Pairs, **metrics: float) -> tuple[list[str], int, float]:
    """Return how cells agree of which the first is said to come from another machine."""
    here = [made(record, new, k, success=0.0) for k, (_, new) in enumerate(pairs)]
    there = [
        made(record, old, k, **({"success": 0.0} | metrics)).model_copy(update={"environment": ELSEWHERE})
        for k, (old, _) in enumerate(pairs)
    ]
    return compare(list(zip(there, here, strict=True)), ())


def cells(better: int, number: int = 1, noise: int = 0) -> Pairs:
    """Return cells with so many more items right there than here, and so many that differ either way."""
    return [(items(range(noise, 2 * noise)), items([*range(noise), *range(200, 200 + better)]))] * number


@pytest.mark.parametrize(
    ("pairs", "metrics", "said"),
    [
        (cells(0, 5), {}, ""),
        (cells(2), {}, ""),  # half a point
        (cells(40), {}, "in 1 cells the reported accuracy is 10.0 points higher"),
        (cells(40, 10), {}, "in 10 cells the reported accuracy is 10.0 points higher"),
        (cells(5, 10, noise=20), {}, ""),
        (cells(25, noise=100), {}, "6.2 points higher"),  # noise hides it from the test, and it is more than 5 points
        (cells(10, 10, noise=20), {}, "2.5 points higher"),  # of one cell no more than noise
        *(([(items([], loss=there), items([], loss=here))], {}, said) for there, here, said in (
            (0.5, 0.5, ""), (0.47, 0.5, ""), (0.4, 0.5, "mean test_loss is 0.4, and 0.5 here"), (0, 1e-4, ""))),
        (cells(0, 3), {"success": 1.0}, "in 3 cells the reported mean success is 1, and 0 here"),
    ],
)  # fmt: skip
def test_cells_of_another_machine(record: Record, pairs: Pairs, metrics: dict[str, float], said: str) -> None:
    wrong, number, points = elsewhere(record, pairs, **metrics)
    assert said in " ".join(wrong) and bool(wrong) == bool(said), wrong
    old, new = (np.concatenate([pair[k].correct for pair in pairs]) for k in (0, 1))
    assert number == len(pairs)
    assert points == pytest.approx(100 * (old.mean() - new.mean()))


def test_worse_there_than_here_is_a_forgery_only_of_what_is_beside(record: Record) -> None:
    pairs = [(new, old) for old, new in cells(30, 4)]
    assert elsewhere(record, pairs) == ([], 4, pytest.approx(7.5))
    beside = record.model_copy(update={"kind": "baseline"})
    assert "7.5 points lower than here" in elsewhere(beside, pairs)[0][0]


@pytest.mark.parametrize("better", [8, 12, 20])
def test_to_ask_for_more_cells_lets_no_more_through(record: Record, better: int) -> None:
    found = [bool(elsewhere(record, cells(better, number, 10))[0]) for number in (1, 2, 4, 8, 46)]
    assert found == sorted(found) and found[-1]


def test_token_counts_are_the_same_wherever_unless_they_hang_on_images(record: Record) -> None:
    for factor, adaptive in ((0.99, True), (0.97, False)):
        steps = [replace(step, tokens_out=step.tokens_out * factor) for step in record.trajectory]
        there = record.model_copy(update={"trajectory": tuple(steps), "environment": ELSEWHERE})
        assert "keeps other numbers of tokens" in compare([(there, record)], ())[0][0]
        assert (compare([(there, record)], {"norm"})[0] == []) == adaptive


def test_untrained_weights_class_alike_wherever(record: Record) -> None:
    frozen = record.model_copy(update={"cell": record.cell.model_copy(update={"track": "frozen"})})
    assert elsewhere(frozen, [(items(range(4)), items([]))])[0] == []
    assert "98.75% of its predictions" in elsewhere(frozen, [(items(range(5)), items([]))])[0][0]


def test_the_same_machine_is_exactly_the_same_and_of_the_same_things(record: Record) -> None:
    assert record.outcomes is not None
    assert compare([(record, record)], ()) == ([], 0, 0.0)
    shown = record.outcomes.model_copy(update={"foreground": bytes_of(np.arange(record.outcomes.n))})
    lost = {"status": "timeout", "outcomes": None, "metrics": {}}
    other = "other outcomes here, on the same machine"
    for there, here, said in (
        (changed(record, test_loss=(record.metrics["test_loss"].value or 0.0) * (1 + 1e-7)), record, other),
        (changed(record, success=1.0), changed(record, success=0.0), other),
        (record.model_copy(update={"outcomes": shown}), record, "test items with other foregrounds here"),
        (record.model_copy(update={"kind": "oracle"}), record, "is oracle there"),
        (record, record.model_copy(update=lost), "is timeout here"),
    ):
        assert said in compare([(there, here)], ())[0][0]
    older = record.model_copy(update={"metrics": {k: v for k, v in record.metrics.items() if k != "p_label"}})
    assert compare([(older, record)], ())[0] == []  # which had no p_label
