"""From records to a leaderboard: a row a strategy and budget, ranked, and beside dense and random tokens."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from sparsebench.board import columns
from sparsebench.board.columns import EVERY, NOT_RANKED, Column, Row, interval_row, rank_text
from sparsebench.board.entries import (
    BADGE,
    DENSE,
    MAIN,
    PRETRAINING,
    TRACK,
    TRAINED,
    Entry,
    Key,
    Setting,
    add_titles,
    asked_of,
    frame_of,
    key_of,
    line_of,
    metrics_of,
    settings_of,
)
from sparsebench.board.over_budgets import BudgetBoard, over_budgets
from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.stats import gaps, paired
from sparsebench.stats.intervals import mean_interval, n50_ratio, sample_complexity
from sparsebench.stats.marks import marks
from sparsebench.strategy.budget import amount_of
from sparsebench.tasks.sources.labels import described
from sparsebench.testing.reports import CHECKS, SEVERAL, UNCHECKED

Flats = Iterable[Mapping[str, Any]]
"""Flat records, a mapping each, or a table of pandas."""
RANDOM = "random_inside"
"""The strategy that every other is marked against at its own budget, as it is against dense."""
NOTHING = {CHECKS: UNCHECKED, BADGE: "", columns.TRACK.key: TRACK, columns.CLASSES.key: ""}
"""What values say nothing, besides None: a column that is in no table always is left out where it has no others."""


class Cell(NamedTuple):
    """One cell of a strategy at a budget; `draw` numbers those on a network that is tested as it is, else it is 0."""

    n_train: int
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Missing:
    """What is missing in a setting.

    Attributes:
        dense: whether dense is, by which all others are measured: then nothing is ranked.
        wanted: the cells that most strategies have.
        budgets: falling shares of dense MACs that most strategies were run at, where some were run at several.
        lacks: by strategy, kind and budget, of those that lack something: the cells of most others that have no record,
            and the shares of dense MACs of most others at which it was not run.
        apart: these, and the other points of their curves: a strategy is ranked at all of its budgets or at none.
    """

    dense: bool
    wanted: frozenset[Cell]
    budgets: tuple[float, ...]
    lacks: Mapping[Key, tuple[frozenset[Cell], frozenset[float]]]
    apart: frozenset[Key]

    def unranked(self, setting: Setting, failed: Collection[tuple[str, str]]) -> set[Key]:
        """Return the entries that are not ranked: those that stand apart, and those of which cells failed.

        Args:
            setting: whose missing cells these are.
            failed: strategies and budgets of which cells failed.
        """
        if self.dense:
            return set(setting.entries)
        broken = {strategy for strategy, _ in failed} if self.budgets else set()
        return set(self.apart) | {key for key in setting.entries if key[0] in broken or (key[0], key[2]) in failed}


@dataclass(frozen=True)
class Ranking:
    """What the rows of one setting come to.

    Attributes:
        setting: the setting.
        rows: those that are ranked, and `pairs` how they compare pair by pair.
        every: all of them in order, oracles last.
        budgets: the strategies over their budgets, where they have several.
    """

    setting: Setting
    rows: list[Row]
    pairs: paired.Pairs
    every: list[Row]
    budgets: BudgetBoard | None

    @property
    def task(self) -> str:
        """The setting's."""
        return self.setting.task


@dataclass(frozen=True)
class Leaderboard:
    """A leaderboard's rows, ranked ones first and oracles last, and what their ranks come from.

    Attributes:
        rows: one a strategy and budget over all tasks, or also a task and model where it is `by_task`.
        columns: of the rows; in a board over all tasks with the task that each was taken from.
        rankings: of the main task of a board over all tasks, or of each.
        parts: in a board over all tasks, by part of its columns, the setting that they are of.
        settings: of the records, whether they are on the board or not.
    """

    rows: list[Row]
    columns: Sequence[Column] = EVERY
    rankings: list[Ranking] = field(default_factory=list)
    parts: Mapping[str, Setting] = field(default_factory=dict)
    by_task: bool = False
    settings: Sequence[Setting] = ()

    @property
    def budgets(self) -> BudgetBoard | None:
        """The first board over budgets."""
        return next((one.budgets for one in self.rankings if one.budgets is not None), None)


