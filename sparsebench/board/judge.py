"""From records to a leaderboard: a row a strategy and budget, ranked, and beside dense and random tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsebench.board import columns, gaps
from sparsebench.board.columns import EVERY, NOT_RANKED, Column, Row, interval_row, rank_text
from sparsebench.board.entries import (
    BADGE,
    DENSE,
    MAIN,
    PRETRAINING,
    TRACK,
    TRAINED,
    Entry,
    Setting,
    about,
    add_titles,
    asked_of,
    frame_of,
    key_of,
    metrics_of,
    settings_of,
)
from sparsebench.board.missing import missing_of
from sparsebench.board.over_budgets import BudgetBoard, over_budgets
from sparsebench.board.references import compare_with_dense, compare_with_random
from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.records.checks import CHECKS, SEVERAL, UNCHECKED
from sparsebench.sources.labels import described
from sparsebench.stats import paired
from sparsebench.stats.intervals import mean_interval, n50_ratio, sample_complexity

Flats = Iterable[Mapping[str, Any]]
"""Flat records, a mapping each, or a table of pandas."""
NOTHING = {CHECKS: UNCHECKED, BADGE: "", columns.TRACK.key: TRACK, columns.CLASSES.key: ""}
"""What values say nothing, besides None: a column that is in no table always is left out where it has no others."""


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
        about: in a board over all tasks, by part of its columns, what data, networks and track are.
        settings: of the records, whether they are on the board or not.
    """

    rows: list[Row]
    columns: Sequence[Column] = EVERY
    rankings: list[Ranking] = field(default_factory=list)
    about: Mapping[str, str] = field(default_factory=dict)
    by_task: bool = False
    settings: Sequence[Setting] = ()

    @property
    def budgets(self) -> BudgetBoard | None:
        """The first board over budgets."""
        return next((one.budgets for one in self.rankings if one.budgets is not None), None)


@dataclass(frozen=True)
class _Parts:
    """Where the columns of a board are from: accuracy and cost, trials, gaps, and the metrics that tasks declare."""

    main: Setting | None
    trials: Setting | None
    spurious: Setting | None
    declared: Mapping[MetricKind, Setting | None]

    @property
    def named(self) -> dict[str, Setting]:
        """By the parts of columns the settings that they are of."""
        parts = {"accuracy": self.main, "trials": self.trials, "gaps": self.spurious}
        return {part: setting for part, setting in parts.items() if setting is not None}


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
    whole = _over_all(settings, kinds, frame.attrs.get(MAIN, ())) if by is None else None
    each = [_Parts(one, one, one, _settings_with(kinds, [one])) for one in add_titles(settings)] if by else []
    rows: list[Row] = []
    rankings: list[Ranking] = []
    for parts in [whole] if whole else each:
        one, of_parts = parts.main, _rows(parts)
        if by and one is not None:
            of_parts = [{"task": one.task, "model": one.model, "n_train": one.largest} | row for row in of_parts]
        if one is not None:
            rankings.append(_rank(of_parts, one, lossy))
        rows += of_parts if one is None else rankings[-1].every
    texts = {part: about(one) for part, one in whole.named.items()} if whole else {}
    return Leaderboard(rows, _columns(rows, kinds, whole), rankings, texts, by is not None, settings)


def _over_all(settings: Sequence[Setting], kinds: Sequence[MetricKind], mains: Sequence[str]) -> _Parts:
    """Return the parts of the board over all tasks: of each task its setting with the most records.

    First is the main task of a suite, else one without trials, with the most records; the gaps are of it, or of another
    one with groups. Never the latest: the same cells must give the same board.
    """
    ordered = sorted(settings, key=lambda one: (one.records, one.n_train, one.setting, one.track))
    tasks = {one.task: one for one in ordered}
    if len(tasks) > 1:
        tasks.pop(PRETRAINING, None)
    places = sorted(tasks.values(), key=lambda one: (
        mains.index(one.task) if one.task in mains else len(mains), one.has_trials, -one.records, one.task
    ))  # fmt: skip
    main = next(iter(places), None)
    trials = next((one for one in places if one.has_trials), None)
    spurious = next((one for one in places if one.has("spurious_gap")), None)
    return _Parts(main, trials, spurious, _settings_with(kinds, places))


def _settings_with(kinds: Sequence[MetricKind], settings: Sequence[Setting]) -> dict[MetricKind, Setting | None]:
    """Return for each metric that tasks declare the first setting that has it."""
    return {kind: next((one for one in settings if one.has(kind.name)), None) for kind in kinds}


def _columns(rows: Sequence[Row], kinds: Sequence[MetricKind], whole: _Parts | None) -> list[Column]:
    """Return the columns that boards always have, and those of which some row says something.

    In a board over all tasks they say the task that each was taken from, if any was; else rows have columns for that.
    """
    filled = {column.part for column in EVERY if any(row.get(column.key) not in (None, "") for row in rows)}
    tasks = {part: one.task for part, one in whole.named.items() if part in filled} if whole else {}
    every = [column._replace(task=tasks.get(column.part, "")) for column in EVERY if column not in columns.BY_TASK]
    for kind in kinds:
        one = whole.declared[kind] if whole else None
        every.append(columns.column_of(kind)._replace(task=one.task if one else ""))
    says = [any(row.get(one.key) not in (None, NOTHING.get(one.key)) for row in rows) for one in every]
    shown = [one for one, said in zip(every, says, strict=True) if said or one.key in columns.BY_KEY]
    return shown if whole else [*columns.BY_TASK, *shown]


