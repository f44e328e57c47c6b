"""From flat records to leaderboard rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsebench.board.badges import CHECKS, REMARK, SEVERAL, UNCHECKED
from sparsebench.board.statistics import complete, mean_interval, n50, sample_complexity
from sparsebench.errors import UserError
from sparsebench.sweep.cell import canonical
from sparsebench.sweep.record import Record

COLUMNS = (
    "rank", "strategy", "kind", "budget", "macs_ratio", "accuracy", "accuracy_low", "accuracy_high", "accuracy_delta",
    "sample_complexity", "sample_complexity_low", "sample_complexity_high", "sample_complexity_ratio", "spurious_gap",
    "spurious_gap_reduction", "spurious_gap_reduction_low", "spurious_gap_reduction_high", "worst_group_accuracy",
    "selection_auroc", "images_per_s", "n_seeds",
)  # fmt: skip
METRICS = (
    "accuracy", "success", "fitted", "macs_ratio", "macs_ratio_planned", "spurious_gap", "worst_group_accuracy",
    "selection_auroc", "images_per_s",
)  # fmt: skip
"""The metrics that the board reads."""
BY_TASK = ("task", "model", "n_train")
NOT_REACHED, NOT_RANKED = "not reached", "not ranked"
DENSE = "dense"
PRETRAINING = "plain"
TOLERANCE = 0.02
"""How far realised MACs may be from those asked for, and from planned ones, before the board says so."""

Flat = Mapping[str, Any]
Row = dict[str, Any]


def flatten(record: Record) -> dict[str, Any]:
    """Return a record as one flat row: what it is about, then each metric's value under its name."""
    cell = record.cell
    return {
        "cell_id": record.cell_id,
        "status": record.status,
        "reason": record.failure.reason if record.failure else "",
        "task": cell.task.name,
        "model": cell.model.name,
        "strategy": record.label,
        "kind": record.kind,
        "budget": cell.budget.label
        + {"both": "", "train": ", in training only", "test": ", in the test only"}[cell.where],
        "n_train": cell.n_train,
        "repetition": cell.repetition,
        "macs_ratio_asked": None if cell.where == "train" else cell.budget.macs,
        "setting": canonical([{"name": part.name, "params": part.params} for part in (cell.task, cell.model)]),
        "device": record.device,
        "started": record.started,
        "seconds": record.seconds,
        "sha256": record.origin.sha256,
    } | {name: metric.value for name, metric in record.metrics.items()}


def _has(row: Flat, metric: str) -> bool:
    value = row.get(metric)
    return value is not None and value == value  # NaN is not