def judge(records: Flats, by: str | None = None) -> Leaderboard:
    """Return the leaderboard of records.

    Args:
        records: flat records, a mapping or a row each; only those that are ok count.
        by: None for one row a strategy and budget over all tasks, "task" for one row a task and model as well.

    Raises:
        UserError: `by` is another word.
    """
    if by not in (None, "task"):
        raise UserError("--by", got=f"'{by}'", allowed="task")
    frame = frame_of(records)
    failed = frame.loc[~frame["status"].isin(("ok", "unsupported")), ["strategy", "budget"]]
    lossy = set(zip(failed["strategy"], failed["budget"], strict=True))
    settings, kinds = settings_of(frame), metrics_of(frame)
    groups = [[one] for one in add_titles(settings)] if by else [_over_all(settings, frame.attrs.get(MAIN, ()))]
    parts: dict[str, Setting] = {}
    rankings = []
    for group in filter(None, groups):
        parts, one = _parts(group, kinds), group[0]
        about = {"task": one.task, "model": one.model, "n_train": one.largest} if by else {}
        rankings.append(_rank([row | about for row in _rows(parts, kinds)], one, lossy))
    rows, parts = [row for one in rankings for row in one.every], {} if by else parts
    shown = _columns(rows, kinds, parts)
    return Leaderboard(rows, [*columns.BY_TASK, *shown] if by else shown, rankings, parts, by is not None, settings)


def _over_all(settings: Sequence[Setting], mains: Sequence[str]) -> list[Setting]:
    """Return of each task its setting with the most records.

    First is the main task of a suite, else one without trials, with the most records. Never the latest: the same cells
    must give the same board.
    """
    ordered = sorted(settings, key=lambda one: (one.records, one.n_train, one.setting, one.track))
    tasks = {one.task: one for one in ordered}
    if len(tasks) > 1:
        tasks.pop(PRETRAINING, None)
    return sorted(tasks.values(), key=lambda one: (
        mains.index(one.task) if one.task in mains else len(mains), one.has_trials, -one.records, one.task
    ))  # fmt: skip


def _parts(settings: Sequence[Setting], kinds: Sequence[MetricKind]) -> dict[str, Setting]:
    """Return the setting that each part of the columns is of: the first that has it, and of accuracy the first."""
    found = {"accuracy": settings[0]}
    for one in reversed(settings):
        found |= {"sample complexity": one} if one.has_trials else {}
        found |= {"spurious gap": one} if one.has("spurious_gap") else {}
        found |= {kind.name: one for kind in kinds if one.has(kind.name)}
    return found


def _columns(rows: Sequence[Row], kinds: Sequence[MetricKind], parts: Mapping[str, Setting]) -> list[Column]:
    """Return the columns that boards always have, and those of which some row says something.

    In a board over all tasks they say the task that each was taken from, if any was.
    """
    every = [one for one in (*EVERY, *map(columns.column_of, kinds)) if one not in columns.BY_TASK]
    says = {one for one in every if any(row.get(one.key) not in (None, NOTHING.get(one.key)) for row in rows)}
    tasks = {one.part: parts[one.part].task for one in says if one.part in parts}
    shown = [one for one in every if one in says or one in columns.COLUMNS]
    return [one._replace(task=tasks.get(one.part, "")) for one in shown]


