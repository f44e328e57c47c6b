"""What a reader of a board must know besides its numbers."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import bdtr

from sparsebench.board.judge import Flats, Leaderboard, Ranking
from sparsebench.board.settings import (
    DENSE,
    NETWORK,
    PRETRAINING,
    Setting,
    dense_of,
    frame_of,
    settings_of,
)
from sparsebench.records import manifests
from sparsebench.records.cell import canonical
from sparsebench.records.record import numbers_of
from sparsebench.records.table import FOREGROUNDS, GROUPS, OUTCOMES
from sparsebench.stats import paired
from sparsebench.strategy import spec
from sparsebench.tasks.sources.labels import MOST_CLASSES, described
from sparsebench.testing.reports import REMARK

SURPRISING = 1e-3
"""How improbable so few right answers are by chance before the board says that classes are in another order."""


def notes_on(
    records: Flats, judged: Leaderboard | None = None, folder: Path | None = None, *, technical: bool = True
) -> list[str]:
    """Return what is missing or left out, what differences can be significant, what failed, and what checks found.

    Args:
        records: of a board.
        judged: the board.
        folder: the run's.
        technical: whether detectable differences, unfinished training and inactive terms are wanted.
    """
    frame = frame_of(records)
    rankings, every = ([], settings_of(frame)) if judged is None else (judged.rankings, judged.settings)
    settings = [one for one in every if one.source != PRETRAINING]
    more = [*left_out(frame, folder), *lone(settings), *not_ranked(settings, folder), *other_settings(settings)]
    more += below_chance(frame)
    frame = frame.drop(columns=[*OUTCOMES[1:], GROUPS, FOREGROUNDS])  # large, and copied with each part of the rows
    if technical:
        more += [*detectable(rankings), *unfinished(frame), *inactive(frame)]
    return [*more, *cost_models(frame), *machines(frame), *failures(frame), *remarks(frame)]


def left_out(frame: pd.DataFrame, folder: Path | None) -> Iterator[str]:
    """Yield what was left out of the folders of pictures that were used, and the pictures that cannot be read."""
    if folder is None:
        return
    used, names = " ".join(frame["setting"].astype(str).unique()), manifests.file_names(folder)
    for name, line in manifests.left_out(folder):
        if canonical(called := names.get(name, name)) in used:
            yield f"{called}: left out: {line}"


def lone(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield each setting that is of one network."""
    for one in settings:
        if one.lone and not one.has_trials:
            yield f"{one.task}: one network: intervals and tests are over its test items alone"


def not_ranked(settings: Sequence[Setting], folder: Path | None = None) -> list[str]:
    """Return a line for the strategies of each setting of a board that lack the same, with the command that adds it.

    The command is known where the run's folder answers one suite.
    """
    suites = {one.name for one in manifests.suites(folder)} - {manifests.OWN} if folder else set()
    described = manifests.strategies(folder).values() if folder else ()
    files = {one.name: one.file for one in described if one.file}
    lines = []
    for one in settings:
        missing = one.missing
        if missing.dense:
            failed = (one.others["strategy"] == DENSE).any()
            lines.append(f"{one.task}: dense {'has no result' if failed else 'is missing'}, so nothing is ranked")
        sizes = missing.cells.columns.get_level_values("n_train").nunique()
        unit = "trials" if sizes > 1 else "tests" if one.networks else "repetitions"
        whose = one.entries["strategy"]
        cells = missing.cells.groupby(whose).any().sum(axis=1)
        alike = defaultdict[str, list[str]](list)
        for strategy, lacking in cells.items():
            budgets = {share for i in whose.index[whose == strategy] for share in missing.shares.get(i, ())}
            parts = [f"macs {budget:g}" for budget in sorted(budgets, reverse=True)]
            parts += [f"{lacking} of {missing.cells.shape[1]} {unit}"] if lacking else []
            if parts:
                alike[", ".join(parts)].append(strategy)
        for text, strategies in alike.items():
            command = "a run with the options of the others"
            if len(suites) == 1:
                words = (_word(strategy, files) for strategy in strategies)
                command = f"`sparsebench run {shlex.join(words)} --suite {shlex.quote(*suites)} --out FOLDER`"
                command += " with this folder and the run's other options"
            lines.append(f"{', '.join(strategies)} on {one.task}: not ranked there, without {text}; {command} adds it")
    return lines


def _word(strategy: str, files: Mapping[str, str]) -> str:
    """Return what stands for the label of a strategy in a command; a plugin's file is known by its name."""
    name, params = spec.parts_of(strategy)
    return ":".join(filter(None, (files.get(name, name), ",".join(f"{key}={value}" for key, value in params.items()))))


