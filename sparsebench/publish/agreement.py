"""Which cells of a submission are run again, and how far a replay agrees with the submission.

On a CPU of the same machine with the same libraries, all results must be equal. On another machine rounding differs,
and training amplifies the difference. But only the submission says that it ran on another machine, so tolerances are
narrow. Results that do not depend on rounding must be equal. Over all drawn cells of a task, the submission must not be
significantly better than the replay, and never by more than `MOST_BETTER`. Significance levels are not divided by the
number of cells, so that more cells do not widen the tolerances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from sparsebench import seeds
from sparsebench.errors import plain
from sparsebench.measure.cost import Step
from sparsebench.publish.submission import cell_name, items_of
from sparsebench.records.record import ON_TRAINED, Record
from sparsebench.stats.paired import mcnemar

FALSE_ALARM = 0.01
"""Level of the one-sided test of a task: the probability that correct cells of another machine are rejected."""
SLACK, MOST_BETTER = 0.005, 0.05
"""Tolerances of a task's accuracy, as shares: a gain up to SLACK is always allowed, a gain above MOST_BETTER never. For
few test items n, the second tolerance is 1 / sqrt(n)."""
AGREEING = 0.99
"""Share of equal predictions that is required if the cell trains no network: only rounding differs."""
FEW = 0.02
"""Relative difference of token counts that rounding may cause if a strategy adapts token counts to the image."""
MEANS = {"test_loss": -1, "p_label": 1, "success": 1, "success_loss": 1, "iou_pixels": 1, "accuracy_boundary": 1}
"""Metrics that depend on losses or pixels of single test items, which records do not have: 1 if more is better, else
-1."""
BETTER = 0.1
"""Share by which the mean of such a metric may be better than the replay; for successes and accuracies, an
absolute share."""


def draw(records: Sequence[Record], strategy: str, number: int | None, seed: int) -> list[Record]:
    """Draw `number` of the records, or all for None, alternately from the strategy's records and from the others.

    Each of the two groups alternates between tasks. The draw depends only on cell ids and on a seed that the submission
    cannot know, not on other content of the records.
    """
    in_random_order = sorted(records, key=lambda record: seeds.seed_of("replay", str(seed), record.cell_id))
    submitted: dict[str, list[Record]] = defaultdict(list)
    others: dict[str, list[Record]] = defaultdict(list)
    for record in in_random_order:
        by_task = submitted if record.cell.strategy.name == strategy else others
        by_task[record.cell.task.name].append(record)
    return _in_turn([_in_turn(submitted.values()), _in_turn(others.values())])[:number]


def _in_turn(groups: Iterable[Sequence[Record]]) -> list[Record]:
    """Return the first record of each group, then the second of each that has one, and so on."""
    rounds = zip_longest(*groups)
    return [record for one_of_each in rounds for record in one_of_each if record is not None]


Pair = tuple[Record, Record]


def compare(pairs: Sequence[Pair], adaptive: Collection[str]) -> tuple[list[str], int, float]:
    """Compare reported records with the replayed records of the same cells.

    Args:
        pairs: the reported and the replayed record of each cell.
        adaptive: names of the strategies whose token counts depend on the image.

    Returns:
        The disagreements; the number of cells that ran on another machine or not on a CPU, according to the submission;
        and the largest difference of the accuracies of these cells over tasks, in percentage points.
    """
    wrong: list[str] = []
    tasks: dict[tuple[str, str], list[Pair]] = {}
    for before, after in pairs:
        exact = before.environment == after.environment and before.device == after.device == "cpu"
        slack = FEW if before.cell.strategy.name in adaptive else 0.0
        deviation = _deviation(before, after, exact, slack)
        if deviation:
            wrong.append(f"{cell_name(before)} {deviation}")
        elif not exact:
            tasks.setdefault((before.cell.task.name, before.label), []).append((before, after))
    points = 0.0
    for (task, label), group in sorted(tasks.items()):
        old = np.concatenate([items_of(before).correct for before, _ in group])
        new = np.concatenate([items_of(after).correct for _, after in group])
        points = max(points, 100 * abs(float(old.mean() - new.mean())))
        wrong += [f"{plain(label, 60)} on {plain(task, 40)}: {text}" for text in _gains(group, old, new)]
    return wrong, sum(map(len, tasks.values())), points


def _deviation(before: Record, after: Record, exact: bool, slack: float) -> str:
    """Return how the replayed record `after` differs from the reported one, or "".

    With `exact` all results must be equal, otherwise those that do not depend on rounding, and token counts within the
    relative tolerance `slack`.
    """
    if after.status != "ok" or before.outcomes is None or after.outcomes is None:
        return f"is {after.status} here: {plain(after.failure.reason) if after.failure else ''}"
    if before.kind != after.kind:
        return f"is {before.kind} there and {after.kind} here"
    for name in ("label", "group", "foreground"):
        if getattr(before.outcomes, name) != getattr(after.outcomes, name):
            return f"has test items with other {name}s here"
    if exact:
        means = [name for name in MEANS if name in before.metrics]  # earlier versions lack some
        has_equal_means = all(before.metrics[name] == after.metrics.get(name) for name in means)
        equal = has_equal_means and before.trajectory == after.trajectory and before.outcomes == after.outcomes
        return "" if equal else "has other outcomes here, on the same machine and libraries"
    first, second = _numbers(before.trajectory), _numbers(after.trajectory)
    near = slack and len(first) == len(second) and np.allclose(first, second, rtol=slack, atol=0.0)
    if not near and before.trajectory != after.trajectory:
        return "keeps other numbers of tokens here"
    agreement = float((items_of(before).predicted == items_of(after).predicted).mean())
    if (before.cell.n_train == 0 or before.cell.track in ON_TRAINED) and agreement < AGREEING:
        return f"trains no network, but only {agreement:.2%} of its predictions are the same here"
    return ""


def _numbers(trajectory: Sequence[Step]) -> list[list[float]]:
    """Return the numbers of tokens and the MACs of the strategy of each block."""
    return [[step.tokens_in, step.tokens_out, step.own, step.rested] for step in trajectory]


def _gains(group: Sequence[Pair], old: np.ndarray, new: np.ndarray) -> Iterator[str]:
    """Yield the results in which the reported cells of a task are better than the replayed ones, beyond rounding.

    Baselines and oracles must not be worse than the replay either.

    Args:
        group: pairs of a reported and a replayed record.
        old, new: (n,) booleans: whether each test item of these cells is correct in the report and in the replay.
    """
    significant = float(mcnemar((old & ~new).sum(), (new & ~old).sum())) / 2 < FALSE_ALARM
    signs = {1, 1 if group[0][0].kind == "deployable" else -1}
    for sign in signs:
        gain = sign * float(old.mean() - new.mean())
        if gain > max(MOST_BETTER, len(old) ** -0.5) or (significant and gain > SLACK):
            higher = "higher" if sign > 0 else "lower"
            yield f"in {len(group)} cells the reported accuracy is {100 * gain:.1f} points {higher} than here"
    for name, better in MEANS.items():
        reported, again = _means(group, name)
        scale = max(abs(again), 1 / len(old)) if name in ("test_loss", "p_label") else 1.0
        if any(sign * better * (reported - again) > BETTER * scale for sign in signs):
            yield f"in {len(group)} cells the reported mean {name} is {reported:.4g}, and {again:.4g} here"


def _means(group: Sequence[Pair], name: str) -> tuple[float, float]:
    """Return the means of a metric over the reported and the replayed records of the pairs that have it, 0 if none."""
    values = []
    for before, after in group:
        pair = [record.metrics[name].value for record in (before, after) if name in record.metrics]
        if len(pair) == 2 and None not in pair:
            values.append(pair)
    if not values:
        return 0.0, 0.0
    reported, again = np.array(values, dtype=float).mean(axis=0)
    return reported, again
