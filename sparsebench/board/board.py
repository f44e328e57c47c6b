"""The board of a run's folder: its leaderboards, notes, citations and pictures."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import bdtr

from sparsebench import files
from sparsebench.board.columns import TOLERANCE, over_budget
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.papers import address_of
from sparsebench.board.settings import (
    DENSE,
    NO_BADGES,
    PRETRAINING,
    Flats,
    Setting,
    dense_of,
    frame_of,
    read,
    settings_of,
)
from sparsebench.errors import UserError, few, plain
from sparsebench.plan.request import load
from sparsebench.records import manifests
from sparsebench.records.record import SHIPPED, canonical, numbers_of
from sparsebench.records.reports import REMARK
from sparsebench.records.table import OUTCOMES
from sparsebench.stats import paired
from sparsebench.strategy.spec import words_of
from sparsebench.tasks.sources.labels import MOST_CLASSES, numbering

SURPRISING = 1e-3
"""The board warns about the order of classes if so few correct answers are less probable than this by chance."""
NAMED = 5
"""Largest number of rows that a note names."""
OWN_PICTURE, PNG = "leaderboard", b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 1_000_000
"""Limit on the total size of the pictures in a board. Pictures beyond it stay files of the folder."""


class Board(NamedTuple):
    """A board; a pure function of the files in the run's folder.

    Attributes:
        judged: the leaderboard over all tasks.
        by_task: the leaderboard with separate rows for each task and model.
        notes: lines for the reader, see `notes_on`.
        bibtex: entries of the works that its strategies cite.
        environments: machine and libraries, by hash.
        suites: names and versions of the suites that were run.
        pictures: PNG files by their subject, such as the tokens that were kept.
        papers: citation and address, by strategy name without parameters; the address is a search if none is known.
        third_party: the strategies, with parameters, that do not come with sparsebench.
    """

    judged: Leaderboard
    by_task: Leaderboard
    notes: Sequence[str] = ()
    bibtex: Sequence[str] = ()
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    suites: Sequence[str] = ()
    pictures: Mapping[str, bytes] = MappingProxyType({})
    papers: Mapping[str, tuple[str, str]] = MappingProxyType({})
    third_party: frozenset[str] = frozenset()


def gather(folder: Path, badges: Mapping[str, str] = NO_BADGES) -> Board:
    """Return the board of a run's folder.

    Args:
        folder: the folder.
        badges: badges of submitted strategies, by name.

    Raises:
        UserError: the folder has no records, or has records of a later sparsebench.
    """
    return board_of(read(folder, badges=badges), folder)


def board_of(records: Flats, folder: Path) -> Board:
    """Return the board of flat records of a run's folder, with the folder's manifests and pictures."""
    frame = frame_of(records)
    judged = judge(frame)
    suites_asked = (suite for suite in manifests.suites(folder) if suite.name != manifests.OWN)
    suites = (plain(f"{suite.name}, version {suite.version}") for suite in suites_asked)
    papers = {}
    for strategy in _strategies_of(folder, frame):
        if address := address_of(strategy.bibtex, strategy.citation):
            papers[strategy.name] = plain(strategy.citation, 300), address
    pictures, room = {}, MOST_BYTES
    for path in files.files_in(folder.resolve(), ".png"):
        content = None if path.name.startswith(OWN_PICTURE) else files.content_or_none(path, room)
        if content is not None and content.startswith(PNG):
            pictures[plain(path.stem)] = content
            room -= len(content)
    return Board(
        judged,
        judge(frame, "task", judged),
        notes=notes_on(frame, judged, folder),
        bibtex=bibtex(folder, frame),
        environments=manifests.environments(folder, set(frame["environment"])),
        suites=list(dict.fromkeys(suites)),  # a suite that was run with several sets of options is listed once
        pictures=pictures,
        papers=papers,
        third_party=frozenset(frame.loc[frame["distribution"].astype(str) != SHIPPED, "strategy"].astype(str)),
    )


def bibtex(folder: Path, frame: pd.DataFrame) -> list[str]:
    """Return the BibTeX entries of the works that the strategies of a board cite."""
    entries = (strategy.bibtex.strip().splitlines() for strategy in _strategies_of(folder, frame))
    return sorted({"\n".join(map(plain, lines)) for lines in entries} - {""})


def _strategies_of(folder: Path, frame: pd.DataFrame) -> list[manifests.StrategyEntry]:
    """Return the manifest entries of the strategies of a board."""
    strategies = manifests.strategies(folder)
    used = frame[["strategy_name", "revision"]].astype(str).drop_duplicates()
    keys = sorted(used.itertuples(index=False, name=None))
    return [strategies[key] for key in keys if key in strategies]


def notes_on(
    records: Flats, judged: Leaderboard | None = None, folder: Path | None = None, *, technical: bool = True
) -> list[str]:
    """Return a board's notes: missing results, omitted data, detectable differences, failures, results of checks.

    Args:
        records: the board's records.
        judged: the board; computed if not given.
        folder: the run's folder.
        technical: whether to include detectable differences, unfinished training and inactive terms.
    """
    frame = frame_of(records)
    judged = judge(frame) if judged is None else judged
    settings = [setting for setting in judged.settings if setting.source != PRETRAINING]
    lines = []
    if folder is not None:
        all_settings, names = " ".join(frame["setting"].astype(str).unique()), manifests.file_names(folder)
        notes = ((names.get(name, name), line) for name, line in manifests.omissions(folder))
        lines += [f"{name}: left out: {line}" for name, line in notes if canonical(name) in all_settings]
    lines += [
        f"{setting.task}: one network: intervals and tests are over its test items alone"
        for setting in settings
        if setting.lone and not setting.has_trials
    ]
    lines += unequal(settings, folder)
    for task, n in sorted(Counter(setting.source for setting in settings).items()):
        if n > 1:
            pictures = {setting.params[0].get("images") for setting in settings if setting.source == task}
            shifts = ", and compare sets of pictures with --view shifts" * (len(pictures) > 1)
            others = f"{n - 1} other setting{'s' * (n > 2)} (data, model, size or track) not shown"
            lines.append(f"{task}: {others}; see them with --by task{shifts}")
    lines += [*_over_budget(judged), *below_chance(frame)]
    if technical:
        lines += _technical(frame, judged)
    mismatches = frame.loc[frame["cost_model"] != "", ["task", "model", "strategy", "budget", "cost_model"]]
    for (task, model), rows in mismatches.sort_values([*mismatches]).groupby(["task", "model"], observed=True):
        n, (*_, strategy, budget, why) = rows["strategy"].nunique(), rows.iloc[0]
        lines.append(
            f"{model} on {task}: its cost model does not agree with the network's run for {n} "
            f"{'strategy' if n == 1 else 'strategies'}, such as {strategy}, {budget}: {why}"
        )
    lines += [*machines(frame), *failures(frame)]
    remarks = frame[["strategy", REMARK]].drop_duplicates() if REMARK in frame else pd.DataFrame()
    return lines + [
        f"{strategy}: checks: {remark}" for strategy, remark in sorted(remarks.itertuples(index=False)) if remark
    ]


def _over_budget(judged: Leaderboard) -> Iterator[str]:
    """Yield a line for each ranking with the strategies that spend more than their budget, the worst first."""
    for ranking in judged.rankings:
        rows = ranking.every[over_budget(ranking.every)]
        excess = (rows["macs_ratio"] / rows["asked"].astype(float)).sort_values(ascending=False)
        spent = [f"{row.strategy} {row.macs_ratio:.2f} at {row.asked:g}" for row in rows.loc[excess.index].itertuples()]
        if spent:
            rule = f"over their budget of MACs by more than {TOLERANCE:.0%}, and not among the best at it"
            yield f"{ranking.task}: {rule}: {few(spent, NAMED)}"


def _technical(frame: pd.DataFrame, judged: Leaderboard) -> Iterator[str]:
    """Yield lines on detectable differences, unfinished training, and published terms that were inactive."""
    for ranking in judged.rankings:
        pairs, quantity = (
            (ranking.pairs, "accuracy") if ranking.curves is None else (ranking.curves.pairs, "mean accuracy over MACs")
        )
        unit = "networks" if ranking.setting.networks else "seeds"
        if (clause := paired.detectable(pairs, quantity, unit)) is not None:
            yield f"{ranking.task}: {clause}"
    trials = frame[(frame["status"] == "ok") & frame["success"].notna()]
    for strategy, rows in trials.groupby("strategy", observed=True):
        if n := int(((rows["success"] == 0) & (rows["fitted"] == 0)).sum()):
            reached = f"{n} of {len(rows)} trials reached the step limit"
            yield f"{strategy}: {reached} before they fitted their training samples"
    inactive = frame[["strategy", "task", "inactive"]].drop_duplicates()
    for strategy, task, note in sorted(inactive[inactive["inactive"] != ""].itertuples(index=False)):
        parts = [part.rpartition(": ") for part in note.split("; ")]
        terms = ", ".join(f"{names} ({why})" for names, _, why in parts)
        yield f"{strategy} on {task}: published terms inactive: {terms}"


def unequal(settings: Sequence[Setting], folder: Path | None = None) -> list[str]:
    """Return for each setting lines on the strategies that lack common results, and on those that have more.

    Each line has the command that makes them equal. It is known only if the run's folder has the results of a single
    suite.
    """
    lines = []
    for setting in settings:
        common = setting.common
        if common.dense:
            failed = (setting.others["strategy"] == DENSE).any()
            lines.append(f"{setting.task}: dense {'has no result' if failed else 'is missing'}, so nothing is ranked")
        elif common.cells.empty:
            lines.append(
                f"{setting.task}: nothing is ranked, because dense and half of the strategies have none of the same "
                f"{_unit(setting)}; {_command(common.fewer, setting, folder)} adds them"
            )
        lines += [*_lacking(setting, folder), *_left_out(setting, folder)]
    return lines


def _lacking(setting: Setting, folder: Path | None) -> Iterator[str]:
    """Yield a line for the strategies that lack the same common results."""
    common, of_entries = setting.common, setting.entries["strategy"]
    alike = defaultdict[str, list[str]](list)
    for strategy, lacking in common.lacking.groupby(of_entries).any().sum(axis=1).items():
        budgets = {share for i in of_entries.index[of_entries == strategy] for share in common.shares.get(i, ())}
        parts = [_budgets(budgets)] if budgets else []
        parts += [f"{lacking} of {len(common.cells)} {_unit(setting)}"] if lacking else []
        if parts:
            alike[", ".join(parts)].append(strategy)
    for text, strategies in alike.items():
        names, command = ", ".join(strategies), _command(strategies, setting, folder)
        yield f"{names} on {setting.task}: not ranked there, without {text}; {command} adds it"


def _left_out(setting: Setting, folder: Path | None) -> Iterator[str]:
    """Yield a line on the results that are not common, and one on the budgets, with the strategies that have them."""
    common = setting.common
    if common.more and not common.cells.empty:
        by_number = defaultdict[int, list[str]](list)
        for strategy, number in common.more.items():
            by_number[number].append(strategy)
        more = "; ".join(f"{number} more of {', '.join(names)}" for number, names in sorted(by_number.items()))
        yield (
            f"{setting.task}: {_unit(setting)} that are compared: {len(common.cells)}; left out: {more}, which "
            f"{few(common.fewer, NAMED)} lack; {_command(common.fewer, setting, folder)} adds them"
        )
    if common.more_budgets:
        by_budgets = defaultdict[str, list[str]](list)
        for strategy, budgets in common.more_budgets.items():
            by_budgets[_budgets(budgets)].append(strategy)
        more = "; ".join(f"{budgets} of {', '.join(names)}" for budgets, names in by_budgets.items())
        over = f"over {_budgets(common.budgets)}" if common.budgets else "missing, because no budget is common"
        yield (
            f"{setting.task}: kept accuracy is {over}; left out: {more}, which "
            f"{few(common.fewer_budgets, NAMED)} lack; {_command(common.fewer_budgets, setting, folder)} adds them"
        )


def _unit(setting: Setting) -> str:
    """Return the name of the cells of a row in a setting."""
    if setting.has_trials and setting.measured["n_train"].nunique() > 1:
        return "trials"
    return "tests" if setting.networks else "repetitions"


def _budgets(shares: Iterable[float]) -> str:
    return ", ".join(f"macs {share:g}" for share in sorted(shares, reverse=True))


def _command(strategies: Sequence[str], setting: Setting, folder: Path | None) -> str:
    """Return the command that runs strategies like the others, if the run's folder has a single suite.

    It has the number of repetitions if some strategies have more than the suite asks for.
    """
    suites = {suite.name for suite in manifests.suites(folder)} - {manifests.OWN} if folder else set()
    if folder is None or len(suites) != 1:
        return "a run with the options of the others"
    (suite,) = suites
    files = {strategy.name: strategy.file for strategy in manifests.strategies(folder).values() if strategy.file}
    entries = setting.every.drop_duplicates("strategy").set_index("strategy")
    words = []
    for strategy in strategies:
        name, params = entries.loc[strategy, ["strategy_name", "strategy_params"]]
        try:
            words.append(files.get(name, name) + words_of(json.loads(params)))
        except UserError:  # a parameter that cannot be typed
            return "a run with the options of the others"
    words += ["--suite", suite]
    repetitions = int(setting.measured["repetition"].max()) + 1
    if repetitions > _repetitions_of(suite, setting.source):
        words += ["--seeds", str(repetitions)]
    return f"`sparsebench run {shlex.join(words)} --out FOLDER` with this folder and the run's other options"


def _repetitions_of(suite: str, task: str) -> float:
    """Return the number of repetitions of a task in a suite; infinity if this installation lacks the suite."""
    try:
        loaded = load(suite)
    except UserError:
        return math.inf
    return max((entry.seeds or loaded.seeds for entry in loaded.task if entry.name == task), default=math.inf)


def below_chance(frame: pd.DataFrame) -> list[str]:
    """Return a line for each setting with class folders in which dense is correct significantly less often than chance.

    Chance is the expected accuracy if answers and labels are independent. A network that always gives the same answer,
    or only answers that no folder has, is thus at chance. The test is an exact one-sided binomial test.
    """
    lines = set()
    numbered = [text for text in frame["setting"].unique() if '"labels":' in str(text)]
    for setting in settings_of(frame[frame["setting"].isin(numbered)]) if numbered else ():
        tested = dense_of(setting.records)[[*OUTCOMES, "network"]].drop_duplicates()
        for n, labels, predictions, network in tested.itertuples(index=False):
            if not n or not predictions or not numbering(setting.params[0]):
                continue
            network_name = f" with {network}" if len(setting.networks) > 1 else ""
            answers, truth = numbers_of(predictions, n), numbers_of(labels, n)
            shares = np.bincount(answers, minlength=MOST_CLASSES) * np.bincount(truth, minlength=MOST_CLASSES)
            chance, right = float(shares.sum()) / n**2, int((answers == truth).sum())
            if bdtr(right, n, chance) < SURPRISING:
                lines.add(
                    f"{setting.task}, {setting.model}{network_name}: dense is right in {right} of {n} pictures, and "
                    f"chance would be {chance * n:.0f}: the class folders are probably in another order than the "
                    "head's classes; give their order with --task folder:classes=FILE"
                )
    return sorted(lines)


def failures(frame: pd.DataFrame) -> list[str]:
    """Return lines on the cells without a result, one for each task and reason."""
    bad = frame[frame["status"] != "ok"]
    counted = bad.groupby(["strategy", "task", "status", "reason", "strategy_name"], observed=True).size()
    alike = defaultdict[tuple[str, str, str, int], list[str]](list)
    for (strategy, task, status, reason, name), n in sorted(counted.items()):
        alike[task, status, reason.removeprefix(f"'{name}' ").removeprefix(f"{name}: "), n].append(strategy)
    lines = []
    for (task, status, reason, n), strategies in alike.items():
        cells = f"{n} cell{'s' if n > 1 else ''}{' each' if len(strategies) > 1 else ''}"
        lines.append(f"{', '.join(strategies)} on {task}: {cells} {status}: {reason}")
    return lines


def machines(frame: pd.DataFrame) -> list[str]:
    """Return a line if records come from several devices, machines or versions."""
    good = frame[frame["status"] == "ok"]
    hashes, devices = good["environment"].nunique(), sorted({str(device) for device in good["device"].unique()})
    differences = [f"on {', '.join(devices)}"] if len(devices) > 1 else []
    differences += [f"on {hashes} machines, or with other versions"] if hashes > 1 else []
    comparable = "only speeds on the same device, machine and versions are compared"
    return [f"made {' and '.join(differences)}: {comparable}"] if differences else []
