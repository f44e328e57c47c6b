"""What a reader of a board must know besides its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from sparsebench.board.build import Flats, Ranking
from sparsebench.board.entries import PRETRAINING, frame_of, settings_of
from sparsebench.records import environment
from sparsebench.records.badges import REMARK
from sparsebench.stats import paired

TOLERANCE = 0.02
"""How far realised MACs may be from those asked for, and from planned ones, before the board says so."""
SHOWN = 5
"""Parts of the descriptions of machines that are named."""


def notes_on(
    records: Flats, rankings: Sequence[Ranking] = (), folder: Path | None = None, *, technical: bool = True
) -> list[str]:
    """Return what is left out, what differences can be significant, what failed, and what checks found, a line each.

    Without the technical ones: what is left out, costs that are planned otherwise than networks run, several machines,
    failures and checks.

    Args:
        records: of a board.
        rankings: of the board.
        folder: the run's, which describes the machines.
        technical: whether all are wanted.
    """
    frame = frame_of(records)
    tracks = "data, model, size or track" if frame["track"].nunique() > 1 else "data, model or size"
    more = [
        f"{task}: {n} other setting{'s' if n > 1 else ''} ({tracks}) not shown; see them with --by task"
        for task, n in other_settings(frame).items()
    ]
    if technical:
        more += detectable(rankings) + cautions(frame) + inactive(frame)
    return more + cost_models(frame) + machines(frame, folder) + failures(frame) + remarks(frame)


def other_settings(records: Flats) -> dict[str, int]:
    """Return for each task how many settings (data, model, size, track) a board over all tasks leaves out."""
    tasks = [one.task for one in settings_of(frame_of(records)) if one.task != PRETRAINING]
    return {task: tasks.count(task) - 1 for task in sorted(set(tasks)) if tasks.count(task) > 1}


def detectable(rankings: Iterable[Ranking]) -> list[str]:
    """Return the difference in accuracy that each task's ranks would tell in 4 of 5 pairs."""
    clauses = [(one.task, paired.detectable(one.pairs)) for one in rankings]
    return [f"{task}: {clause}" for task, clause in clauses if clause is not None]


def failures(records: Flats) -> list[str]:
    """Return the cells that have no result, a line for those of one task that have none for the same reason."""
    frame = frame_of(records)
    bad = frame[frame["status"] != "ok"]
    counted = bad.groupby(["strategy", "task", "status", "reason"], observed=True).size()
    alike: dict[tuple[str, str, str, int], list[str]] = {}
    for (strategy, task, status, reason), n in sorted(counted.items()):
        alike.setdefault((task, status, _without_name(reason, strategy), n), []).append(strategy)
    lines = []
    for (task, status, reason, n), strategies in alike.items():
        cells = f"{n} cell{'s' if n > 1 else ''}{' each' if len(strategies) > 1 else ''}"
        lines.append(f"{', '.join(strategies)} on {task}: {cells} {status}: {reason}")
    return lines


def _without_name(reason: str, strategy: str) -> str:
    """Return a reason without the name of the strategy that it may begin with."""
    name = strategy.partition("(")[0]
    return reason.removeprefix(f"'{name}' ").removeprefix(f"{name}: ")


def cost_models(records: Flats) -> list[str]:
    """Return one line for each model and task whose network spends other MACs than its cost model plans."""
    frame = frame_of(records)
    said = frame[frame["cost_model"] != ""].sort_values(["task", "model", "strategy", "budget"], kind="stable")
    lines = []
    for (task, model), rows in said.groupby(["task", "model"], observed=True):
        first, n = rows.iloc[0], rows["strategy"].nunique()
        lines.append(
            f"{model} on {task}: its cost model does not plan as the network runs, for {n} "
            f"{'strategy' if n == 1 else 'strategies'}, such as {first['strategy']}, {first['budget']}: "
            f"{first['cost_model']}"
        )
    return lines


def inactive(records: Flats) -> list[str]:
    """Return one line for each strategy and task of the published terms that were not in its loss, with the reason."""
    said = frame_of(records)[["strategy", "task", "inactive"]].drop_duplicates()
    lines = []
    for strategy, task, note in sorted(said.itertuples(index=False)):
        parts = [part.rpartition(": ") for part in note.split("; ")] if note else []
        if terms := ", ".join(f"{names} ({why})" for names, _, why in parts):
            lines.append(f"{strategy} on {task}: published terms inactive: {terms}")
    return lines


def remarks(records: Flats) -> list[str]:
    """Return one line for each strategy of whose conformance checks there is something to say."""
    frame = frame_of(records)
    if REMARK not in frame:
        return []
    said = frame[["strategy", REMARK]].drop_duplicates()
    return [f"{strategy}: checks: {remark}" for strategy, remark in sorted(said.itertuples(index=False)) if remark]


def cautions(records: Flats) -> list[str]:
    """Return what hangs over the numbers: unfinished training, missed budgets, mixed devices."""
    frame = frame_of(records)
    good = frame[frame["status"] == "ok"]
    trials = good[good["success"].notna()]["strategy"].value_counts()
    unfitted = good[(good["success"] == 0) & (good["fitted"] == 0)]["strategy"].value_counts()
    lines = [
        f"{strategy}: {n} of {trials[strategy]} trials reached the step limit before they fitted their training samples"
        for strategy, n in sorted(unfitted.items())
        if n
    ]
    devices = sorted(good["device"].unique())
    return lines + _budget_misses(good) + (
        [f"made on several devices, whose images/s do not compare: {', '.join(devices)}"] * (len(devices) > 1)
    )  # fmt: skip


def machines(records: Flats, folder: Path | None = None) -> list[str]:
    """Return a line where records are of several machines or versions, with what their descriptions differ in."""
    frame = frame_of(records)
    hashes = set(frame[frame["status"] == "ok"]["environment"].astype(str))
    if len(hashes) < 2:
        return []
    said = environment.read(folder, hashes) if folder is not None else {}
    names = {name for one in said.values() for name in one}
    differ = sorted(name for name in names if len({one.get(name) for one in said.values()}) > 1)
    what = f", which differ in {', '.join(differ[:SHOWN])}" if differ and len(said) == len(hashes) else ""
    more = f" and {len(differ) - SHOWN} more" if what and len(differ) > SHOWN else ""
    return [f"made on {len(hashes)} machines, or with other versions{what}{more}: speeds are compared on the same only"]


def _budget_misses(good: pd.DataFrame) -> list[str]:
    """Return a line for each strategy, budget and task whose realised MACs are not those asked for, or planned.

    A plan misses what was asked for where no token counts cost that: merging pairs in few places, or few tokens.
    Of several the one that is farthest off is named.
    """
    parts = []
    for what, metric in (("asked for", "macs_ratio_asked"), ("planned", "macs_ratio_planned")):
        columns = {"wanted": good[metric], "off": (good["macs_ratio"] / good[metric] - 1).abs(), "what": what}
        # As texts: what comes from a cache is categories, which sort in an order of their own.
        texts = {name: good[name].astype(str) for name in ("strategy", "budget", "task")}
        every = good[["macs_ratio"]].assign(**texts, **columns)
        parts.append(every[every["off"] > TOLERANCE])
    off = pd.concat(parts).sort_values(["off", "macs_ratio", "what"], kind="stable")
    worst = off.drop_duplicates(["strategy", "budget", "task"], keep="last")
    return [
        f"{row.strategy}, {row.budget}, on {row.task}: realised MACs {row.macs_ratio:.3f} of dense, "
        f"{row.what} {row.wanted:.3f}"
        for row in worst.sort_values(["strategy", "budget", "task"]).itertuples()
    ]