def _rows(parts: Mapping[str, Setting], kinds: Sequence[MetricKind]) -> list[Row]:
    """Return one row a strategy and budget: accuracy and cost from the main part, the other columns from theirs."""
    main = parts["accuracy"]
    entries = {part: one.largest_entries for part, one in parts.items()}
    entries |= {part: parts[part].entries for part in ("sample complexity", "spurious gap") if part in parts}
    dense = {part: next((one for key, one in of.items() if key[0] == DENSE), None) for part, of in entries.items()}
    spurious = _spurious_columns(parts["spurious gap"], dense["spurious gap"]) if "spurious gap" in parts else {}
    rows = []
    for key in sorted({key for of in entries.values() for key in of}):
        present = {part: of[key] for part, of in entries.items() if key in of}
        row: Row = dict.fromkeys(columns.keys_of(EVERY))
        row |= dict(zip(("strategy", "kind", "budget"), key, strict=True)) | {"rank": NOT_RANKED}
        if (entry := present.get("accuracy")) is not None:
            row |= _main_columns(entry)
        if (entry := present.get("sample complexity")) is not None:
            row |= _trial_columns(entry, dense["sample complexity"])
        row |= spurious.get(key, {})
        row["asked"] = None if math.isnan(asked := asked_of(next(iter(present.values())))) else asked
        row["n_seeds"] = min(map(_seeds, present.values()))
        for name, otherwise in ((TRAINED, ""), (CHECKS, SEVERAL), (BADGE, "")):
            words = {word for entry in present.values() for word in entry.words(name)}
            row[name] = words.pop() if len(words) == 1 else otherwise  # of several versions
        row[columns.TRACK.key], row[columns.CLASSES.key] = main.track, described(main.params[0])
        row |= {
            kind.name: present[kind.name].over_seeds(kind.name, kind.over_seeds) if kind.name in present else None
            for kind in kinds
        }
        rows.append(row)
    return rows


def _seeds(entry: Entry) -> int:
    """Return how many repetitions or networks there are; of trials only the complete ones count."""
    return len(set(entry.seeds.tolist())) if entry.trials is None else len(entry.trials.seeds)


def _main_columns(entry: Entry) -> Row:
    row: Row = {metric: entry.over_seeds(metric) for metric in ("accuracy", "macs", "macs_ratio", "selection_auroc")}
    if (speed := entry.over_seeds("images_per_s", "median")) is not None:
        row["images_per_s"], row["device"] = speed, ", ".join(sorted(entry.words("device")))
    return row


def _trial_columns(entry: Entry, dense: Entry | None) -> Row:
    if entry.trials is None:
        return {}
    row = interval_row("sample_complexity", sample_complexity(entry.trials))
    if (by_loss := entry.successes("success_loss")) is not None:
        row |= interval_row(columns.BY_LOSS.key, sample_complexity(by_loss))
    if dense is not None and dense.trials is not None and math.isfinite(dense.trials.n50):
        row |= interval_row("sample_complexity_ratio", n50_ratio(entry.trials, dense.trials))
    return row


def _spurious_columns(setting: Setting, dense: Entry | None) -> dict[Key, Row]:
    """Return the gaps' columns of entries; those of aligned and conflicting groups where the task has them."""
    values = {key: entry.by_seed("spurious_gap") for key, entry in setting.entries.items()}
    entries = {key: entry for key, entry in setting.entries.items() if values[key]}
    others = {} if dense is None else dense.by_seed("spurious_gap")
    rows: dict[Key, Row] = {}
    for key, entry in entries.items():
        worst = gaps.worst_group(entry.contender, entry.groups)
        rows[key] = {
            "accuracy_with_gap": entry.at(setting.largest).over_seeds("accuracy"),
            "spurious_gap": float(np.mean(list(values[key].values()))),
            "worst_group_accuracy": entry.over_seeds("worst_group_accuracy") if worst is None else worst,
        }
        if pairs := [others[seed] - values[key][seed] for seed in sorted(set(values[key]) & set(others))]:
            rows[key] |= interval_row("spurious_gap_reduction", mean_interval(pairs))
    if setting.on_backgrounds:
        contenders, groups = [one.contender for one in entries.values()], [one.groups for one in entries.values()]
        intervals = {"aligned_gap": gaps.aligned_gaps(contenders, groups, setting.lone)}
        if dense is not None:
            reductions = gaps.gap_reductions(contenders, dense.contender, groups, setting.lone)
            intervals["aligned_gap_reduction"] = reductions
        for name, of_entries in intervals.items():
            for row, interval in zip(rows.values(), of_entries, strict=True):
                row |= interval_row(name, interval)
    return rows


