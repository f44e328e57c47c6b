"""From flat records to leaderboard rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board import columns, gaps, over_budgets, references, summary
from sparsebench.board.board import BudgetBoard, Row, Table
from sparsebench.board.columns import EVERY, NOT_RANKED, Column
from sparsebench.board.entries import (
    BADGE,
    DENSE,
    PRETRAINING,
    TRACK,
    TRAINED,
    Entry,
    Key,
    Setting,
    add_titles,
    frame_of,
    metrics_of_tasks,
    settings_of,
)
from sparsebench.board.missing import Missing, missing_of
from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.records.checks import CHECKS, SEVERAL, UNCHECKED
from sparsebench.sources.labels import described
from sparsebench.stats import paired
from sparsebench.stats.intervals import Interval, mean_interval, n50_ratio, sample_complexity

Flats = Iterable[Mapping[str, Any]]
"""Flat records, a mapping each, or a table of pandas."""
ALWAYS = [column for column in EVERY if column in (*columns.COLUMNS, columns.BY_LOSS)]
"""The columns that a row begins with."""


@dataclass(frozen=True)
class Ranking:
    """The ranked rows of one task, and how they compare pair by pair; the rest as in `Setting`.

    Attributes:
        of: what is compared one by one, seeds or networks.
    """

    task: str
    rows: list[Row]
    pairs: paired.Pairs
    model: str = ""
    n_train: int = 0
    track: str = TRACK
    of: str = "seeds"


@dataclass(frozen=True)
class Leaderboard:
    """A leaderboard's rows, ranked ones first and oracles last, and what their ranks come from.

    Attributes:
        rows: see `columns_of` for their columns.
        rankings: of the main task of a board over all tasks, or of each.
        budgets: of those of them whose strategies have several budgets, with a row a strategy.
        columns: those that rows may have, in a board over all tasks with the task that each was taken from.
    """

    rows: list[Row]
    rankings: list[Ranking]
    budgets: list[BudgetBoard] = field(default_factory=list)
    columns: Sequence[Column] = EVERY

    @property
    def single(self) -> list[Ranking]:
        """The rankings of tasks of which there is no board over budgets."""
        several = {(one.task, one.model, one.n_train, one.track) for one in self.budgets}
        return [one for one in self.rankings if (one.task, one.model, one.n_train, one.track) not in several]


def build(records: Flats, by: str | None = None) -> list[Row]:
    """Return the leaderboard's rows; see `judge`."""
    return judge(records, by).rows


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
    settings, lossy = settings_of(frame), _lossy(frame)
    kinds = metrics_of_tasks(frame)
    parts = [_over_all(settings, lossy, kinds)] if by is None else _by_task(settings, lossy, kinds)
    rows = [row for part in parts for row in part.rows]
    every = parts[0].columns if by is None else [*EVERY, *map(columns.column_of, kinds)]
    nothings: dict[Column, Any] = dict.fromkeys((*columns.OVER_BUDGETS, columns.BY_LOSS, *every[len(EVERY) :]))
    nothings |= {columns.CHECKS: UNCHECKED, columns.BADGE: "", columns.TRACK: TRACK, columns.CLASSES: ""}
    for column, nothing in nothings.items():
        if all(row[column.key] == nothing for row in rows):
            for row, key in product(rows, column.keys):
                del row[key]
    rankings = [each for part in parts for each in part.rankings]
    return Leaderboard(rows, rankings, [each for part in parts for each in part.budgets], every)


def _lossy(frame: pd.DataFrame) -> set[tuple[str, str]]:
    """Return the strategies and budgets of which cells failed."""
    failed = frame[~frame["status"].isin(("ok", "unsupported"))]
    return set(zip(failed["strategy"], failed["budget"], strict=True))


def columns_of(rows: Sequence[Row], every: Sequence[Column] = EVERY) -> list[Column]:
    """Return those of every column that rows have: the board's, and others where they have them."""
    first = rows[0] if rows else {}
    return [one for one in every if one.key in columns.BY_KEY or one.key in first]