def _rows(parts: _Parts) -> list[Row]:
    """Return one row a strategy and budget: accuracy and cost from the main part, the other columns from theirs."""
    main, trials, spurious = parts.main, parts.trials, parts.spurious
    by_part = [{} if main is None else main.largest_entries]
    by_part += [{} if one is None else one.entries for one in (trials, spurious)]
    by_part += [{} if one is None else one.largest_entries for one in parts.declared.values()]
    dense = [next((entry for key, entry in part.items() if key[0] == DENSE), None) for part in by_part]
    rows = []
    for key in sorted({key for part in by_part for key in part}):
        entries = [part.get(key) for part in by_part]
        present = [entry for entry in entries if entry is not None]
        row: Row = dict.fromkeys(columns.keys_of([*columns.ALWAYS, *columns.OVER_BUDGETS]))
        row |= dict(zip(("strategy", "kind", "budget"), key, strict=True)) | {"rank": NOT_RANKED}
        row |= _main_columns(entries[0]) | _trial_columns(entries[1], dense[1])
        row |= _spurious_columns(entries[2], dense[2], spurious)
        row["asked"] = None if math.isnan(asked := asked_of(present[0])) else asked
        row["n_seeds"] = min(_seeds(entry) for entry in present)
        for name, otherwise in ((TRAINED, ""), (CHECKS, SEVERAL), (BADGE, "")):
            words = {word for entry in present for word in entry.words(name)}
            row[name] = words.pop() if len(words) == 1 else otherwise  # of several versions
        row[columns.TRACK.key] = TRACK if main is None else main.track
        row[columns.CLASSES.key] = "" if main is None else described(main.params[0])
        for kind, entry in zip(parts.declared, entries[3:], strict=True):
            row[kind.name] = None if entry is None else entry.over_seeds(kind)
        rows.append(row)
    return rows


def _seeds(entry: Entry) -> int:
    """Return how many repetitions or networks there are; of trials only the complete ones count."""
    return len(set(entry.seeds.tolist())) if entry.trials is None else len(entry.trials.seeds)


def _main_columns(entry: Entry | None) -> Row:
    if entry is None:
        return {}
    row: Row = {metric: entry.mean(metric) for metric in ("accuracy", "macs", "macs_ratio", "selection_auroc")}
    if speeds := list(entry.by_seed("images_per_s").values()):
        row["images_per_s"], row["device"] = float(np.median(speeds)), ", ".join(entry.devices)
    return row


def _trial_columns(entry: Entry | None, dense: Entry | None) -> Row:
    if entry is None or entry.trials is None:
        return {}
    row = interval_row("sample_complexity", sample_complexity(entry.trials))
    if (by_loss := entry.successes("success_loss")) is not None:
        row |= interval_row(columns.BY_LOSS.key, sample_complexity(by_loss))
    if dense is not None and dense.trials is not None and math.isfinite(dense.trials.n50):
        row |= interval_row("sample_complexity_ratio", n50_ratio(entry.trials, dense.trials))
    return row


def _spurious_columns(entry: Entry | None, dense: Entry | None, setting: Setting | None) -> Row:
    """Return the gaps' columns; that of aligned and conflicting groups where the task has them."""
    if entry is None or setting is None or not (values := entry.by_seed("spurious_gap")):
        return {}
    worst = gaps.worst_group(entry.contender, entry.groups)
    row: Row = {
        "accuracy_with_gap": entry.at(setting.largest).mean("accuracy"),
        "spurious_gap": float(np.mean(list(values.values()))),
        "worst_group_accuracy": entry.mean("worst_group_accuracy") if worst is None else worst,
    }
    others = {} if dense is None else dense.by_seed("spurious_gap")
    if pairs := [others[seed] - values[seed] for seed in sorted(set(values) & set(others))]:
        row |= interval_row("spurious_gap_reduction", mean_interval(pairs))
    if setting.on_backgrounds:
        row |= interval_row("aligned_gap", gaps.aligned_gap(entry.contender, entry.groups, setting.lone))
        if dense is not None:
            reduction = gaps.gap_reduction(entry.contender, dense.contender, entry.groups, setting.lone)
            row |= interval_row("aligned_gap_reduction", reduction)
    return row


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
    compare_with_dense(able, every, judged)
    compare_with_random(able, every, judged)
    ranked, pairs = [able[i] for i in places], every.among(places)
    for row, (first, last) in zip(ranked, pairs.rank_sets(), strict=True):
        row["rank"] = rank_text(first, last)
    _mark_fronts(ranked, pairs.better(), [main.largest_entries[key_of(row)].machines for row in ranked])
    rows = sorted(rows, key=_order)
    return Ranking(main, ranked, pairs, rows, over_budgets(main, rows, missing, unranked))


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
