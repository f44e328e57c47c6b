"""The notes of a board: missing and omitted results, detectable differences, failures, results of checks."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import bdtr

from sparsebench.board.columns import TOLERANCE, over_budget
from sparsebench.board.common import PRETRAINING
from sparsebench.board.comparison import Comparison, beside_chosen, comparisons_of
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.reading import DENSE, DIFFERS, VARIANT, Flats, dense_of, frame_of
from sparsebench.errors import UserError, few
from sparsebench.plan.suite import load
from sparsebench.records import manifests
from sparsebench.records.record import canonical, numbers_of
from sparsebench.records.reports import REMARK
from sparsebench.records.store import Store
from sparsebench.records.table import OUTCOMES
from sparsebench.stats import paired
from sparsebench.strategy.spec import words_of
from sparsebench.tasks.sources.labels import MOST_CLASSES, numbering

SURPRISING = 1e-3
"""The board warns about the order of classes if so few correct answers are less probable than this by chance."""
MOST_NAMED = 5
"""Largest number of strategies or rows that a note names."""
UNKNOWN_COMMAND = "a run with the options of the others"


def notes_on(
    records: Flats, judged: Leaderboard | None = None, folder: Path | Store | None = None, *, technical: bool = True
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
    comparisons = [comparison for comparison in judged.comparisons if comparison.source != PRETRAINING]
    return [
        *_left_out_files(frame, folder),
        *_on_one_network(comparisons),
        *unequal(comparisons, folder),
        *_not_shown(comparisons),
        *_other_schedules(judged),
        *_variants(frame),
        *_over_budget(judged),
        *below_chance(frame),
        *(_technical(frame, judged) if technical else ()),
        *_wrong_cost_models(frame),
        *machines(frame),
        *failures(frame),
        *_remarks(frame),
    ]


def _other_schedules(judged: Leaderboard) -> Iterator[str]:
    """Yield a line if strategies also have rows with other schedules than the chosen ones, which are not ranked."""
    names: dict[str, None] = {}
    for ranking in judged.rankings:
        rows = ranking.every.dropna(subset="accuracy")
        names |= dict.fromkeys(rows.loc[beside_chosen(rows), "strategy"])
    if names:
        strategies = few(list(names), MOST_NAMED)
        yield f"{strategies}: also with other schedules than the chosen ones, which are not ranked"


def _left_out_files(frame: pd.DataFrame, folder: Path | Store | None) -> Iterator[str]:
    """Yield a line for each folder of pictures of which files were left out."""
    if folder is None:
        return
    settings = " ".join(frame["setting"].astype(str).unique())
    names = manifests.file_names(folder)
    for name_in_cells, line in manifests.omissions(folder):
        name = names.get(name_in_cells, name_in_cells)
        if canonical(name) in settings:
            yield f"{name}: left out: {line}"


def _on_one_network(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for comparison in comparisons:
        if comparison.lone and not comparison.has_trials:
            one = "one repetition" if comparison.is_probe else "one network"
            yield f"{comparison.task}: {one}: intervals and tests are over its test items alone"


def _not_shown(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each task with several comparisons, as a board over all tasks shows one of them."""
    for task, n in sorted(Counter(comparison.source for comparison in comparisons).items()):
        if n == 1:
            continue
        pictures = {comparison.params[0].get("images") for comparison in comparisons if comparison.source == task}
        shifts = ", and compare sets of pictures with --view shifts" if len(pictures) > 1 else ""
        others = f"{n - 1} other setting{'s' if n > 2 else ''} (data, model, size or track) not shown"
        yield f"{task}: {others}; see them with --by task{shifts}"