def _over_all(
    settings: Sequence[Setting], lossy: Collection[tuple[str, str]], kinds: Sequence[MetricKind]
) -> Leaderboard:
    """Return the board over all tasks: of each task its setting with the most records, then the largest size.

    Never the latest: the same cells must give the same board.
    """
    tasks = {
        one.task: one for one in sorted(settings, key=lambda one: (one.records, one.n_train, one.setting, one.track))
    }
    if len(tasks) > 1:
        tasks.pop(PRETRAINING, None)

    def first(*names: str, among: Mapping[str, Setting]) -> Setting | None:
        return next((among[name] for name in (*names, *among) if name in among), None)

    main = first("composite", "spurious", among=tasks)
    trials = first("theory", among={name: one for name, one in tasks.items() if one.has_trials})
    parts = (main, trials, tasks.get("spurious", main))
    setting_of = _setting_of(kinds, [one for one in (*parts, *tasks.values()) if one is not None])
    judged = _rank_and_mark(parts, setting_of, lossy)
    return replace(judged, columns=_with_tasks(judged.rows, parts, setting_of))


SettingOf = Mapping[MetricKind, Setting | None]
"""The metrics that tasks declare, each with the setting that it is taken from; None where it was not measured."""


def _setting_of(kinds: Sequence[MetricKind], settings: Sequence[Setting]) -> SettingOf:
    """Return for each metric that tasks declare the first setting that has it."""
    return {kind: next((one for one in settings if one.has(kind.name)), None) for kind in kinds}


def _with_tasks(rows: Sequence[Row], parts: Parts, setting_of: SettingOf) -> list[Column]:
    """Return all columns with the task that each was taken from; of parts without a value there is none."""
    filled = {column.part for column in EVERY if any(row.get(column.key) not in (None, "") for row in rows)}
    named = zip(("accuracy", "trials", "gaps"), parts, strict=True)
    tasks = {part: one.task for part, one in named if one is not None and part in filled}
    every = [column._replace(task=tasks.get(column.part, "")) for column in EVERY]
    extra = [(columns.column_of(kind), setting) for kind, setting in setting_of.items()]
    return every + [column._replace(task="" if setting is None else setting.task) for column, setting in extra]


def _by_task(
    settings: Sequence[Setting], lossy: Collection[tuple[str, str]], kinds: Sequence[MetricKind]
) -> list[Leaderboard]:
    return [
        _rank_and_mark(
            (one, one, one), _setting_of(kinds, [one]), lossy,
            {"task": one.task, "model": one.model, "n_train": one.largest},
        )
        for one in add_titles(settings)
    ]  # fmt: skip


Parts = tuple[Setting | None, Setting | None, Setting | None]
"""What accuracy and cost, trials, and gaps are taken from."""


def _rank_and_mark(
    parts: Parts, setting_of: SettingOf, lossy: Collection[tuple[str, str]], about: Row | None = None
) -> Leaderboard:
    """Return the rows of a board, ranked, and the same over budgets where there are several."""
    main, _, spurious = parts
    rows = [(about or {}) | row for row in _rows(*parts, setting_of)]
    if main is None:
        return Leaderboard(rows, [])
    missing = missing_of(main)
    unranked = missing.unranked(main, lossy)
    judged = _rank(rows, main, missing, unranked)
    extra = [columns.column_of(kind) for kind, setting in setting_of.items() if setting is main]
    whole = over_budgets.board(main, judged.rows, missing, unranked, extra)
    if whole is None:
        return judged
    (ranking,) = judged.rankings
    best = summary.best(main, ranking.rows, ranking.pairs, judged.rows, whole.budgets)
    whole = replace(whole, tables=_tables(judged.rows, spurious), about=summary.about(main), best=best)
    return replace(judged, budgets=[whole])


