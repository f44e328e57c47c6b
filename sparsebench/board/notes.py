"""What a reader of a board must know besides its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binom

from sparsebench.board import missing
from sparsebench.board.build import Flats, Ranking
from sparsebench.board.entries import DENSE, NETWORK, PRETRAINING, Setting, add_titles, frame_of, settings_of
from sparsebench.records import environment, manifests
from sparsebench.records.checks import REMARK
from sparsebench.records.table import OUTCOMES, numbers_of
from sparsebench.sources.labels import MOST_CLASSES, described
from sparsebench.stats import paired
from sparsebench.stats.paired import Contender
from sparsebench.text import few, plain

TOLERANCE = 0.02
"""How far realised MACs may be from those asked for, and from planned ones, before the board says so."""
SURPRISING = 1e-3
"""How improbable so few right answers are by chance before the board says that classes are in another order."""
SHOWN = 5
"""Parts of the descriptions of machines, and bad pictures, that are named."""


def notes_on(
    records: Flats, rankings: Sequence[Ranking] = (), folder: Path | None = None, *, technical: bool = True
) -> list[str]:
    """Return what was tested, what is missing or left out, what differences can be significant, what failed, and what
    checks found, a line each.

    Without the technical ones: what was tested, what is missing or left out, of pictures too, how class folders are
    numbered, costs that are planned otherwise than networks run, several machines, failures and checks.

    Args:
        records: of a board.
        rankings: of the board.
        folder: the run's, which describes the machines.
        technical: whether all are wanted.
    """
    frame = frame_of(records)
    tracks = "data, model, size or track" if frame["track"].nunique() > 1 else "data, model or size"
    settings = [one for one in settings_of(frame) if one.task != PRETRAINING]
    more = networks(settings, folder) + missing.notes(settings, folder)
    more += [
        f"{task}: {n} other setting{'s' if n > 1 else ''} ({tracks}) not shown; see them with --by task"
        for task, n in other_settings(frame).items()
    ]
    more += below_chance(frame, folder) + class_orders(frame) + strays(frame, folder)
    if technical:
        more += detectable(rankings) + cautions(frame) + inactive(frame)
    more = left_out(frame, folder) + more + cost_models(frame)
    return more + machines(frame, folder) + failures(frame) + remarks(frame)


def left_out(records: Flats, folder: Path | None) -> list[str]:
    """Return a line for each set of pictures of which some are left out, as they cannot be read."""
    settings = [str(setting) for setting in frame_of(records)["setting"].unique()]
    lines = []
    for one in manifests.left_out(folder) if folder is not None else ():
        if any(one.images in setting for setting in settings):
            n = len(one.names)
            lines.append(
                f"{plain(one.images)}: {one.count:,} of {one.count + n:,} pictures; {n:,} that cannot be read "
                f"{'are' if n > 1 else 'is'} left out: {few(one.names, SHOWN, 200)}"
            )
    return lines


def networks(settings: Sequence[Setting], folder: Path | None = None) -> list[str]:
    """Return of each setting that is of one network, or of some that are tested as they are, which, and on how much.

    Args:
        settings: of a board.
        folder: the run's, which says how files of networks are called.
    """
    files = {} if folder is None else manifests.file_names(folder)
    lines = []
    for one, titled in zip(settings, add_titles(settings), strict=True):
        if one.has_trials or not (one.lone or one.networks):
            continue
        contenders = [entry.contender for entry in one.largest_entries.values()]
        items = max((_items(each) for each in contenders), default=0)
        names = ", ".join(sorted(missing.file_of(network, files) for network in one.networks.values()))
        n = len(one.networks) or 1
        what = f"{n} network{'s' if n > 1 else ''}{f' ({names})' if names else ''}, {items} test items"
        said = "intervals and tests are over networks and items"
        if one.lone:
            said = "intervals and tests are over the items, and say nothing of other networks"
        tested = list(one.largest_entries.values())
        draws = max(len(set(entry.repetitions.tolist())) for entry in tested)
        if any(len(tests) > 1 for entry in tested for tests in entry.tests.values()):
            what += f" that were drawn in {draws} tests"
        elif one.networks and draws > 1:
            said += f"; what draws at random was tested {draws} times, and counts with its mean"
        lines.append(f"{titled.task}: {what}: {said}")
    return lines


def _items(one: Contender) -> int:
    """Return how many different test items a contender was tested on, in the seed with the most."""
    if one.clusters is not None:
        return max(len(np.unique(numbers)) for numbers in one.clusters.values())
    return max((len(hits) for _, hits in one.hits.values()), default=0)


def class_orders(records: Flats) -> list[str]:
    """Return how class folders are numbered, a line for each way in which a task does it."""
    said = {(one.task, described(one.params[0])) for one in _with_class_folders(records)}
    return [f"{task}: class folders are numbered {line}" for task, line in sorted(said)]


def below_chance(records: Flats, folder: Path | None = None) -> list[str]:
    """Return a line for each setting with class folders in which dense is right less often than chance.

    Chance is what its answers come to on labels that have nothing to do with them, so that a network that gives one
    answer to everything, or answers that no folder has, is at chance. The test is exact: binomial, one-sided.
    """
    files = {} if folder is None else manifests.file_names(folder)
    lines = []
    for one in _with_class_folders(records):
        for key, entry in one.entries.items():
            outcomes = zip(*map(entry.column, (*OUTCOMES, NETWORK)), strict=True) if key[0] == DENSE else ()
            for n, labels, predictions, network in {each for each in outcomes if each[0] and each[2]}:
                whose = f" with {missing.file_of(network, files)}" if len(one.networks) > 1 else ""
                answers, truth = numbers_of(predictions, n), numbers_of(labels, n)
                shares = np.bincount(answers, minlength=MOST_CLASSES) * np.bincount(truth, minlength=MOST_CLASSES)
                chance, right = float(shares.sum()) / n**2, int((answers == truth).sum())
                if binom.cdf(right, n, chance) < SURPRISING:
                    lines.append(
                        f"{one.task}, {one.model}{whose}: dense is right in {right} of {n} pictures, and chance would "
                        f"be {chance * n:.0f}: the class folders are probably in another order than the head's "
                        "classes; say it with --task folder:classes=FILE"
                    )
    return sorted(set(lines))


def _with_class_folders(records: Flats) -> list[Setting]:
    """Return the settings of tasks that number class folders, named with what differs among them."""
    frame = frame_of(records)
    of_folders = frame[frame["setting"].isin([text for text in frame["setting"].unique() if '"labels":' in str(text)])]
    return [one for one in add_titles(settings_of(of_folders)) if described(one.params[0])] if len(of_folders) else []


def strays(records: Flats, folder: Path | None) -> list[str]:
    """Return what was left out of the folders of pictures that were used, a line each."""
    listed = [] if folder is None else manifests.strays(folder)
    used = " ".join(frame_of(records)["setting"].astype(str).unique()) if listed else ""
    return [f"{plain(one.name)}: left out: {plain(one.left_out, 1000)}" for one in listed if f'"{one.name}"' in used]


def other_settings(records: Flats) -> dict[str, int]:
    """Return for each task how many settings (data, model, size, track) a board over all tasks leaves out."""
    tasks = [one.task for one in settings_of(frame_of(records)) if one.task != PRETRAINING]
    return {task: tasks.count(task) - 1 for task in sorted(set(tasks)) if tasks.count(task) > 1}


def detectable(rankings: Iterable[Ranking]) -> list[str]:
    """Return the difference in accuracy that each task's ranks would tell in 4 of 5 pairs."""
    clauses = [(one.task, paired.detectable(one.pairs, of=one.of)) for one in rankings]
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
    what = f", which differ in {few(differ, SHOWN)}" if differ and len(said) == len(hashes) else ""
    return [f"made on {len(hashes)} machines, or with other versions{what}: speeds are compared on the same only"]


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
