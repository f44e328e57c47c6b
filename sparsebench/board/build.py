"""From flat records to leaderboard rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board import columns, paired
from sparsebench.board.badges import CHECKS, SEVERAL, UNCHECKED
from sparsebench.board.board import Row
from sparsebench.board.columns import NOT_RANKED, NOT_REACHED
from sparsebench.board.entries import (
    DENSE,
    PRETRAINING,
    TRAINED,
    VERIFIED,
    Entry,
    Key,
    Setting,
    frame_of,
    settings_of,
    titled,
)
from sparsebench.board.statistics import mean_interval, n50_ratio, sample_complexity
from sparsebench.errors import UserError

Flats = Iterable[Mapping[str, Any]]
"""Flat records, a mapping each, or a table of pandas."""
MAIN, TRIALS, SPURIOUS = ("composite", "spurious"), ("theory",), ("spurious",)
"""The tasks that a board over all tasks takes its columns from: accuracy and cost, sample complexity, gaps."""
ALWAYS = [column for column in columns.EVERY if column in (*columns.COLUMNS, columns.BY_LOSS)]
"""The columns that a row begins with."""


@dataclass(frozen=True)
class Contest:
    """The ranked rows of one task, and how they compare pair by pair."""

    task: str
    rows: list[Row]
    pairs: paired.Pairs


@dataclass(frozen=True)
class Judged:
    """A leaderboard's rows, ranked ones first and oracles last, and what their ranks come from.

    Attributes:
        rows: see `columns_of` for their columns.
        contests: of the main task of a board over all tasks, or of each.
    """

    rows: list[Row]
    contests: list[Contest]


def build(records: Flats, by: str | None = None) -> list[Row]:
    """Return the leaderboard's rows; see `judge`."""
    return judge(records, by).rows


def judge(records: Flats, by: str | None = None) -> Judged:
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
    parts = [_over_all(settings, lossy)] if by is None else _by_task(settings, lossy)
    rows = [row for part in parts for row in part.rows]
    for column, nothing in ((columns.CHECKS, UNCHECKED), (columns.VERIFIED, ""), (columns.BY_LOSS, None)):
        if all(row[column.key] == nothing for row in rows):
            for row, key in product(rows, column.keys):
                del row[key]
    return Judged(rows, [contest for part in parts for contest in part.contests])


def _lossy(frame: pd.DataFrame) -> set[tuple[str, str]]:
    """Return the strategies and budgets of which cells failed."""
    failed = frame[~frame["status"].isin(("ok", "unsupported"))]
    return set(zip(failed["strategy"], failed["budget"], strict=True))


def columns_of(rows: Sequence[Row]) -> list[columns.Column]:
    """Return the columns of rows: the board's, and others where they have them."""
    there = rows[0] if rows else {}
    return [one for one in columns.EVERY if one in columns.COLUMNS or one.key in there]


def _over_all(settings: Sequence[Setting], lossy: Collection[tuple[str, str]]) -> Judged:
    """Return the board over all tasks: of each task its setting with the most records, then the largest size.

    Never the latest: the same cells must give the same board.
    """
    tasks = {one.task: one for one in sorted(settings, key=lambda one: (one.records, one.n_train, one.setting))}
    if len(tasks) > 1:
        tasks.pop(PRETRAINING, None)

    def first(names: Sequence[str], *, trials: bool = False) -> Setting | None:
        some = (tasks[name] for name in (*names, *tasks) if name in tasks)
        return next((one for one in some if not trials or one.has_trials), None)

    main = first(MAIN)
    return _ranked(_rows(main, first(TRIALS, trials=True), tasks.get("spurious", main)), main, lossy)


def _by_task(settings: Sequence[Setting], lossy: Collection[tuple[str, str]]) -> list[Judged]:
    found = []
    for one in titled(settings):
        own = {"task": one.task, "model": one.model, "n_train": one.largest}
        found.append(_ranked([own | row for row in _rows(one, one, one)], one, lossy))
    return found


def _rows(main: Setting | None, trials: Setting | None, spurious: Setting | None) -> list[Row]:
    """Return one row a strategy and budget: accuracy and cost from `main`, the other columns from their tasks."""
    grouped = [{} if part is None else part.entries for part in (main, trials, spurious)]
    if main is not None:
        grouped[0] = {key: found for key, entry in main.entries.items() if (found := entry.at(main.largest)).size}
    dense = [next((entry for key, entry in part.items() if key[0] == DENSE), None) for part in grouped]
    rows = []
    for key in sorted({key for part in grouped for key in part}):
        row: Row = dict.fromkeys(columns.keys_of(ALWAYS))
        row |= dict(zip(("strategy", "kind", "budget"), key, strict=True))
        mine = [part.get(key) for part in grouped]
        row |= _main_columns(mine[0])
        row |= _trial_columns(mine[1], dense[1]) | _spurious_columns(mine[2], dense[2])
        there = [entry for entry in mine if entry is not None]
        row["n_seeds"] = min(_seeds(entry) for entry in there)
        for name, otherwise in ((TRAINED, ""), (CHECKS, SEVERAL), (VERIFIED, "")):
            row[name] = _common({word for entry in there for word in entry.words(name)}, otherwise)
        rows.append(row)
    return rows


def _common(words: set[str], otherwise: str) -> str:
    """Return the word that all records of a row have, or another where they were made by different versions."""
    return words.pop() if len(words) == 1 else otherwise


def _seeds(entry: Entry) -> int:
    """Return how many repetitions there are; of trials only the complete ones count."""
    return len(set(entry.repetitions.tolist())) if entry.trials is None else len(entry.trials.seeds)