def _tables(rows: Sequence[Row], spurious: Setting | None) -> list[Table]:
    """Return what was measured in other tasks than the main one: gaps with the accuracy there, and trials."""
    tested = {} if spurious is None else spurious.largest_entries
    rows = sorted(rows, key=lambda row: (row["kind"] == "oracle", row["strategy"] != DENSE, *_key(row)))
    rows_with_gap = [row for row in rows if row["spurious_gap"] is not None and _key(row) in tested]
    gaps_of = [row | {"accuracy": _mean(tested[_key(row)], "accuracy")} for row in rows_with_gap]
    trials = [row for row in rows if row["sample_complexity"] is not None]
    return [
        Table(title, kind, part)
        for title, kind, part in (
            ("Spurious correlations", columns.GAPS, gaps_of),
            ("Sample complexity", columns.TRIALS, trials),
        )
        if part
    ]


def _mean(entry: Entry, metric: str) -> float | None:
    values = list(entry.by_seed(metric).values())
    return float(np.mean(values)) if values else None


def _rows(main: Setting | None, trials: Setting | None, spurious: Setting | None, setting_of: SettingOf) -> list[Row]:
    """Return one row a strategy and budget: accuracy and cost from `main`, the other columns from their tasks."""
    grouped = [{} if part is None else part.entries for part in (main, trials, spurious)]
    grouped += [{} if setting is None else setting.largest_entries for setting in setting_of.values()]
    if main is not None:
        grouped[0] = main.largest_entries
    aligned = spurious is not None and spurious.task in gaps.TASKS
    dense = [next((entry for key, entry in part.items() if key[0] == DENSE), None) for part in grouped]
    rows, none = [], dict.fromkeys(columns.keys_of(columns.OVER_BUDGETS))
    lone = spurious is not None and spurious.lone
    for key in sorted({key for part in grouped for key in part}):
        row: Row = dict.fromkeys(columns.keys_of(ALWAYS))
        row |= dict(zip(("strategy", "kind", "budget"), key, strict=True))
        row_entries = [part.get(key) for part in grouped]
        row |= _main_columns(row_entries[0])
        row |= _trial_columns(row_entries[1], dense[1]) | _spurious_columns(row_entries[2], dense[2], aligned, lone)
        present = [entry for entry in row_entries if entry is not None]
        row["n_seeds"] = min(_seeds(entry) for entry in present)
        for name, otherwise in ((TRAINED, ""), (CHECKS, SEVERAL), (BADGE, "")):
            row[name] = _common({word for entry in present for word in entry.words(name)}, otherwise)
        row |= none | {columns.TRACK.key: TRACK if main is None else main.track}
        row |= {columns.CLASSES.key: "" if main is None else described(main.params[0])}
        extra = zip(setting_of, row_entries[3:], strict=True)
        rows.append(row | {kind.name: None if entry is None else entry.over_seeds(kind) for kind, entry in extra})
    return rows


def _common(words: set[str], otherwise: str) -> str:
    """Return the word that all records of a row have, or another where they were made by different versions."""
    return words.pop() if len(words) == 1 else otherwise


def _seeds(entry: Entry) -> int:
    """Return how many repetitions or networks there are; of trials only the complete ones count."""
    return len(set(entry.seeds.tolist())) if entry.trials is None else len(entry.trials.seeds)


def _main_columns(entry: Entry | None) -> Row:
    if entry is None:
        return {}
    row: Row = {}
    for metric in ("accuracy", "macs_ratio", "selection_auroc"):
        if (value := _mean(entry, metric)) is not None:
            row[metric] = value
    if speeds := list(entry.by_seed("images_per_s").values()):
        row["images_per_s"], row["device"] = float(np.median(speeds)), ", ".join(entry.devices)
    return row