def _rank(rows: Sequence[Row], main: Setting, lossy: Collection[tuple[str, str]]) -> Ranking:
    """Add ranks, differences to dense, Pareto fronts and what curves over budgets say; return the rows in order.

    Oracles know the answer and are not ranked, nor is a strategy that lacks cells, or of which some failed: what is
    left of it is no fair sample. Nor has it a say in how much others vary.
    """
    missing = missing_of(main)
    unranked = missing.unranked(main, lossy)
    able = [row for row in rows if row["accuracy"] is not None]
    apart = [i for i, row in enumerate(able) if key_of(row) in missing.apart]
    every = paired.compare([main.largest_entries[key_of(row)].contender for row in able], apart)
    judged = {i for i, row in enumerate(able) if key_of(row) not in unranked}
    places = [i for i in sorted(judged) if able[i]["kind"] != "oracle"]
    for row, ends in zip(able, every.accuracy.tolist(), strict=True):
        row["accuracy_low"], row["accuracy_high"] = (None if math.isnan(x) else min(1.0, max(0.0, x)) for x in ends)
    _compare(able, every, judged, DENSE, "accuracy_delta", _places_of_dense(able))
    _compare(able, every, judged, RANDOM, f"{RANDOM}_delta", _places_of_random(able))
    ranked, pairs = [able[i] for i in places], every.among(places)
    for row, (first, last) in zip(ranked, pairs.rank_sets(), strict=True):
        row["rank"] = rank_text(first, last)
    _mark_fronts(ranked, pairs.better(), [main.largest_entries[key_of(row)].machines for row in ranked])
    rows = sorted(rows, key=_order)
    return Ranking(main, ranked, pairs, rows, over_budgets(main, rows, missing.budgets, missing.apart, unranked))


def _places_of_dense(rows: Sequence[Row]) -> dict[int, int]:
    """Return by the place of each row that of dense."""
    place = next((i for i, row in enumerate(rows) if row["strategy"] == DENSE), None)
    return {} if place is None else dict.fromkeys(range(len(rows)), place)


def _places_of_random(rows: Sequence[Row]) -> dict[int, int]:
    """Return by the place of a row that of random tokens inside the network at its budget, if there are.

    In the same blocks, if there are, or else in others: the budget is how much is left.
    """
    places: dict[str, int] = {}
    for i, row in reversed(list(enumerate(rows))):
        if row["strategy"] == RANDOM:
            places |= {row["budget"]: i, amount_of(row["budget"]): i}
    wanted = [places.get(row["budget"], places.get(amount_of(row["budget"]))) for row in rows]
    return {i: j for i, j in enumerate(wanted) if j is not None}


def _compare(
    rows: Sequence[Row], pairs: paired.Pairs, judged: Collection[int], name: str, delta: str, others: Mapping[int, int]
) -> None:
    """Add the differences of rows to others, by their places, with intervals and marks; all judged together."""
    for i, j in others.items():
        mean, half = float(pairs.mean[i, j]), float(pairs.half[i, j])
        ends = {"": mean, "_low": mean - half, "_high": mean + half}
        rows[i] |= {f"{delta}{end}": None if math.isnan(x) else x + 0.0 for end, x in ends.items()}  # no minus zero
    marked = {i: j for i, j in others.items() if i != j and i in judged and j in judged}
    for i, word in marks(pairs, marked).items():
        rows[i][f"versus_{name}"] = word