def _wrong_cost_models(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each model whose MACs are not those of its cost model."""
    columns = ["task", "model", "strategy", "budget", "cost_model"]
    mismatches = frame.loc[frame["cost_model"] != "", columns]
    if mismatches.empty:
        return
    mismatches = mismatches.sort_values(columns)
    for (task, model), rows in mismatches.groupby(["task", "model"], observed=True):
        n = rows["strategy"].nunique()
        strategies = "strategy" if n == 1 else "strategies"
        first = rows.iloc[0]
        yield (
            f"{model} on {task}: its cost model does not agree with the network's run for {n} {strategies}, such as "
            f"{first['strategy']}, {first['budget']}: {first['cost_model']}"
        )


def _remarks(frame: pd.DataFrame) -> Iterator[str]:
    """Yield the remarks on the checks of strategies."""
    if REMARK not in frame:
        return
    remarks = frame[["strategy", REMARK]].drop_duplicates()
    for strategy, remark in sorted(remarks.itertuples(index=False)):
        if remark:
            yield f"{strategy}: checks: {remark}"


def _variants(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each strategy that is a variant of its paper's method."""
    variants = frame.loc[frame[VARIANT] == "yes", ["strategy_name", DIFFERS]].drop_duplicates()
    for strategy, differs in sorted(variants.itertuples(index=False)):
        yield f"{strategy}: a variant, not the published method: {differs}"


def _over_budget(judged: Leaderboard) -> Iterator[str]:
    """Yield a line for each ranking with the strategies that spend more than their budget, the worst first."""
    for ranking in judged.rankings:
        rows = ranking.every.loc[over_budget(ranking.every), ["strategy", "macs_ratio", "asked"]]
        excess = (rows["macs_ratio"] / rows["asked"].astype(float)).sort_values(ascending=False)
        spent = [f"{row.strategy} {row.macs_ratio:.2f} at {row.asked:g}" for row in rows.loc[excess.index].itertuples()]
        if spent:
            rule = f"over their budget of MACs by more than {TOLERANCE:.0%}, and not among the best at it"
            yield f"{ranking.task}: {rule}: {few(spent, MOST_NAMED)}"


def _technical(frame: pd.DataFrame, judged: Leaderboard) -> Iterator[str]:
    """Yield lines on detectable differences, unfinished training, and published terms that were inactive."""
    for ranking in judged.rankings:
        pairs, quantity = (
            (ranking.pairs, "accuracy") if ranking.curves is None else (ranking.curves.pairs, "mean accuracy over MACs")
        )
        unit = "networks" if ranking.comparison.networks else "seeds"
        if (clause := paired.detectable(pairs, quantity, unit)) is not None:
            yield f"{ranking.task}: {clause}"
    is_trial = (frame["status"] == "ok") & frame["success"].notna()
    trials = frame.loc[is_trial, ["strategy", "success", "fitted"]]
    for strategy, rows in trials.groupby("strategy", observed=True):
        if n := int(((rows["success"] == 0) & (rows["fitted"] == 0)).sum()):
            reached = f"{n} of {len(rows)} trials reached the step limit"
            yield f"{strategy}: {reached} before they fitted their training samples"
    inactive = frame[["strategy", "task", "inactive"]].drop_duplicates()
    for strategy, task, note in sorted(inactive[inactive["inactive"] != ""].itertuples(index=False)):
        parts = [part.rpartition(": ") for part in note.split("; ")]
        terms = ", ".join(f"{names} ({why})" for names, _, why in parts)
        yield f"{strategy} on {task}: published terms inactive: {terms}"


# Results that not all strategies have


def unequal(comparisons: Sequence[Comparison], folder: Path | Store | None = None) -> list[str]:
    """Return for each comparison lines on the strategies that lack common results, and on those that have more.

    Each line has the command that makes them equal. It is known only if the run's folder has the results of a single
    suite.
    """
    lines = []
    for comparison in comparisons:
        common = comparison.common
        if common.lacks_dense:
            has_failed = (comparison.others["strategy"] == DENSE).any()
            state = "has no result" if has_failed else "is missing"
            lines.append(f"{comparison.task}: dense {state}, so nothing is ranked")
        elif common.cells.empty:
            command = _command(common.lack_extra, comparison, folder)
            lines.append(
                f"{comparison.task}: nothing is ranked, because dense and half of the strategies have none of the same "
                f"{_unit(comparison)}; {command} adds them"
            )
        lines += _lacking(comparison, folder)
        lines += _extra_cells(comparison, folder)
        lines += _extra_budgets(comparison, folder)
    return lines


def _lacking(comparison: Comparison, folder: Path | Store | None) -> Iterator[str]:
    """Yield a line for the strategies that lack the same common results."""
    common = comparison.common
    strategy_of = comparison.entries["strategy"]
    n_lacking = common.lacking.groupby(strategy_of).any().sum(axis=1)
    strategies_without: dict[str, list[str]] = defaultdict(list)
    for strategy, n in n_lacking.items():
        entries = strategy_of.index[strategy_of == strategy]
        budgets = {budget for entry in entries for budget in common.budgets.lacking.get(entry, ())}
        parts = [_budgets(budgets)] if budgets else []
        if n:
            parts.append(f"{n} of {len(common.cells)} {_unit(comparison)}")
        if parts:
            strategies_without[", ".join(parts)].append(strategy)
    for text, strategies in strategies_without.items():
        command = _command(strategies, comparison, folder)
        yield f"{', '.join(strategies)} on {comparison.task}: not ranked there, without {text}; {command} adds it"


def _extra_cells(comparison: Comparison, folder: Path | Store | None) -> Iterator[str]:
    """Yield a line on the cells that are not common, with the strategies that have them."""
    common = comparison.common
    if not common.extra or common.cells.empty:
        return
    by_number: dict[int, list[str]] = defaultdict(list)
    for strategy, number in common.extra.items():
        by_number[number].append(strategy)
    extra = "; ".join(f"{number} more of {', '.join(names)}" for number, names in sorted(by_number.items()))
    yield (
        f"{comparison.task}: {_unit(comparison)} that are compared: {len(common.cells)}; left out: {extra}, which "
        f"{few(common.lack_extra, MOST_NAMED)} lack; {_command(common.lack_extra, comparison, folder)} adds them"
    )


def _extra_budgets(comparison: Comparison, folder: Path | Store | None) -> Iterator[str]:
    """Yield a line on the budgets that are not common, with the strategies that have them."""
    budgets = comparison.common.budgets
    if not budgets.extra:
        return
    by_budgets: dict[str, list[str]] = defaultdict(list)
    for strategy, extra_budgets in budgets.extra.items():
        by_budgets[_budgets(extra_budgets)].append(strategy)
    extra = "; ".join(f"{text} of {', '.join(names)}" for text, names in by_budgets.items())
    over = f"over {_budgets(budgets.common)}" if budgets.common else "missing, because no budget is common"
    yield (
        f"{comparison.task}: kept accuracy is {over}; left out: {extra}, which {few(budgets.lack_extra, MOST_NAMED)} "
        f"lack; {_command(budgets.lack_extra, comparison, folder)} adds them"
    )


def _unit(comparison: Comparison) -> str:
    """Return the name of the cells of a row in a comparison."""
    if comparison.has_trials and comparison.measured["n_train"].nunique() > 1:
        return "trials"
    return "tests" if comparison.networks else "repetitions"


def _budgets(shares: Iterable[float]) -> str:
    return ", ".join(f"macs {share:g}" for share in sorted(shares, reverse=True))


def _command(strategies: Sequence[str], comparison: Comparison, folder: Path | Store | None) -> str:
    """Return the command that runs strategies like the others, if the run's folder has a single suite.

    It has the number of repetitions if some strategies have more than the suite asks for.
    """
    suites = {suite.name for suite in manifests.suites(folder)} - {manifests.OWN} if folder else set()
    if folder is None or len(suites) != 1:
        return UNKNOWN_COMMAND
    (suite,) = suites
    files = {strategy.name: strategy.file for strategy in manifests.strategies(folder).values() if strategy.file}
    entries = comparison.every.drop_duplicates("strategy").set_index("strategy")
    words = []
    for strategy in strategies:
        name, params = entries.loc[strategy, ["strategy_name", "strategy_params"]]
        try:
            words.append(files.get(name, name) + words_of(json.loads(params)))
        except UserError:  # a parameter that cannot be typed
            return UNKNOWN_COMMAND
    words += ["--suite", suite]
    repetitions = int(comparison.measured["repetition"].max()) + 1
    if repetitions > _repetitions_of(suite, comparison.source):
        words += ["--seeds", str(repetitions)]
    return f"`sparsebench run {shlex.join(words)} --out FOLDER` with this folder and the run's other options"


def _repetitions_of(suite: str, task: str) -> float:
    """Return the number of repetitions of a task in a suite; infinity if this installation lacks the suite."""
    try:
        loaded = load(suite)
    except UserError:
        return math.inf
    return max((entry.seeds or loaded.seeds for entry in loaded.task if entry.name == task), default=math.inf)


# Doubts about records


def below_chance(frame: pd.DataFrame) -> list[str]:
    """Return a line for each network in which dense is correct significantly less often than chance.

    Only class folders are tested, as their numbers may be in another order than the classes of the head. Chance is the
    expected accuracy if answers and labels are independent. A network that always gives the same answer, or only
    answers that no folder has, is thus at chance. The test is an exact one-sided binomial test.
    """
    with_labels = [text for text in frame["setting"].unique() if '"labels":' in str(text)]
    if not with_labels:
        return []
    lines = set()
    for comparison in comparisons_of(frame[frame["setting"].isin(with_labels)]):
        if not numbering(comparison.params[0]):
            continue
        tests = dense_of(comparison.records)[[*OUTCOMES, "network"]].drop_duplicates()
        for n, labels, predictions, network in tests.itertuples(index=False):
            if not n or not predictions:
                continue
            answers = numbers_of(predictions, n)
            truth = numbers_of(labels, n)
            right = int((answers == truth).sum())
            shares = np.bincount(answers, minlength=MOST_CLASSES) * np.bincount(truth, minlength=MOST_CLASSES)
            chance = float(shares.sum()) / n**2
            if bdtr(right, n, chance) < SURPRISING:
                network_name = f" with {network}" if len(comparison.networks) > 1 else ""
                lines.add(
                    f"{comparison.task}, {comparison.model}{network_name}: dense is right in {right} of {n} pictures, "
                    f"and chance would be {chance * n:.0f}: the class folders are probably in another order than the "
                    "head's classes; give their order with --task folder:classes=FILE"
                )
    return sorted(lines)


def failures(frame: pd.DataFrame) -> list[str]:
    """Return lines on the cells without a result, one for each task and reason."""
    columns = ["strategy", "task", "status", "reason", "strategy_name"]
    bad = frame.loc[frame["status"] != "ok", columns]
    if bad.empty:
        return []
    counted = bad.groupby(columns, observed=True).size()
    strategies_of: dict[tuple[str, str, str, int], list[str]] = defaultdict(list)
    for (strategy, task, status, reason, name), n in sorted(counted.items()):
        # Without the name, the reasons of several strategies are equal.
        reason = reason.removeprefix(f"'{name}' ").removeprefix(f"{name}: ")
        strategies_of[task, status, reason, n].append(strategy)
    lines = []
    for (task, status, reason, n), strategies in strategies_of.items():
        cells = f"{n} cell{'s' if n > 1 else ''}{' each' if len(strategies) > 1 else ''}"
        lines.append(f"{', '.join(strategies)} on {task}: {cells} {status}: {reason}")
    return lines


def machines(frame: pd.DataFrame) -> list[str]:
    """Return a line if records come from several devices, machines or versions."""
    good = frame.loc[frame["status"] == "ok", ["device", "environment"]]
    devices = sorted({str(device) for device in good["device"].unique()})
    n_machines = good["environment"].nunique()
    differences = []
    if len(devices) > 1:
        differences.append(f"on {', '.join(devices)}")
    if n_machines > 1:
        differences.append(f"on {n_machines} machines, or with other versions")
    if not differences:
        return []
    comparable = "only speeds on the same device, machine and versions are compared"
    return [f"made {' and '.join(differences)}: {comparable}"]