def _trial_columns(entry: Entry | None, dense: Entry | None) -> Row:
    if entry is None or entry.trials is None:
        return {}
    named = {"sample_complexity": sample_complexity(entry.trials)}
    if (by_loss := entry.successes("success_loss")) is not None:
        named[columns.BY_LOSS.key] = sample_complexity(by_loss)
    if dense is not None and dense.trials is not None and math.isfinite(dense.trials.n50):
        named["sample_complexity_ratio"] = n50_ratio(entry.trials, dense.trials)
    ends = {key: x for name, numbers in named.items() for key, x in _as_columns(name, numbers).items()}
    return {key: None if x is None or math.isnan(x) else x for key, x in ends.items()}


def _as_columns(name: str, interval: Interval | None) -> Row:
    """Return an interval as three columns."""
    return {} if interval is None else dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def _spurious_columns(entry: Entry | None, dense: Entry | None, aligned: bool, lone: bool) -> Row:
    """Return the gaps' columns; that of aligned and conflicting groups where the task has them."""
    if entry is None or not (values := entry.by_seed("spurious_gap")):
        return {}
    worst = gaps.worst_group(entry.contender, entry.groups)
    if worst is None:
        worst = float(np.mean(list(entry.by_seed("worst_group_accuracy").values())))
    row: Row = {"spurious_gap": float(np.mean(list(values.values()))), "worst_group_accuracy": worst}
    others = {} if dense is None else dense.by_seed("spurious_gap")
    if pairs := [others[seed] - values[seed] for seed in sorted(set(values) & set(others))]:
        row |= _as_columns("spurious_gap_reduction", _without_minus_zero(mean_interval(pairs)))
    if aligned:
        row |= _as_columns("aligned_gap", gaps.aligned_gap(entry.contender, entry.groups, lone))
    if aligned and dense is not None:
        row |= _as_columns(
            "aligned_gap_reduction",
            _without_minus_zero(gaps.gap_reduction(entry.contender, dense.contender, entry.groups, lone)),
        )
    return row


def _without_minus_zero(interval: Interval | None) -> Interval | None:
    """Return an interval without minus zero."""
    return None if interval is None else (interval[0] + 0.0, *interval[1:])


def _rank(rows: list[Row], main: Setting, missing: Missing, unranked: Collection[Key]) -> Leaderboard:
    """Add ranks, differences to dense and the Pareto fronts, and return the rows in order.

    Oracles know the answer and are not ranked, nor is a strategy that lacks cells, or of which some failed: what is
    left of it is no fair sample. Nor has it a say in how much others vary.
    """
    able = [row for row in rows if row["accuracy"] is not None]
    apart = [i for i, row in enumerate(able) if _key(row) in missing.apart]
    every = paired.compare([main.largest_entries[_key(row)].contender for row in able], apart)
    judged = {i for i, row in enumerate(able) if _key(row) not in unranked}
    places = [i for i in sorted(judged) if able[i]["kind"] != "oracle"]
    references.add_accuracies(able, every)
    references.add_marks(able, every, "versus_dense", references.dense(able), judged)
    references.add_marks(able, every, "versus_random_inside", references.random(able), judged)
    ranked, pairs = [able[i] for i in places], every.among(places)
    for row in rows:
        row["rank"] = NOT_RANKED
    for row, (first, last) in zip(ranked, pairs.rank_sets(), strict=True):
        row["rank"] = str(first) if first == last else f"{first}-{last}"
    _mark_fronts(ranked, pairs.better(), [main.largest_entries[_key(row)].machines for row in ranked])

    def order(row: Row) -> tuple[Any, ...]:
        return row["kind"] == "oracle", row["rank"] == NOT_RANKED, -(row["accuracy"] or 0), *_key(row)

    ranking = Ranking(main.task, ranked, pairs, main.model, main.largest, main.track, main.of)
    return Leaderboard(sorted(rows, key=order), [ranking])


def _key(row: Row) -> Key:
    return row["strategy"], row["kind"], row["budget"]


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
