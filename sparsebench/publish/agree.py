"""Whether cells that were run again agree with what was reported of them: to the bit, or as far as rounding lets them.

On the same machine and libraries, and a CPU, everything is the same to the bit. Elsewhere sums are rounded otherwise,
which training makes large. That it was elsewhere is the submission's claim, so it buys little: what may not hang on
rounding must be the same, and the accuracies, losses and successes of all drawn cells of a task together may not be
significantly better than those here, nor by more than `MOST_BETTER`. No level is divided by the number of cells: to ask
for more of them lets no more through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparsebench.measure.scores import Items
from sparsebench.publish import rescore
from sparsebench.publish.folder import plain
from sparsebench.records import environment
from sparsebench.records.record import Record, TokenStep
from sparsebench.stats.paired import mcnemar

FALSE_ALARM = 0.01
"""Chance of a task's one-sided test to find that sound cells of another machine are better than those here."""
SURE = 2.33
"""Standard errors that are passed with that chance."""
SLACK = 0.005
"""Share of a task's test items that may be better than here whatever the test says."""
MOST_BETTER = 0.05
"""Share by which they may not be better, whatever the test says; of few items, n, it is 1 / sqrt(n)."""
ALONE = 2.0
"""How many times that one cell may be better: cells beside it do not make up for more."""
AGREEING = 0.99
"""Share of the test items that weights which are not trained must class alike: nothing but rounding differs."""
FEW = 0.02
"""Difference of token counts, as a share, that rounding may make where images keep numbers of tokens of their own."""
LOWER, MOST_LOWER = 0.1, 0.5
"""Share by which a task's mean test loss may be lower than here whatever the test says, and by which it may not."""
MORE_SUCCESSES = 0.1
"""Share of a task's cells that may succeed more often than here."""


class Cells(NamedTuple):
    """A cell as it was reported, and as it came out here, with the outcomes of both."""

    before: Record
    after: Record
    old: Items
    new: Items

    @property
    def what(self) -> str:
        """The cell, in words."""
        return _name(self.before)

    @property
    def is_trained(self) -> bool:
        """Whether weights were trained in it, or for it."""
        return self.before.cell.n_train > 0 and self.before.cell.track != "frozen"


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
    away: list[Cells] = []
    for before, after in pairs:
        old, new = rescore.items_of(before), rescore.items_of(after)
        if problem := _other_cell(before, after, old, new):
            wrong.append(problem)
            continue
        assert old is not None and new is not None
        cells = Cells(before, after, old, new)
        if is_same_machine(before, after):
            wrong += [] if _is_same(cells) else [
                f"{cells.what} has other outcomes here, on the same machine and libraries"
            ]  # fmt: skip
            continue
        away.append(cells)
        wrong += [
            text for text in (_counts(cells, before.cell.strategy.name in adaptive), _other_classes(cells)) if text
        ]
    tasks: dict[tuple[str, str], list[Cells]] = {}
    for cells in away:
        tasks.setdefault((cells.before.cell.task.name, cells.before.label), []).append(cells)
    for (task, label), group in sorted(tasks.items()):
        wrong += [f"{plain(label, 60)} on {plain(task, 40)}: {text}" for text in _better(group)]
    points = max((100 * abs(gain) for group in tasks.values() for gain in [_gain(group)]), default=0.0)
    return Agreement(wrong, len(away), points)


def is_same_machine(before: Record, after: Record) -> bool:
    """Say whether both were made with the same machine and libraries, and on a CPU, by what the records say."""
    return environment.same(before.environment, after.environment) and before.device == after.device == "cpu"


def _name(record: Record) -> str:
    return f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"


def _other_cell(before: Record, after: Record, old: Items | None, new: Items | None) -> str | None:
    """Return how two records are of other things, so that nothing else is compared, or None."""
    what = _name(before)
    if new is None or old is None:
        reason = after.failure.reason if after.failure else ""
        return f"{what} is {after.status} here: {plain(reason)}"
    if before.kind != after.kind:
        return f"{what} is {before.kind} there and {after.kind} here"
    if not (np.array_equal(old.labels, new.labels) and np.array_equal(old.groups, new.groups)):
        return f"{what} has other test items here"
    if old.foregrounds is not None and (new.foregrounds is None or (old.foregrounds != new.foregrounds).any()):
        return f"{what} has other foregrounds here"
    return None


def _is_same(cells: Cells) -> bool:
    return cells.before.trajectory == cells.after.trajectory and all(
        np.array_equal(getattr(cells.old, name), getattr(cells.new, name)) for name in ("predicted", "ranks", "losses")
    )


