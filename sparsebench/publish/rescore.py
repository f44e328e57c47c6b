"""Every metric that test items decide, made again from a record's own outcomes, by the function that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from sparsebench.errors import UserError
from sparsebench.measure.metrics import decided_by
from sparsebench.measure.scores import TOP_5_FROM, Items, Score, scores, share
from sparsebench.publish.folder import Unfit, plain
from sparsebench.records.record import Metric, Record, unpack, unpack_reals
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.images import ImageTask

TOLERANCE = 1e-14
"""Shares are the same to the bit wherever they are computed. Sums and square roots are rounded, and another build may
sum n numbers in another order: they differ by no more than log2(n) 2^-53 then (Higham 1993), 2e-15 for a million."""
BY_GROUP, TRAINED = "accuracy: ", "train_samples: "
SUCCESSES = frozenset({"success", "success_loss"})
P_LABEL = "p_label"
UNTOLD = frozenset({"accuracy_top5", "test_loss", P_LABEL, *SUCCESSES})
"""What schema 1, which has neither ranks nor losses, cannot tell."""
MOST_GROUPS, MOST_TRAINED = 6, 1e12


def is_decided(name: str) -> bool:
    """Say whether outcomes decide a metric; numbers of training samples are taken as they are reported."""
    return decided_by(name) == "outcomes"


def items_of(record: Record) -> Items | None:
    """Return a record's outcomes; where schema 1 wrote them, with ranks of 0 and 1 and losses of 0.

    Raises:
        Unfit: they are torn, or contradict each other.
    """
    packed = record.outcomes
    if packed is None:
        return None
    try:
        predicted, labels, groups = (unpack(text, packed.n) for text in (packed.predicted, packed.label, packed.group))
        wrong = predicted != labels
        shown = unpack(packed.foreground, packed.n) if packed.foreground else None
        if not (packed.rank or packed.loss):
            ranks, losses = wrong.astype(np.int64), np.zeros(packed.n, np.float32)
            return Items(predicted, labels, groups, ranks, losses, shown)
        ranks, losses = unpack(packed.rank, packed.n), unpack_reals(packed.loss, packed.n)
    except ValueError as error:
        raise Unfit(plain(error)) from error
    if not (np.isfinite(losses) & (losses >= 0)).all():
        raise Unfit("a test item has a loss that is negative or not finite")
    if ((ranks > 0) != wrong).any():
        raise Unfit("a test item's rank and its predicted class disagree")
    return Items(predicted, labels, groups, ranks, losses, shown)


def has_losses(record: Record) -> bool:
    """Say whether the outcomes are of a schema that tells all."""
    return record.outcomes is not None and bool(record.outcomes.loss)


def differences(record: Record, items: Items, task: Task | None) -> Iterator[str]:
    """Yield what in a record is not what its outcomes come to.

    Which group has which number is not in a record: an order of the names in which all is right is looked for.

    Args:
        record: one that is ok.
        items: its outcomes.
        task: the cell's, whose criterion says what a success is; None where it is unknown.
    """
    classes = _classes(items, task)
    if classes and max(part.max() for part in (items.labels, items.predicted, items.ranks)) >= max(classes):
        yield f"a test item has a class, or a rank, that is none of {max(classes)}"
    yield from _strange_foregrounds(items, task)
    untold = frozenset() if has_losses(record) else UNTOLD
    untold |= SUCCESSES if task is None else set()
    names = sorted(name.removeprefix(BY_GROUP) for name in record.metrics if name.startswith(BY_GROUP))
    if len(names) > MOST_GROUPS:
        yield f"it has {len(names)} groups, of which no more than {MOST_GROUPS} are compared here"
        return
    if items.groups.max() >= max(1, len(names)):
        yield "a test item is in a group without a name"
        return
    reported = "accuracy_top5" in record.metrics
    many = (reported or min(classes) >= TOP_5_FROM) and max(classes) >= TOP_5_FROM if classes else reported
    expected = (_recompute(record, items, order, task, many) for order in _orders(record.metrics, items, names))
    yield from min((list(_compare(record.metrics, each, untold)) for each in expected), key=len)


def _strange_foregrounds(items: Items, task: Task | None) -> Iterator[str]:
    """Yield what foregrounds cannot be."""
    if items.foregrounds is None:
        return
    if task is not None and not isinstance(task, ImageTask | Folder):
        yield f"its test items show foregrounds, and those of task '{task.name}' have none"
    pairs = np.stack([items.foregrounds, items.labels])
    if np.unique(pairs, axis=1).shape[1] > len(np.unique(items.foregrounds)):
        yield "a foreground of its test items is of two classes"


def _classes(items: Items, task: Task | None) -> tuple[int, ...]:
    """Return how many classes there can be, or nothing where that is not known."""
    try:
        return () if task is None else task.class_counts(items.labels)
    except UserError:
        return ()


def _orders(metrics: Mapping[str, Metric], items: Items, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the orders of the groups' names in which each has its accuracy; the plain one if there is none."""
    correct = items.correct
    shares = [share(BY_GROUP, correct[items.groups == number]) for number in range(len(names))]
    fits = [{name for name in names if _same(metrics[BY_GROUP + name], score)} for score in shares]
    return [order for order in permutations(names) if all(map(set.__contains__, fits, order))] or [tuple(names)]


def _recompute(record: Record, items: Items, order: Sequence[str], task: Task | None, many: bool) -> dict[str, Score]:
    """Return the metrics by name that the outcomes come to, the groups having these names, of many classes or few."""
    metrics = (record.metrics.get(TRAINED + name) for name in order)
    sizes = [0.0 if one is None or one.value is None else one.value for one in metrics]
    if any(not 0 <= size <= MOST_TRAINED for size in sizes):
        raise Unfit("a group's number of training samples is out of range")
    made = {
        score.name: score
        for score in scores(items, TOP_5_FROM if many else 2, order or ["all"], [int(size) for size in sizes])
    }
    if P_LABEL in record.metrics and (task is None or task.recipe().loss == "cross-entropy"):
        made[P_LABEL] = items.p_label  # older records do not have it
    successes = {} if task is None else task.successes(items.loss, items.accuracy)
    return made | {name: Score.of(name, float(success), 1) for name, success in successes.items()}


def _compare(metrics: Mapping[str, Metric], made: Mapping[str, Score], untold: frozenset[str]) -> Iterator[str]:
    for name in sorted((set(made) | {name for name in metrics if is_decided(name)}) - untold):
        reported, score = metrics.get(name), made.get(name)
        if reported is None or score is None:
            yield f"{plain(name, 60)} is " + ("missing" if reported is None else "there, and outcomes do not have it")
        elif not _same(reported, score):
            yield f"{plain(name, 60)} is {_text(reported)}, and its outcomes come to {_text(score)}"


def _same(reported: Metric, score: Score) -> bool:
    if (reported.unit, reported.n, reported.method) != (score.unit, score.n, score.method):
        return False
    return all(same(getattr(reported, end), getattr(score, end)) for end in ("value", "low", "high"))


def same(a: float | None, b: float | None) -> bool:
    """Say whether two numbers, or their absence, are the same but for rounding."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _text(one: Metric | Score) -> str:
    interval = "" if one.low is None else f" [{one.low!r}, {one.high!r}]"
    return f"{one.value!r}{interval} {plain(one.unit, 20)} of {one.n}"