def _main_columns(mine: Entry | None) -> Row:
    if mine is None:
        return {}
    row: Row = {}
    if accuracy := mine.by_seed("accuracy"):
        mean, low, high = mean_interval(list(accuracy.values()))
        clip = [None if x is None else min(1.0, max(0.0, x)) for x in (low, high)]
        row |= {"accuracy": mean, "accuracy_low": clip[0], "accuracy_high": clip[1]}
    for metric in ("macs_ratio", "selection_auroc"):
        if values := list(mine.by_seed(metric).values()):
            row[metric] = float(np.mean(values))
    if speeds := list(mine.by_seed("images_per_s").values()):
        row["images_per_s"], row["device"] = float(np.median(speeds)), ", ".join(mine.devices)
    return row


def _trial_columns(mine: Entry | None, dense: Entry | None) -> Row:
    if mine is None or mine.trials is None:
        return {}
    named = {"sample_complexity": sample_complexity(mine.trials)}
    if (by_loss := mine.successes("success_loss")) is not None:
        named[columns.BY_LOSS.key] = sample_complexity(by_loss)
    if dense is not None and dense.trials is not None and math.isfinite(dense.trials.n50):
        named["sample_complexity_ratio"] = n50_ratio(mine.trials, dense.trials)
    return {
        f"{name}{end}": _reached(number)
        for name, numbers in named.items()
        for end, number in zip(("", "_low", "_high"), numbers, strict=True)
    }


def _reached(number: float | None) -> float | str | None:
    if number is None or math.isnan(number):
        return None
    return NOT_REACHED if math.isinf(number) else number


def _spurious_columns(mine: Entry | None, dense: Entry | None) -> Row:
    """Return the gap's columns; the interval of its reduction is Student's over the seeds' paired differences.

    That is what a bootstrap of the seeds comes to, but for the width that it lacks where they are few.
    """
    if mine is None or not (gaps := mine.by_seed("spurious_gap")):
        return {}
    worst = list(mine.by_seed("worst_group_accuracy").values())
    row: Row = {"spurious_gap": float(np.mean(list(gaps.values()))), "worst_group_accuracy": float(np.mean(worst))}
    others = {} if dense is None else dense.by_seed("spurious_gap")
    if pairs := [others[seed] - gaps[seed] for seed in sorted(set(gaps) & set(others))]:
        mean, low, high = mean_interval(pairs)
        named = {"": mean + 0.0, "_low": low, "_high": high}  # no minus zero
        row |= {f"spurious_gap_reduction{end}": value for end, value in named.items()}
    return row


def _ranked(rows: list[Row], main: Setting | None, lossy: Collection[tuple[str, str]]) -> Judged:
    """Add ranks, differences to dense and the Pareto fronts, and return the rows in order.

    Oracles know the answer and are not ranked, nor is a strategy whose cells failed in part: what is left of it is no
    fair sample.
    """
    able = [row for row in rows if row["accuracy"] is not None] if main is not None else []
    every = paired.compare([main.entries[_key(row)].at(main.largest).contender() for row in able if main is not None])
    _add_differences(able, every)
    places = [i for i, r in enumerate(able) if r["kind"] != "oracle" and (r["strategy"], r["budget"]) not in lossy]
    ranked, found = [able[i] for i in places], every.among(places)
    for row in rows:
        row["rank"] = NOT_RANKED
    for row, (first, last) in zip(ranked, found.rank_sets(), strict=True):
        row["rank"] = str(first) if first == last else f"{first}-{last}"
    _mark_fronts(ranked)

    def order(row: Row) -> tuple[Any, ...]:
        return row["kind"] == "oracle", row["rank"] == NOT_RANKED, -(row["accuracy"] or 0), *_key(row)

    return Judged(sorted(rows, key=order), [] if main is None else [Contest(main.task, ranked, found)])


def _key(row: Row) -> Key:
    return row["strategy"], row["kind"], row["budget"]


def _add_differences(rows: Sequence[Row], pairs: paired.Pairs) -> None:
    """Add each row's difference in accuracy to dense, with its interval."""
    dense = next((i for i, row in enumerate(rows) if row["strategy"] == DENSE), None)
    if dense is None:
        return
    for row, mean, half in zip(rows, pairs.mean[:, dense].tolist(), pairs.half[:, dense].tolist(), strict=True):
        named = {"": mean, "_low": mean - half, "_high": mean + half}
        row |= {f"accuracy_delta{end}": None if math.isnan(x) else x + 0.0 for end, x in named.items()}  # no minus zero


def _mark_fronts(ranked: Sequence[Row]) -> None:
    """Mark the rows that no other has both more accuracy and no more cost than: MACs, and seconds on one device."""
    for column, cost in (("pareto", "macs_ratio"), ("pareto_speed", "images_per_s")):
        there = [row for row in ranked if row[cost] is not None]
        for row in there:
            others = [r for r in there if column == "pareto" or r["device"] == row["device"]]
            sign = 1 if column == "pareto" else -1
            row[column] = "no" if any(_dominates(other, row, cost, sign) for other in others) else "yes"


def _dominates(one: Row, other: Row, cost: str, sign: int) -> bool:
    """Say whether one row is as good as another in accuracy and cost, and better in one of them."""
    gain, saved = one["accuracy"] - other["accuracy"], sign * (other[cost] - one[cost])
    return bool(gain >= 0 and saved >= 0 and (gain > 0 or saved > 0))