def _counts(cells: Cells, adaptive: bool) -> str | None:
    """Return how the tokens of one cell are others: but for adaptive strategies their numbers hang on no rounding."""
    one, other = cells.before.trajectory, cells.after.trajectory
    slack = FEW if adaptive else 0.0
    if len(one) == len(other) and all(_like(a, b, slack) for a, b in zip(one, other, strict=True)):
        return None
    ratios = [record.metrics["macs_ratio"].value or 0.0 for record in (cells.before, cells.after)]
    return (
        f"{cells.what} keeps other numbers of tokens: {ratios[0]:.4f} of the dense MACs there and {ratios[1]:.4f} here"
    )


def _like(one: TokenStep, other: TokenStep, slack: float) -> bool:
    if not slack:
        return one == other
    names = ("tokens_in", "tokens_out", "own", "rested")
    numbers = [(float(getattr(one, name)), float(getattr(other, name))) for name in names]
    return all(abs(a - b) <= slack * max(abs(a), abs(b)) for a, b in numbers)


def _other_classes(cells: Cells) -> str | None:
    if cells.is_trained:
        return None
    alike = float((cells.old.predicted == cells.new.predicted).mean())
    return None if alike >= AGREEING else f"{cells.what}: {alike:.2%} of the predictions are the same here"


def _gain(group: Sequence[Cells]) -> float:
    """Return by how much more of all test items are right there than here, as a share."""
    return sum(float(c.old.correct.sum() - c.new.correct.sum()) for c in group) / sum(len(c.old.labels) for c in group)


def _most(group: Sequence[Cells]) -> float:
    """Return the share of the items by which cells may not be better, whatever the test says."""
    return max(MOST_BETTER, sum(len(c.old.labels) for c in group) ** -0.5)


def _is_ahead(group: Sequence[Cells], sign: int) -> bool:
    """Say whether more (sign 1), or fewer (-1), of the items are right there than here than rounding explains."""
    gain = sign * _gain(group)
    counts = [sum(int((c.old.correct & ~c.new.correct).sum()) for c in group),
              sum(int((~c.old.correct & c.new.correct).sum()) for c in group)]  # fmt: skip
    surely = gain > SLACK and float(mcnemar(np.asarray(counts[0]), np.asarray(counts[1]))) / 2 < FALSE_ALARM
    return bool(gain > _most(group) or surely)


def _better(group: Sequence[Cells]) -> Iterator[str]:
    """Yield in what the reported cells of a task are better than those here by more than rounding makes them.

    Cells of a strategy beside the published one may not be worse either.
    """
    gain, cells = _gain(group), f"{len(group)} {'cell' if len(group) == 1 else 'cells'}"
    if _is_ahead(group, 1):
        accuracies = [np.mean([np.mean(items(c).correct) for c in group]) for items in (_items_before, _items_after)]
        yield (
            f"in {cells} {100 * gain:.1f} points more of the test items are right there than here, on the same items "
            f"({accuracies[0]:.4f} and {accuracies[1]:.4f})"
        )
    signs = (1,) if group[0].before.kind == "deployable" else (1, -1)
    if len(signs) > 1 and _is_ahead(group, -1):
        yield f"in {cells} {-100 * gain:.1f} points fewer of the test items are right there than here"
    for one in group:
        if any(sign * _gain([one]) > ALONE * _most([one]) for sign in signs):
            yield f"{one.what} alone is {100 * _gain([one]):+.1f} points from what it is here"
    drops = np.concatenate([c.new.losses.astype(np.float64) - c.old.losses for c in group])
    here = float(np.mean(np.concatenate([c.new.losses for c in group]), dtype=np.float64))
    drop, error = float(drops.mean()), float(drops.std() / len(drops) ** 0.5)
    scale = max(here, 1 / len(drops))  # below, a loss is less than that of one item which is barely right
    if drop > MOST_LOWER * scale or (drop > LOWER * scale and drop > SURE * error):
        yield f"in {cells} the mean test loss is {here - drop:.4g} there and {here:.4g} here"
    for name in sorted(rescore.SUCCESSES):
        if surplus := _surplus(group, name):
            yield f"{surplus} of {cells} succeed there and not here, by {name}"


def _items_before(cells: Cells) -> Items:
    return cells.old


def _items_after(cells: Cells) -> Items:
    return cells.new


def _surplus(group: Sequence[Cells], name: str) -> int:
    """Return how many more cells succeed there than here, or 0 if it is few."""
    values = [(c.before.metrics.get(name), c.after.metrics.get(name)) for c in group]
    known = [(a.value or 0.0, b.value or 0.0) for a, b in values if a is not None and b is not None]
    surplus = round(sum(a - b for a, b in known))
    return surplus if surplus > MORE_SUCCESSES * len(known) else 0
