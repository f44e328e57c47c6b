"""Whether cells that were run again agree with what was reported of them: exactly, or as far as rounding lets them.

On the same machine and libraries, and a CPU, everything is the same. Elsewhere sums are rounded otherwise, which
training makes large. That it was elsewhere is the submission's claim, so it buys little: what may not hang on rounding
must be the same, and all drawn cells of a task together may not be significantly better than they are here, nor by more
than `MOST_BETTER`. No level is divided by the number of cells: to ask for more of them lets no more through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparsebench.measure.scores import Items
from sparsebench.publish.consistent import called, items_of
from sparsebench.records.record import Record, TokenStep
from sparsebench.stats.paired import mcnemar
from sparsebench.text import plain

FALSE_ALARM = 0.01
"""Chance of a task's one-sided test to find that sound cells of another machine are better than those here."""
SLACK, MOST_BETTER = 0.005, 0.05
"""Share of a task's test items that may be better than here whatever the test says, and that may not; of few items, n,
the latter is 1 / sqrt(n)."""
AGREEING = 0.99
"""Share of the test items that weights which are not trained must class alike: nothing but rounding differs."""
FEW = 0.02
"""Difference of token counts, as a share, that rounding may make where images keep numbers of tokens of their own."""
MEANS = {"test_loss": -1, "p_label": 1, "success": 1, "success_loss": 1}
"""Metrics that hang on losses, which records do not have item by item, and in which direction they are better."""
BETTER = 0.1
"""Share by which the mean of one over a task's cells may be better than here; of successes, share of the cells."""


class Cells(NamedTuple):
    """A cell as it was reported, and as it came out here, with the outcomes of both."""

    before: Record
    after: Record
    old: Items
    new: Items


class Agreement(NamedTuple):
    """How cells agree.

    Attributes:
        wrong: where they do not.
        elsewhere: of how many cells it was claimed that they ran on another machine, or not on a CPU.
        points: by how much the accuracies of such cells agree, in percentage points, the worst of all tasks.
    """

    wrong: list[str]
    elsewhere: int
    points: float


def compare(pairs: Sequence[tuple[Record, Record]], adaptive: Collection[str]) -> Agreement:
    """Return how records agree with those of the same cells that were made here.

    Args:
        pairs: as reported, and as made here.
        adaptive: names of the strategies that keep numbers of tokens which hang on the images.
    """
    wrong: list[str] = []
    tasks: dict[tuple[str, str], list[Cells]] = {}
    for before, after in pairs:
        if after.status != "ok":
            reason = after.failure.reason if after.failure else ""
            wrong.append(f"{called(before)} is {after.status} here: {plain(reason)}")
            continue
        cells = Cells(before, after, items_of(before), items_of(after))
        is_same = before.environment == after.environment and before.device == after.device == "cpu"
        odd = _other_cell(cells) or (_other_outcomes(cells) if is_same else _other_elsewhere(cells, adaptive))
        if odd:
            wrong.append(f"{called(before)} {odd}")
        elif not is_same:
            tasks.setdefault((before.cell.task.name, before.label), []).append(cells)
    for (task, label), group in sorted(tasks.items()):
        wrong += [f"{plain(label, 60)} on {plain(task, 40)}: {text}" for text in _better(group)]
    points = max((100 * abs(_gain(group)) for group in tasks.values()), default=0.0)
    return Agreement(wrong, sum(map(len, tasks.values())), points)


def _other_cell(cells: Cells) -> str | None:
    """Return how two records are of other things, or None."""
    before, after, old, new = cells
    if before.kind != after.kind:
        return f"is {before.kind} there and {after.kind} here"
    for name in ("labels", "groups", "foregrounds"):
        theirs, ours = getattr(old, name), getattr(new, name)
        if not np.array_equal(theirs, ours):
            return f"has test items with other {name} here"
    return None


def _other_outcomes(cells: Cells) -> str | None:
    """Return how a cell came out otherwise on the same machine, or None."""
    before, after, old, new = cells
    values = [{name: record.metrics[name].value for name in MEANS if name in record.metrics} for record in cells[:2]]
    same = before.trajectory == after.trajectory and values[0] == {name: values[1].get(name) for name in values[0]}
    if same and np.array_equal(old.predicted, new.predicted) and np.array_equal(old.ranks, new.ranks):
        return None
    return "has other outcomes here, on the same machine and libraries"


def _other_elsewhere(cells: Cells, adaptive: Collection[str]) -> str | None:
    """Return how a cell came out otherwise in what hangs on no rounding, or None."""
    before, after, old, new = cells
    slack = FEW if before.cell.strategy.name in adaptive else 0.0
    one, other = before.trajectory, after.trajectory
    if len(one) != len(other) or not all(_like(a, b, slack) for a, b in zip(one, other, strict=True)):
        return "keeps other numbers of tokens here"
    alike = float((old.predicted == new.predicted).mean())
    if (before.cell.n_train == 0 or before.cell.track == "frozen") and alike < AGREEING:
        return f"has not been trained, and {alike:.2%} of its predictions are the same here"
    return None


def _like(one: TokenStep, other: TokenStep, slack: float) -> bool:
    if not slack:
        return one == other
    names = ("tokens_in", "tokens_out", "own", "rested")
    return bool(np.allclose([getattr(one, x) for x in names], [getattr(other, x) for x in names], rtol=slack, atol=0.0))


def _gain(group: Sequence[Cells]) -> float:
    """Return by how much more of all test items are right there than here, as a share."""
    return float(np.mean(np.concatenate([c.old.correct.astype(float) - c.new.correct for c in group])))


def _better(group: Sequence[Cells]) -> Iterator[str]:
    """Yield in what the reported cells of a task are better than those here by more than rounding makes them.

    Cells of a strategy beside the published one may not be worse either.
    """
    old, new = (np.concatenate([getattr(c, name).correct for c in group]) for name in ("old", "new"))
    only_old, only_new = (old & ~new).sum(), (new & ~old).sum()
    surely = float(mcnemar(only_old, only_new)) / 2 < FALSE_ALARM
    both = 1 if group[0].before.kind == "deployable" else -1
    for sign in {1, both}:
        gain = sign * _gain(group)
        if gain > max(MOST_BETTER, len(old) ** -0.5) or (surely and gain > SLACK):
            more = "more" if sign > 0 else "fewer"
            yield f"in {len(group)} cells {100 * gain:.1f} points {more} of the test items are right there than here"
    for name, better in MEANS.items():
        values = [[record.metrics[name].value if name in record.metrics else None for record in c[:2]] for c in group]
        known = np.array([pair for pair in values if None not in pair], dtype=float).reshape(-1, 2)
        there, here = known.mean(axis=0) if len(known) else (0.0, 0.0)
        scale = max(abs(here), 1 / len(old)) if name in ("test_loss", "p_label") else 1.0
        if any(sign * better * (there - here) > BETTER * scale for sign in {1, both}):
            yield f"in {len(group)} cells the mean {name} is {there:.4g} there and {here:.4g} here"