def other_settings(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield for each task how many settings a board over all tasks leaves out."""
    for task, n in sorted(Counter(one.source for one in settings).items()):
        if n > 1:
            s = "s" if n > 2 else ""
            pictures = {one.params[0].get("images") for one in settings if one.source == task}
            beside = ", and sets of pictures side by side with --view shifts" * (len(pictures) > 1)
            others = f"{n - 1} other setting{s} (data, model, size or track) not shown; see them with --by task"
            yield f"{task}: {others}{beside}"


def below_chance(frame: pd.DataFrame) -> list[str]:
    """Return a line for each setting with class folders in which dense is right less often than chance.

    Chance is what its answers come to on labels that have nothing to do with them, so that a network that gives one
    answer to everything, or answers that no folder has, is at chance. The test is exact: binomial, one-sided.
    """
    lines = set()
    numbered = [text for text in frame["setting"].unique() if '"labels":' in str(text)]
    for one in settings_of(frame[frame["setting"].isin(numbered)]):
        tested = dense_of(one.records)[[*OUTCOMES, NETWORK]].drop_duplicates()
        for n, labels, predictions, network in tested.itertuples(index=False):
            if not n or not predictions or not described(one.params[0]):
                continue
            whose = f" with {network}" if len(one.networks) > 1 else ""
            answers, truth = numbers_of(predictions, n), numbers_of(labels, n)
            shares = np.bincount(answers, minlength=MOST_CLASSES) * np.bincount(truth, minlength=MOST_CLASSES)
            chance, right = float(shares.sum()) / n**2, int((answers == truth).sum())
            if bdtr(right, n, chance) < SURPRISING:
                lines.add(
                    f"{one.task}, {one.model}{whose}: dense is right in {right} of {n} pictures, and chance would be "
                    f"{chance * n:.0f}: the class folders are probably in another order than the head's classes; say "
                    "it with --task folder:classes=FILE"
                )
    return sorted(lines)


def detectable(rankings: Iterable[Ranking]) -> list[str]:
    """Return the difference in what ranks are by that would be significant in 4 of 5 pairs of each task."""
    judged = [
        (one, one.pairs, "accuracy") if one.curves is None else (one, one.curves.pairs, "mean accuracy over MACs")
        for one in rankings
    ]
    clauses = [(one.task, paired.detectable(pairs, what, one.setting.of)) for one, pairs, what in judged]
    return [f"{task}: {clause}" for task, clause in clauses if clause is not None]


def failures(frame: pd.DataFrame) -> list[str]:
    """Return the cells that have no result, a line for those of one task that have none for the same reason."""
    bad = frame[frame["status"] != "ok"]
    counted = bad.groupby(["strategy", "task", "status", "reason"], observed=True).size()
    alike = defaultdict[tuple[str, str, str, int], list[str]](list)
    for (strategy, task, status, reason), n in sorted(counted.items()):
        name = strategy.partition("(")[0]
        alike[task, status, reason.removeprefix(f"'{name}' ").removeprefix(f"{name}: "), n].append(strategy)
    lines = []
    for (task, status, reason, n), strategies in alike.items():
        cells = f"{n} cell{'s' if n > 1 else ''}{' each' if len(strategies) > 1 else ''}"
        lines.append(f"{', '.join(strategies)} on {task}: {cells} {status}: {reason}")
    return lines


def cost_models(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each model and task whose network spends other MACs than its cost model plans."""
    said = frame[frame["cost_model"] != ""].sort_values(["task", "model", "strategy", "budget"], kind="stable")
    for (task, model), rows in said.groupby(["task", "model"], observed=True):
        n, first = rows["strategy"].nunique(), rows.iloc[0]
        yield (
            f"{model} on {task}: its cost model does not plan as the network runs, for {n} "
            f"{'strategy' if n == 1 else 'strategies'}, such as {first['strategy']}, {first['budget']}: "
            f"{first['cost_model']}"
        )


def inactive(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each strategy and task of the published terms that were not in its loss, with the reason."""
    said = frame[["strategy", "task", "inactive"]].drop_duplicates()
    for strategy, task, note in sorted(said.itertuples(index=False)):
        parts = [part.rpartition(": ") for part in note.split("; ")] if note else []
        if terms := ", ".join(f"{names} ({why})" for names, _, why in parts):
            yield f"{strategy} on {task}: published terms inactive: {terms}"


def remarks(frame: pd.DataFrame) -> list[str]:
    """Return a line for each strategy of whose conformance checks there is something to say."""
    said = frame[["strategy", REMARK]].drop_duplicates() if REMARK in frame else pd.DataFrame()
    return [f"{strategy}: checks: {remark}" for strategy, remark in sorted(said.itertuples(index=False)) if remark]


def unfinished(frame: pd.DataFrame) -> list[str]:
    """Return of which strategies trials ended before they fitted their training samples."""
    good = frame[frame["status"] == "ok"]
    trials = good[good["success"].notna()]["strategy"].value_counts()
    unfitted = good[(good["success"] == 0) & (good["fitted"] == 0)]["strategy"].value_counts()
    return [
        f"{strategy}: {n} of {trials[strategy]} trials reached the step limit before they fitted their training samples"
        for strategy, n in sorted(unfitted.items())
        if n
    ]


def machines(frame: pd.DataFrame) -> list[str]:
    """Return a line where records are of several devices, machines or versions."""
    good = frame[frame["status"] == "ok"]
    hashes, devices = good["environment"].nunique(), sorted({str(one) for one in good["device"].unique()})
    what = [f"on {', '.join(devices)}"] if len(devices) > 1 else []
    what += [f"on {hashes} machines, or with other versions"] if hashes > 1 else []
    return [f"made {' and '.join(what)}: speeds are compared on the same only"] if what else []