def build(records: Iterable[Flat], by: str | None = None) -> list[Row]:
    """Return the leaderboard's rows, ranked ones first and oracles last; see `columns_of` for their columns.

    Args:
        records: flat records, as `flatten` gives them; only those that are ok count.
        by: None for one row a strategy and budget over all tasks, "task" for one row a task and model as well.

    Raises:
        UserError: `by` is another word.
    """
    rows = _rows(list(records), by)
    if all(row[CHECKS] == UNCHECKED for row in rows):
        for row in rows:
            del row[CHECKS]
    return rows


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of a leaderboard: COLUMNS, after BY_TASK and before CHECKS where it has them."""
    there = rows[0] if rows else {}
    return [*(c for c in BY_TASK if c in there), *COLUMNS, *(c for c in (CHECKS,) if c in there)]


def _rows(everyone: Sequence[Flat], by: str | None) -> list[Row]:
    settings = _settings([row for row in everyone if row["status"] == "ok"])
    lossy = {(row["strategy"], row["budget"]) for row in everyone if row["status"] not in ("ok", "unsupported")}
    if by is None:
        tasks = {key[0]: settings[key] for key in sorted(settings, key=lambda key: _weight(key, settings[key]))}
        if len(tasks) > 1:
            tasks.pop(PRETRAINING, None)
        main = next((tasks[t] for t in ("composite", "spurious", *tasks) if t in tasks), [])
        trials = next((tasks[t] for t in ("theory", *tasks) if t in tasks and _trials(tasks[t])), [])
        return _rank(_board(main, trials, tasks.get("spurious", main)), lossy)
    if by != "task":
        raise UserError("--by", got=f"'{by}'", allowed="task")
    rows = []
    for key in sorted(settings):
        here = settings[key]
        own = {"task": key[0], "model": here[0]["model"], "n_train": max(r["n_train"] for r in here)}
        rows += [own | row for row in _rank(_board(here, here, here), lossy)]
    return rows


def _weight(key: tuple[str, str, int], rows: Sequence[Flat]) -> tuple[int, int, str]:
    """Return what decides between the settings of a task: the most records, then the largest size, then the name.

    Never the time: the same cells must give the same board.
    """
    return len(rows), key[2], key[1]


def other_settings(records: Iterable[Flat]) -> dict[str, int]:
    """Return for each task how many settings (data, model, size) a board over all tasks leaves out."""
    settings = {_setting(r) for r in records if r["status"] == "ok"}
    tasks = [key[0] for key in settings if key[0] != PRETRAINING]
    return {task: tasks.count(task) - 1 for task in sorted(set(tasks)) if tasks.count(task) > 1}


def _settings(good: Sequence[Flat]) -> dict[tuple[str, str, int], list[Flat]]:
    """Return the records of each task, model and size; tasks with a success criterion have all sizes together."""
    settings = defaultdict(list)
    for row in good:
        settings[_setting(row)].append(row)
    return settings


def _setting(row: Flat) -> tuple[str, str, int]:
    return row["task"], row["setting"], 0 if _has(row, "success") else row["n_train"]


def _board(main: Sequence[Flat], trials: Sequence[Flat], spurious: Sequence[Flat]) -> list[Row]:
    """Return one row a strategy and budget: accuracy and cost from `main`, the other columns from their tasks."""
    grouped = [_grouped(part) for part in (main, trials, spurious)]
    largest = max((r["n_train"] for r in main), default=0)
    grouped[0] = {entry: [r for r in part if r["n_train"] == largest] for entry, part in grouped[0].items()}
    dense = [[r for entry, own in part.items() if entry[0] == DENSE for r in own] for part in grouped]
    dense_trials = _trials(dense[1])
    rows = []
    for entry in sorted({entry for part in grouped for entry in part}):
        row: Row = dict.fromkeys(COLUMNS)
        row |= dict(zip(("strategy", "kind", "budget"), entry, strict=True))
        mine = [part.get(entry, []) for part in grouped]
        row |= _main_columns(mine[0], dense[0])
        row |= _trial_columns(mine[1], dense_trials) | _spurious_columns(mine[2], dense[2])
        row["n_seeds"] = min(_seeds(part) for part in mine if part)
        row[CHECKS] = _common({r.get(CHECKS, UNCHECKED) for part in mine for r in part})
        rows.append(row)
    return rows


def _common(badges: set[str]) -> str:
    """Return the badge that all records of a row have, or that they were made by different versions."""
    return badges.pop() if len(badges) == 1 else SEVERAL


def _grouped(rows: Iterable[Flat]) -> dict[tuple[str, str, str], list[Flat]]:
    """Return the rows of each strategy, kind and budget.

    They are in one order: sums of floating-point numbers depend on it, and the board must not.
    """
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["strategy"], row["kind"], row["budget"]].append(row)
    for own in grouped.values():
        own.sort(key=lambda r: (r["n_train"], r["repetition"], r["cell_id"]))
    return dict(sorted(grouped.items()))


def _seeds(rows: Sequence[Flat]) -> int:
    """Return how many repetitions there are; of trials only the complete ones count."""
    trials = _trials(rows)
    return len(complete(trials)) if trials else len({r["repetition"] for r in rows})


def _by_seed(rows: Iterable[Flat], metric: str) -> dict[int, float]:
    return {r["repetition"]: r[metric] for r in rows if _has(r, metric)}


def _paired(mine: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    return [mine[seed] - dense[seed] for seed in sorted(set(mine) & set(dense))]


def _main_columns(mine: Sequence[Flat], dense: Sequence[Flat]) -> Row:
    row: Row = {}
    accuracy = _by_seed(mine, "accuracy")
    if accuracy:
        mean, low, high = mean_interval(list(accuracy.values()))
        clip = [None if x is None else min(1.0, max(0.0, x)) for x in (low, high)]
        row |= {"accuracy": mean, "accuracy_low": clip[0], "accuracy_high": clip[1]}
    if pairs := _paired(accuracy, _by_seed(dense, "accuracy")):
        row["accuracy_delta"] = float(np.mean(pairs))
    for metric in ("macs_ratio", "selection_auroc"):
        if values := list(_by_seed(mine, metric).values()):
            row[metric] = float(np.mean(values))
    if speeds := list(_by_seed(mine, "images_per_s").values()):
        row["images_per_s"] = float(np.median(speeds))
    return row


def _trials(rows: Iterable[Flat]) -> dict[int, dict[int, float]]:
    trials: dict[int, dict[int, float]] = defaultdict(dict)
    for r in rows:
        if (success := r.get("success")) is not None and success == success:  # not NaN
            trials[r["repetition"]][r["n_train"]] = success
    return trials


def _trial_columns(mine: Sequence[Flat], dense: Mapping[int, Mapping[int, float]]) -> Row:
    if not (trials := _trials(mine)):
        return {}
    value, low, high = sample_complexity(trials)
    shared = set(trials) & set(dense)
    own, other = (n50({seed: t[seed] for seed in shared}) for t in (trials, dense))
    ratio = own / other if math.isfinite(other) else None
    named = {"": value, "_low": low, "_high": high, "_ratio": ratio}
    return {f"sample_complexity{end}": _reached(number) for end, number in named.items()}


def _reached(number: float | None) -> float | str | None:
    if number is None or math.isnan(number):
        return None
    return NOT_REACHED if math.isinf(number) else number


def _spurious_columns(mine: Sequence[Flat], dense: Sequence[Flat]) -> Row:
    gaps = _by_seed(mine, "spurious_gap")
    if not gaps:
        return {}
    worst = list(_by_seed(mine, "worst_group_accuracy").values())
    row: Row = {"spurious_gap": float(np.mean(list(gaps.values()))), "worst_group_accuracy": float(np.mean(worst))}
    if pairs := _paired(gaps, _by_seed(dense, "spurious_gap")):
        mean, low, high = mean_interval([-x for x in pairs])
        row |= {
            "spurious_gap_reduction": mean + 0.0,  # no minus zero
            "spurious_gap_reduction_low": low,
            "spurious_gap_reduction_high": high,
        }
    return row


def _rank(rows: list[Row], lossy: set[tuple[str, str]]) -> list[Row]:
    """Rank by accuracy; equal accuracies share a rank.

    Oracles know the answer and are not ranked, nor is a strategy whose cells failed in part: what is left of it is no
    fair sample.
    """
    ranked = [
        r
        for r in rows
        if r["kind"] != "oracle" and r["accuracy"] is not None and (r["strategy"], r["budget"]) not in lossy
    ]
    for row in rows:
        row["rank"] = NOT_RANKED
    rising = sorted(row["accuracy"] for row in ranked)
    for row in ranked:
        row["rank"] = 1 + len(ranked) - bisect_right(rising, row["accuracy"])

    def order(row: Row) -> tuple[Any, ...]:
        rank = row["rank"] if isinstance(row["rank"], int) else math.inf
        return row["kind"] == "oracle", rank, -(row["accuracy"] or 0), row["strategy"], row["budget"]

    return sorted(rows, key=order)


def failures(records: Iterable[Flat]) -> list[str]:
    """Return one line for each strategy, task and reason of the cells that have no result."""
    counted = Counter((r["strategy"], r["task"], r["status"], r["reason"]) for r in records if r["status"] != "ok")
    return [
        f"{strategy} on {task}: {n} cell{'s' if n > 1 else ''} {status}: {reason}"
        for (strategy, task, status, reason), n in sorted(counted.items())
    ]


def remarks(records: Iterable[Flat]) -> list[str]:
    """Return one line for each strategy of whose conformance checks there is something to say."""
    said = {(r["strategy"], r.get(REMARK, "")) for r in records}
    return [f"{strategy}: checks: {remark}" for strategy, remark in sorted(said) if remark]


def cautions(records: Iterable[Flat]) -> list[str]:
    """Return what a reader must know besides the numbers: unfinished training, missed budgets, mixed devices."""
    good = [r for r in records if r["status"] == "ok"]
    trials = Counter(r["strategy"] for r in good if _has(r, "success"))
    unfitted = Counter(r["strategy"] for r in good if r.get("success") == 0 and r.get("fitted") == 0)
    lines = [
        f"{strategy}: {n} of {trials[strategy]} trials reached the step limit before they fitted their training samples"
        for strategy, n in sorted(unfitted.items())
    ]
    lines += _missed(good)
    devices = sorted({r["device"] for r in good})
    return lines + (
        [f"made on several devices, whose images/s do not compare: {', '.join(devices)}"] * (len(devices) > 1)
    )


def _missed(rows: Iterable[Flat]) -> list[str]:
    """Return a line for each strategy, budget and task whose realised MACs are not those asked for, or planned.

    A plan misses what was asked for where no token counts cost that: merging pairs in few places, or few tokens.
    Of several the one that is farthest off is named.
    """
    farthest: dict[tuple[str, str, str], tuple[float, float, str]] = {}
    for row in rows:
        for what, metric in (("asked for", "macs_ratio_asked"), ("planned", "macs_ratio_planned")):
            if not (_has(row, metric) and _has(row, "macs_ratio")):
                continue
            real, off = row["macs_ratio"], abs(row["macs_ratio"] / row[metric] - 1)
            key = row["strategy"], row["budget"], row["task"]
            said = f"realised MACs {real:.3f} of dense, {what} {row[metric]:.3f}"
            if off > TOLERANCE:
                farthest[key] = max(farthest.get(key, (0.0, 0.0, "")), (off, real, said))
    return [f"{', '.join(key[:2])}, on {key[2]}: {said}" for key, (_, _, said) in sorted(farthest.items())]