def _order(row: Row) -> tuple[Any, ...]:
    return row["kind"] == "oracle", row["rank"] == NOT_RANKED, -(row["accuracy"] or 0), *key_of(row)


def _mark_fronts(ranked: Sequence[Row], better: np.ndarray, machines: Sequence[object]) -> None:
    """Mark the rows than which none that costs no more is significantly better: MACs, and seconds on one machine."""
    for column, cost, sign in (("pareto", "macs_ratio", 1), ("pareto_speed", "images_per_s", -1)):
        costs = np.array([math.nan if row[cost] is None else sign * row[cost] for row in ranked], dtype=float)
        same = np.array([[sign > 0 or one == other for other in machines] for one in machines], dtype=bool)
        with np.errstate(invalid="ignore"):
            beaten = (better & (costs[:, None] <= costs) & same.reshape(better.shape)).any(axis=0)
        for row, cost_of, worse in zip(ranked, costs.tolist(), beaten.tolist(), strict=True):
            if not math.isnan(cost_of):
                row[column] = "no" if worse else "yes"


def missing_of(setting: Setting) -> Missing:
    """Return what strategies lack that at least half of those of a setting have: a seed, a network, a draw, a budget.

    A cell that failed is not missing, nor is one that is unsupported.
    """
    dense = setting.task != PRETRAINING and not any(key[0] == DENSE for key in setting.entries)
    every = {key: _cells(setting, key) for key in setting.entries}
    # What draws nothing is tested once on a network, unless each repetition tests it on other pictures.
    parts = any(len(tests) > 1 for entry in setting.entries.values() if entry.draws for tests in entry.tests.values())
    drawing = {key for key, cells in every.items() if parts or any(cell[2] for cell in cells)}
    counts = Counter(cell for cells in every.values() for cell in cells)
    wanted = frozenset(Cell(*cell) for cell, n in counts.items() if 2 * n >= len(drawing if cell[2] else every))
    budgets, run = _budgets(setting)
    lacks = {}
    for key, entry in setting.entries.items():
        cells = frozenset(cell for cell in wanted - every[key] if key in drawing or not cell.draw)
        has = run.get(line_of(key, entry), set(budgets))
        if cells or set(budgets) - has:
            lacks[key] = cells, frozenset(budgets) - has
    lines = {line_of(key, setting.entries[key]) for key in lacks if budgets} - {None}
    apart = frozenset(key for key, entry in setting.entries.items() if key in lacks or line_of(key, entry) in lines)
    return Missing(dense, wanted, budgets, lacks, apart)


def _cells(setting: Setting, key: Key) -> set[tuple[int, int, int]]:
    """Return the cells of an entry that have a record, whatever came of it, as plain tuples: there may be a million."""
    cells = set[tuple[int, int, int]]()
    for entry in (setting.entries[key], setting.others.get(key)):
        if entry is not None:
            draws = entry.repetitions.tolist() if setting.networks else repeat(0, entry.size)
            cells.update(zip(entry.sizes.tolist(), entry.seeds.tolist(), draws, strict=True))
    return cells


def _budgets(setting: Setting) -> tuple[tuple[float, ...], dict[object, set[float]]]:
    """Return the falling budgets of most curves, nothing where none has several; and those that each was run at."""
    run: dict[object, set[float]] = defaultdict(set)
    for key, entry in setting.largest_entries.items():
        if (line := line_of(key, entry)) is not None:
            run[line].add(asked_of(entry))
    if not any(len(asked) > 1 for asked in run.values()):
        return (), {}
    for key, entry in setting.others.items():
        if (line := line_of(key, entry)) in run:
            run[line].add(asked_of(entry))
    counts = Counter(budget for asked in run.values() for budget in asked)
    return tuple(sorted((budget for budget, n in counts.items() if 2 * n >= len(run)), reverse=True)), run
