"""Views of a board: best strategies, all strategies, pairs, equal cost, sets of pictures, the table of a paper."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board import at_loss, patches, probes
from sparsebench.board.columns import (
    BY_KEY,
    BY_TASK,
    TOLERANCE,
    WORDS,
    Column,
    Row,
    accuracy_at,
    dicts,
    interval_row,
    keys_of,
    over_budget,
    rank_text,
    text_of,
)
from sparsebench.board.comparison import Comparison, about, about_relevant, items_of
from sparsebench.board.gaps import gaps_over_budgets
from sparsebench.board.judge import AMOUNT, RANDOM_TOKENS, Leaderboard, Ranking, random_tokens_of
from sparsebench.board.over_budgets import Curves
from sparsebench.board.ranks import in_order
from sparsebench.board.reading import DENSE, SEED, over_seeds, speed_ups
from sparsebench.board.tables import Report, Table, strategies_of
from sparsebench.errors import UserError, few, plain, reason_of, unknown
from sparsebench.records.table import ITEMS
from sparsebench.stats import paired

MARKS = {
    paired.BETTER: "significantly better",
    paired.NOT_SIGNIFICANT: "not significantly different",
    paired.WORSE: "significantly worse",
}
"""The values of `versus_random`, and their words in a sentence."""
REFERENCES = {"random": "random tokens at the input", "random_inside": "random tokens inside the network"}
"""The strategies that drop random tokens, and their words in a sentence."""
MOST_TIED_NAMED = 3
"""Largest number of tied strategies that are named; the others are counted."""
LEGEND = (
    "Differences and ratios are to dense unless another reference is named.",
    "Oracles see the relevance mask and are not ranked.",
)
NEAR = 0.001
"""An accuracy at most this far below dense counts as equal: a tenth of a point."""
MOST_NAMED = 5
"""Largest number of strategies that notes on the table of a paper name."""
GAPS = (
    *(BY_KEY[key] for key in ("strategy", "budget", "aligned_gap", "aligned_gap_reduction", "worst_group_accuracy")),
    BY_KEY["spurious_gap"],
    Column("accuracy_with_gap", "accuracy", "percent", "test accuracy in this task"),
)
TRIALS = (
    *(BY_KEY[key] for key in ("strategy", "budget", "sample_complexity", "sample_complexity_ratio")),
    BY_KEY["sample_complexity_loss"],
)
"""Columns of the separate tables of gaps and trials below a board over several budgets."""
BEST = (
    Column("budget", "MACs / dense", "text", ""),
    Column(
        "best",
        "most accurate",
        "text",
        f"without baselines and strategies that spend over {TOLERANCE:.0%} more than the budget; - if none is left",
    ),
    BY_KEY["accuracy"]._replace(what="", interval=False),
    BY_KEY["accuracy_delta"]._replace(what=""),
    Column(
        "random",
        "random tokens",
        "percent",
        "accuracy of random tokens at the same budget, dropped at the input or inside the network, where it is higher",
    ),
    BY_KEY["random_delta"]._replace(heading="gain over them", what=""),
    BY_KEY["speed_up"],
    Column(
        "equal",
        "statistically tied with it",
        "text",
        "other strategies at this budget that none is significantly better than, the most accurate first; baselines "
        "are left out; corrected for all pairs of rows",
    ),
)
"""Columns of the table of the best strategies at each budget."""
PAPER = (
    *(column._replace(tables=False) for column in (*BY_TASK, BY_KEY["strategy"], BY_KEY["budget"])),
    Column("method", "method", "text", "strategy, with the parts of its budget other than the share of dense MACs"),
    BY_KEY["macs_ratio"]._replace(heading="MACs/dense"),
    Column("macs", "GMACs", "giga", "realised MACs of one test image"),
    Column("parameters", "params, M", "mega", "parameters of the network, including those that the strategy learns"),
    BY_KEY["accuracy"]._replace(heading="top-1", interval=False),
    Column("accuracy_top5", "top-5", "percent", "share of images with their class among the top five, mean over seeds"),
    BY_KEY["accuracy_delta"],
    BY_KEY["images_per_s"],
    BY_KEY["speed_up"],
)
"""Columns of the table of a paper."""
BY_BUDGET = [BY_KEY["strategy"], BY_KEY["budget"]]
PAIRS = (
    Column("task", "task", "text", "name of the task"),
    Column("strategy", "strategy", "text", "the strategy with the higher accuracy"),
    Column("budget", "budget", "text", "its budget"),
    Column("other", "against", "text", "the other strategy"),
    Column("other_budget", "its budget", "text", "budget of the other strategy"),
    Column("difference", "difference", "points", "difference of their accuracies, mean over common seeds", True),
    Column("p", "p", "p", "larger of p items and p seeds, corrected by Holm's method for all pairs of the task"),
    Column(
        "p_items",
        "p items",
        "p",
        "would these networks differ on other items? McNemar's exact test unless items share foregrounds",
    ),
    Column("p_seeds", "p seeds", "p", "would networks of other seeds differ on other items? Student's t"),
    Column(
        "overdispersion",
        "overdispersion",
        "ratio",
        "variance over seeds divided by the variance that items explain, pooled over all rows",
    ),
    Column("told", "differs", "text", "yes if p is 0.05 or less: the difference is significant"),
    Column("n_seeds", "seeds", "count", "common repetitions"),
)
MATCHED = (
    Column("matched", "matched", "text", "what the rows have in common: cost or accuracy"),
    Column("task", "task", "text", "name of the task"),
    *(BY_KEY[key] for key in ("rank", "strategy", "kind", "budget", "macs_ratio", "accuracy", "accuracy_delta")),
)
LEGEND_OF_MATCHED = (
    f"At equal cost: rows whose realised MACs are within {TOLERANCE:.0%} of each other, ranked among themselves.",
    f"At equal accuracy: for each strategy the row with the fewest MACs, fewer than dense, that is at most "
    f"{100 * NEAR:g} points below dense; - if there is none. Nothing is interpolated.",
)
LEFT_OUT = "rows of other strategies are left out; ranks and significance are those of the whole board"
TIMES = "speed.jsonl"
COLUMNS_OF_TIMES = (
    "network",
    "strategy",
    "budget",
    "mode",
    "precision",
    "device",
    "batch",
    "macs",
    "macs_ratio",
    "latency",
    "images_per_s",
    "speed_up",
    "memory",
)
"""The file that `sparsebench speed` writes, and the columns that are read from it."""
TIMED = (
    *PAPER,
    Column("latency", "ms at batch 1", "times", "median time of one image, in milliseconds"),
    Column("memory", "peak GB", "giga", "peak GPU memory at the batch size of images/s"),
)
"""Columns of the table of a paper with times of `sparsebench speed`."""


def report(judged: Leaderboard, notes: Sequence[str] = (), *, whole: bool = True) -> Report:
    """Return the tables and notes of a leaderboard.

    Args:
        judged: the leaderboard; files for programs have all its rows.
        notes: lines below the tables.
        whole: whether it begins with a description of the data and the best strategies at each budget.
    """
    tables, others = list[Table](), list[Row]()
    for ranking in judged.rankings:
        title = ranking.comparison.title if judged.by_task else ""
        if whole and (ranking.curves is not None or not judged.by_task):
            tables.append(best(ranking, title))
        if ranking.curves is None:
            others += dicts(ranking.every)
        else:
            title = ", ".join(filter(None, ("All strategies" if whole else "", title)))
            tables += _of_curves(ranking, ranking.curves, judged, title)
    several = judged.over_budgets is not None
    if others or not several:
        title = "Other tasks" if several else "All strategies" if tables else ""
        tables.append(Table(others, judged.columns, title, legend=LEGEND, explained=True))
    tables += _of_probes(judged)
    tables += _of_patches(judged)
    for ranking in judged.sections:
        tables += _of_section(ranking, judged, whole)
    return Report(tables, _data(judged), notes)


def _data(judged: Leaderboard) -> Table:
    """Return the table for programs. A board with sections names the task of each row."""
    if not judged.sections:
        return Table(dicts(judged.rows), judged.columns)
    rows = dicts(judged.rows)
    for ranking in judged.sections:
        rows += dicts(ranking.every)
    return Table(rows, [*BY_TASK, *judged.columns])


def _of_section(ranking: Ranking, judged: Leaderboard, whole: bool) -> list[Table]:
    """Return the tables of the main task with other parameters: the best strategies, and all of them."""
    setting = ", ".join(filter(None, (ranking.task, about_relevant(ranking.comparison))))
    title = f"Task {setting}"
    tables = [best(ranking, title)] if whole else []
    if ranking.curves is None:
        table = Table(dicts(ranking.every), judged.columns, title, legend=LEGEND)
    else:
        table = Table(dicts(ranking.curves.rows), _columns_of_curves(ranking, ranking.curves, judged), title)
    return [*tables, table._replace(title=f"All strategies, task {setting}" if whole else title, main=False)]


def best(ranking: Ranking, title: str = "") -> Table:
    """Return a description of data and networks, with the most accurate and the tied strategies at each budget."""
    every = dicts(ranking.every)
    no_gain = dict.fromkeys(BY_KEY["accuracy_delta"].keys)
    rows = [{**row, **no_gain, "budget": "1", "best": DENSE} for row in every if row["strategy"] == DENSE]
    rows += _best_at_budgets(ranking)
    devices = {row["device"] for row in every} - {None}
    where = ", ".join(["on the same machine", *sorted(devices)])
    speed = f"images/s divided by dense's {where}; - is not measured"
    columns = [column._replace(what=speed) if column.key == "speed_up" else column for column in BEST]
    return Table(
        rows,
        columns,
        title,
        above=about(ranking.comparison),
        below=against_random(ranking),
        legend=_variants(ranking, rows),
        main=False,
        explained=True,
    )


def _variants(ranking: Ranking, rows: Sequence[Row]) -> list[str]:
    """Return a sentence that names the variants of published methods among the most accurate, if there are any."""
    every = ranking.every
    variants = set(every.loc[every["variant"] == "yes", "strategy"])
    names = [name for name in dict.fromkeys(row["best"] for row in rows) if name in variants]
    return [plain(f"Not exactly the published method (variant): {', '.join(names)}.", 1000)] if names else []


def _best_at_budgets(ranking: Ranking) -> list[Row]:
    """Return a row for each budget: the most accurate strategy, and those that are statistically tied with it."""
    ranked = dicts(ranking.rows)
    over = over_budget(ranking.rows).tolist()
    random_tokens = [k for k, row in enumerate(ranked) if row["strategy"] in RANDOM_TOKENS and not over[k]]
    candidates: dict[tuple[float, str], list[int]] = {}
    for place, (row, is_over) in enumerate(zip(ranked, over, strict=True)):
        budget = _budget_of(row)
        if row["kind"] == "deployable":
            # A budget that all strategies exceed has a row too, without a strategy.
            candidates.setdefault(budget, [])
            if not is_over:
                candidates[budget].append(place)
    rows = []
    for (share, label), places in sorted(candidates.items()):
        leaders = _unbeaten(ranking.pairs, places, ranked)
        best: Row = {}
        if leaders:
            amount = _amount_of(ranked[leaders[0]])
            randoms = [place for place in random_tokens if _amount_of(ranked[place]) == amount]
            best = ranked[leaders[0]] | _gain_over_random(ranking.pairs, leaders[0], ranked, randoms)
        names = [ranked[place]["strategy"] for place in leaders]
        best |= {"budget": label or f"{-share:g}", "best": names[0] if names else None}
        rows.append(best | {"equal": few(names[1:], MOST_TIED_NAMED), "n_equal": len(names[1:])})
    return rows


def _unbeaten(pairs: paired.Pairs, places: Sequence[int], ranked: Sequence[Row]) -> list[int]:
    """Return the places of the rows that no other is significantly better than, the most accurate first."""
    better = pairs.among(places).better()
    unbeaten = [place for k, place in enumerate(places) if not better[:, k].any()]
    return sorted(unbeaten, key=lambda place: -ranked[place]["accuracy"])


def _amount_of(row: Row) -> tuple[Any, ...]:
    """Return what the budget of a row is, apart from blocks and schedule."""
    return tuple(row[key] for key in AMOUNT)


def _gain_over_random(pairs: paired.Pairs, place: int, ranked: Sequence[Row], randoms: Sequence[int]) -> Row:
    """Return the gain of a row over the most accurate of the rows of random tokens, and the accuracy of that one."""
    comparable = [random for random in randoms if not math.isnan(pairs.mean[place, random])]
    if not comparable:
        return {"random": None} | interval_row("random_delta", None)
    random = max(comparable, key=lambda random: -pairs.mean[place, random])
    mean = float(pairs.mean[place, random])
    half = float(pairs.half[place, random])
    value, low, high = np.clip([mean, mean - half, mean + half], -1, 1).tolist()
    return {"random": ranked[place]["accuracy"] - mean} | interval_row("random_delta", (value, low, high))


def against_random(ranking: Ranking) -> str:
    """Return a sentence that compares the only strategy of a ranking, besides baselines, with random tokens.

    Differences and their significance are those of the columns `random_delta` and `versus_random`. Rows over their
    budget are left out. "" if there are several strategies, or none, or no comparison.
    """
    every, delta = ranking.every, BY_KEY["random_delta"]
    is_compared = (every["kind"] == "deployable") & every["accuracy"].notna()
    if every.loc[is_compared, "strategy"].nunique() != 1:
        return ""
    rows = every.loc[is_compared, ["strategy", "site", "budget", "asked", "macs_ratio", "versus_random", *delta.keys]]
    rows = rows[~over_budget(rows)].sort_values(["asked", "budget"], ascending=[False, True])
    clauses = []
    for mark, words in MARKS.items():
        with_mark = dicts(rows[rows["versus_random"] == mark])
        budgets = [f"at {row['budget']} ({text_of(row, delta)} points)" for row in with_mark]
        if budgets:
            clauses.append(f"{words} {', '.join(budgets)}")
    if not clauses:
        return ""
    name = rows["strategy"].iloc[0]
    random = random_tokens_of(rows["site"].iloc[0])
    sentence = f"{name} against {REFERENCES[random]} ({random}): {'; '.join(clauses)}."
    about_intervals = ", 95 % intervals in [ ] are not" if rows[delta.keys[1]].notna().any() else ""
    rule = f"Tests are corrected for all differences to random tokens{about_intervals}."
    return plain(f"{sentence} {rule}", 1000)


def _budget_of(row: Row) -> tuple[float, str]:
    """Return a key to sort budgets: the negated share of dense MACs, or the label of another budget."""
    return (0.0, row["budget"]) if row["asked"] is None else (-row["asked"], "")


def _of_curves(ranking: Ranking, board: Curves, judged: Leaderboard, title: str) -> list[Table]:
    """Return the table with a row for each strategy, and the tables of gaps and trials, if any."""
    legend = [*LEGEND]
    beyond = (ranking.every["accuracy"].notna() & ranking.every["curve"].isna()).sum()
    if beyond:
        legend.append(f"{beyond} rows have budgets that are no shares of dense MACs; CSV and JSON have them.")
    columns = _columns_of_curves(ranking, board, judged)
    tables = [Table(dicts(board.rows), columns, title, legend=legend, explained=True)]
    # Dense comes first, oracles come last.
    rows = dicts(ranking.every.sort_index())
    rows.sort(key=lambda row: (row["kind"] == "oracle", row["strategy"] != DENSE))
    gaps = gaps_over_budgets(ranking.every)
    with_gaps: Sequence[Row] = [row for row in rows if row.get("accuracy_with_gap") is not None]
    with_trials: Sequence[Row] = [row for row in rows if row.get("sample_complexity") is not None]
    columns_of_gaps = GAPS
    if gaps is not None:
        with_gaps, columns_of_gaps = dicts(gaps.rows), gaps.columns
    for heading, quantity, measured, of_part in (
        ("Spurious correlations", "aligned_gap", with_gaps, columns_of_gaps),
        ("Sample complexity", "sample_complexity", with_trials, TRIALS),
    ):
        if not measured:
            continue
        # The columns of a board over all tasks name the task that they were taken from.
        tasks = [column.task for column in judged.columns if column.key == quantity and column.task]
        task = tasks[0] if tasks else ranking.task
        tables.append(Table(measured, of_part, f"{heading}, task {task}", main=False, explained=True))
    return tables


def _of_probes(judged: Leaderboard) -> list[Table]:
    """Return the tables of probes: images to target and neighbours, and accuracies by number of training images."""
    tables = []
    for ranking in judged.rankings:
        comparison = ranking.parts.get(probes.PART)
        if comparison is None:
            continue
        every = probes.in_order_of_table(ranking.every)
        rows = dicts(every.assign(entry=every.index))
        about_task = f"task {comparison.task}"
        title = f"Probes with {comparison.largest} training images, {about_task}"
        tables.append(Table(rows, probes.OF_LARGEST, title, main=False, explained=True))
        title = f"Sample complexity: images to target, {about_task}"
        tables.append(Table(rows, probes.COLUMNS, title, main=False, explained=True))
        for metric, (kind, _) in probes.KINDS.items():
            of_sizes, columns = probes.by_size(comparison, rows, metric)
            title = f"{kind} by training images, {about_task}"
            tables.append(Table(of_sizes, columns, title, main=False, explained=True))
    return tables


def _of_patches(judged: Leaderboard) -> list[Table]:
    """Return the tables of predicted patches."""
    tables = []
    for ranking in judged.rankings:
        comparison = ranking.parts.get(patches.PART)
        if comparison is not None:
            rows = dicts(patches.in_order_of_table(ranking.every))
            tables.append(
                Table(rows, patches.COLUMNS, f"Predicted patches, task {comparison.task}", main=False, explained=True)
            )
    return tables


def _columns_of_curves(ranking: Ranking, board: Curves, judged: Leaderboard) -> list[Column]:
    """Return the columns of the table with a row for each strategy.

    Columns of one budget only are those of the budget nearest to one half; their headings name it.
    """
    suffix = accuracy_at(board.middle).heading
    ranks = (
        "by kept accuracy; 3-9: two strategies are significantly better than it, six do not differ significantly from "
        "it, and all others are worse; dense has no rank"
    )
    columns = [
        BY_KEY["rank"]._replace(what=ranks),
        BY_KEY["strategy"],
        BY_KEY["variant"],
        BY_KEY["how"],
        BY_KEY["kept_accuracy"],
        BY_KEY["macs_at_2"],
        *map(accuracy_at, board.budgets),
        BY_KEY["random_delta"]._replace(heading=f"{BY_KEY['random_delta'].heading} {suffix}"),
        BY_KEY["versus_random"],
        BY_KEY["selection_auroc"]._replace(heading=f"AUROC {suffix}"),
    ]
    declared = [column for column in judged.columns if column.key not in BY_KEY and column.task in ("", ranking.task)]
    for column in (BY_KEY["speed_up"], BY_KEY["p_label"], *declared):
        heading = column.heading if column.shown in WORDS else f"{column.heading} {suffix}"
        columns.append(column._replace(heading=heading))
    if board.rows["n_seeds"].nunique() > 1:
        columns.append(BY_KEY["n_seeds"])
    columns += [BY_KEY["checks"], BY_KEY["badge"]]
    return columns


def only(report: Report | Table, strategies: Sequence[str]) -> Report:
    """Return a report with the rows of some strategies, and of dense. Ranks and significance stay as they are.

    Raises:
        UserError: a strategy has no row.
    """
    if isinstance(report, Table):
        report = Report([report], report)
    tables = [*report.tables, report.data]
    names: list[str] = []
    for table in tables:
        for row in table.rows:
            names += strategies_of(row)
    check_names(strategies, names)
    parts = []
    for table in tables:
        rows = [row for row in table.rows if all(is_chosen(name, strategies) for name in strategies_of(row))]
        parts.append(table._replace(rows=rows))
    return Report(parts[:-1], parts[-1], [*report.notes, LEFT_OUT])


def check_names(strategies: Sequence[str], available: Iterable[str]) -> None:
    """Raise UserError if one of the strategies is not available."""
    labels = sorted(set(available))
    for name in strategies:
        if name not in labels and not any(label.startswith(f"{name} ") for label in labels):
            raise unknown("strategy in the table", name, labels)


def is_chosen(label: str, strategies: Sequence[str]) -> bool:
    """Return whether a row's label is dense or one of the strategies; the rest of a budget may follow their names."""
    return label == DENSE or any(label == name or label.startswith(f"{name} ") for name in strategies)


def pairs(rankings: Iterable[Ranking]) -> Table:
    """Return a row for each pair of ranked rows of each task, by rising p."""
    rows = pd.concat([pd.DataFrame(columns=keys_of(PAIRS)), *map(_pairs, rankings)])
    names = ["strategy", "budget", "other", "other_budget"]
    rows = rows.assign(unsure=rows["p"].fillna(2), down=-rows["difference"])
    return Table(dicts(rows.sort_values(["task", "unsure", "down", *names])[keys_of(PAIRS)]), PAIRS, explained=True)


def _pairs(ranking: Ranking) -> pd.DataFrame:
    i, j = np.triu_indices(len(ranking.rows), 1)
    measured = ~np.isnan(ranking.pairs.mean[i, j])
    turned = ranking.pairs.mean[i, j] < 0
    i, j = np.where(turned, j, i)[measured], np.where(turned, i, j)[measured]
    mean, half = ranking.pairs.mean[i, j], ranking.pairs.half[i, j]
    numbers = {
        key: getattr(ranking.pairs, key)[i, j] for key in ("p", "p_items", "p_seeds", "overdispersion", "n_seeds")
    }
    strategy, budget = (ranking.rows[name].to_numpy() for name in ("strategy", "budget"))
    return pd.DataFrame(
        {
            "task": ranking.task,
            "strategy": strategy[i],
            "budget": budget[i],
            "other": strategy[j],
            "other_budget": budget[j],
            "difference": mean,
            "difference_low": np.maximum(mean - half, -1),
            "difference_high": np.minimum(mean + half, 1),
            **numbers,
            "told": np.where(ranking.pairs.better()[i, j], "yes", "no"),
        }
    )


def matched(rankings: Sequence[Ranking], loss: float = at_loss.LOSS, speed: Path | None = None) -> Report:
    """Return the rows of each task at equal cost, those at equal accuracy, and what each strategy costs at a loss.

    Args:
        rankings: the rankings of a board.
        loss: points of accuracy below dense.
        speed: a folder of `sparsebench speed`, from which images/s are taken in place of those of records.

    Raises:
        UserError: the folder has no times.
    """
    parts = [
        part.assign(task=ranking.task)
        for ranking in rankings
        for part in (_at_equal_cost(ranking), _at_equal_accuracy(ranking))
    ]
    rows = pd.concat([pd.DataFrame(columns=keys_of(MATCHED)), *parts])
    table = Table(dicts(rows[keys_of(MATCHED)]), MATCHED, legend=LEGEND_OF_MATCHED)

    times = None if speed is None else _read_times(speed)
    tables = [table]
    notes = []
    for ranking in rankings:
        apart = _times_apart(ranking, times)
        at_equal_loss = at_loss.table_of(ranking, loss, apart)
        if at_equal_loss is not None:
            tables.append(at_equal_loss._replace(main=False))
        if times is not None and apart is None:
            notes.append(f"{plain(str(speed))} has no times of {ranking.comparison.title}; those of records are shown.")
    if len(tables) == 1:
        notes.append("No MACs at a loss: they need dense and a strategy at two shares of dense MACs.")
    columns: dict[str, Column] = {}
    for one in tables:
        for column in one.columns:
            columns.setdefault(column.key, column)
    data = Table([row for one in tables for row in one.rows], list(columns.values()))
    return Report(tables, data, notes)


def _times_apart(ranking: Ranking, times: pd.DataFrame | None) -> at_loss.Times | None:
    """Return the times of `sparsebench speed` for the rows of a ranking; None without times of dense."""
    if times is None:
        return None
    network, precision = _network_of(ranking.comparison)
    of_rows = _times_of(ranking.every, times, network, precision)
    batches = of_rows.loc[of_rows["strategy"] == DENSE, "batch"]
    if batches.empty:
        return None
    batch = int(batches.max())
    return at_loss.Times(_speeds_at(of_rows, batch), _speeds_at(of_rows, 1), batch)


def _speeds_at(times: pd.DataFrame, batch: int) -> dict[tuple[str, str], float]:
    """Return images/s at a batch size, by strategy and budget."""
    of_batch = times.loc[times["batch"] == batch, ["strategy", "budget", "images_per_s"]]
    return {(row.strategy, row.budget): row.images_per_s for row in of_batch.itertuples()}


def _at_equal_cost(ranking: Ranking) -> pd.DataFrame:
    """Return groups of two or more rows whose costs are within TOLERANCE of the smallest of the group."""
    costs = ranking.rows["macs_ratio"].to_numpy(float)
    groups: list[list[int]] = []
    for place in np.argsort(costs, kind="stable")[: (~np.isnan(costs)).sum()].tolist():
        if groups and costs[place] <= costs[groups[-1][0]] * (1 + TOLERANCE):
            groups[-1].append(place)
        else:
            groups.append([place])
    parts = [ranking.rows[:0].assign(matched="")]
    for places in (group for group in groups if len(group) > 1):
        ranks = _texts_of_ranks(ranking.pairs.among(places))
        label = f"at {np.mean(costs[places]):.2f} of dense MACs"
        parts.append(ranking.rows.iloc[places].assign(matched=label, rank=ranks))
    rows = pd.concat(parts)
    rows["down"] = -rows["accuracy"]
    return rows.sort_values(["matched", "down", "strategy", "budget"])


def _at_equal_accuracy(ranking: Ranking) -> pd.DataFrame:
    """Return for each strategy the cheapest row that is as accurate as dense, or a row without numbers."""
    is_dense = ranking.rows["strategy"] == DENSE
    if not is_dense.any():
        return ranking.rows[:0]
    others = ranking.rows[~is_dense].sort_values(["macs_ratio", "budget"])
    least = ranking.rows.loc[is_dense, "accuracy"].iloc[0] - NEAR
    as_good = (others["macs_ratio"] < 1) & (others["accuracy"] >= least)
    rows = pd.concat([others[as_good], others[["strategy", "kind"]]]).drop_duplicates("strategy")
    return rows.assign(matched="at dense accuracy", rank="").sort_values(["macs_ratio", "strategy"])


def shifts(rankings: Iterable[Ranking]) -> Report:
    """Return a table for each network, with accuracy and rank on each set of pictures by strategy and budget.

    Sets are ordered by falling accuracy of the dense network; the others are shifts of the first. Ranks are among the
    strategies of a budget that have a rank on every set. The legend has the rank correlation of each shifted set with
    the first.

    Args:
        rankings: a ranking for each set and network.
    """
    networks: dict[tuple[str, str], list[Ranking]] = defaultdict(list)
    for ranking in rankings:
        params = {
            key: value for key, value in ranking.comparison.params[0].items() if key not in ("images", "among", "head")
        }
        networks[ranking.comparison.model, json.dumps(params, sort_keys=True)].append(ranking)
    tables = [_shift(sets) for sets in networks.values()]
    return Report(tables, Table([row for table in tables for row in table.rows], tables[0].columns if tables else ()))


def _shift(sets: list[Ranking]) -> Table:
    """Return the table of one network. The sets have numbers by falling accuracy of dense, from 0."""
    sets = sorted(sets, key=lambda ranking: -ranking.rows.loc[ranking.rows["strategy"] == DENSE, "accuracy"].max())
    names = [ranking.comparison.params[0].get("images", ranking.task) for ranking in sets]
    columns = [*BY_BUDGET]
    for number, name in enumerate(names):
        ranks = f"possible ranks on {name}, among the strategies of the budget on all sets"
        columns.append(Column(f"accuracy_{number}", name, "percent", f"accuracy on {name}"))
        columns.append(Column(f"rank_{number}", "rank", "text", ranks))

    rows = _rows_on_sets(sets)
    rows = rows.assign(other=rows["strategy"] != DENSE, down=-rows["accuracy_0"])
    rows = rows.sort_values(["other", "budget", "down"])
    legend = []
    correlations = _rank_correlations(rows[rows["other"]], names)
    if correlations:
        legend.append(correlations)
    if len({tuple(ranking.comparison.seeds) for ranking in sets}) > 1:
        tests = [f"{len(ranking.comparison.seeds)} on {name}" for ranking, name in zip(sets, names, strict=True)]
        legend.append(f"The sets were tested with other networks or seeds: {', '.join(tests)}.")
    tasks = dict.fromkeys(ranking.task for ranking in sets)
    above = f"{sets[0].comparison.model} on {', '.join(tasks)}"
    return Table(dicts(rows[keys_of(columns)]), columns, above=above, legend=legend)


def _rows_on_sets(sets: Sequence[Ranking]) -> pd.DataFrame:
    """Return a row for each budget and strategy, with `accuracy_k` and `rank_k` on set k."""
    entries = [pd.MultiIndex.from_frame(ranking.rows[["budget", "strategy"]]) for ranking in sets]
    on_all = reduce(pd.MultiIndex.intersection, entries)
    parts = []
    for number, (ranking, of_set) in enumerate(zip(sets, entries, strict=True)):
        values = {
            f"accuracy_{number}": ranking.rows["accuracy"].to_numpy(),
            f"rank_{number}": _ranks_of_budgets(ranking, of_set.isin(on_all)).to_numpy(),
        }
        parts.append(pd.DataFrame(values, of_set))
    return pd.concat(parts, axis=1).reset_index()


def _ranks_of_budgets(ranking: Ranking, on_all: np.ndarray) -> pd.Series:
    """Return the ranks of the rows that are on all sets, within each budget; "" for other rows and for dense."""
    ranks = pd.Series("", ranking.rows.index)
    budgets = ranking.rows["budget"].where(on_all)
    for places in ranking.rows.groupby(budgets).indices.values():
        ranks.iloc[places] = _texts_of_ranks(ranking.pairs.among(places))
    return ranks.mask(ranking.rows["strategy"] == DENSE, "")


def _texts_of_ranks(pairs: paired.Pairs) -> list[str]:
    return [rank_text(low, high) for low, high in pairs.ranks()]


def _rank_correlations(rows: pd.DataFrame, names: Sequence[str]) -> str:
    """Return a sentence with the rank correlation of each other set with the first; "" if there is none.

    It is a mean over the budgets with three or more strategies.

    Args:
        rows: a row for each strategy and budget without dense, with the accuracy on set k in column `accuracy_k`.
        names: the names of the sets.
    """
    budgets = [part for _, part in rows.groupby("budget") if len(part) >= 3]
    if not budgets:
        return ""
    taus = {}
    for number, name in enumerate(names):
        if number > 0:
            of_budgets = [part[f"accuracy_{number}"].corr(part["accuracy_0"], method="kendall") for part in budgets]
            taus[name] = np.mean(of_budgets)
    texts = [f"{name} {tau:.2f}" for name, tau in taus.items() if not math.isnan(tau)]
    if not texts:
        return ""
    over = f"mean over {len(budgets)} budgets" if len(budgets) > 1 else "one budget"
    return f"Rank correlation with {names[0]} (Kendall's tau of the accuracies, {over}): {'; '.join(texts)}."


def paper(rankings: Sequence[Ranking], speed: Path | None = None, strategies: Sequence[str] = ()) -> Report:
    """Return the table of a paper for each ranking: dense, then the strategies by budget, the most accurate first.

    Args:
        rankings: rankings of a board.
        speed: a folder of `sparsebench speed`, from which images/s, speed-up, latency and peak memory are taken.
            Images/s and memory are those of the largest batch at which the dense network has times. The speeds of
            records are then not used, as other worker processes may have run at the same time.
        strategies: the only strategies of the table, besides dense; all if empty.

    Raises:
        UserError: the folder has no times, a strategy is not ranked, or none is.
    """
    rankings = [ranking for ranking in rankings if len(ranking.rows)]
    if not rankings:
        raise UserError(
            "no strategy is ranked, so the table of a paper has no rows",
            next_step="`sparsebench leaderboard FOLDER` says what is missing",
        )
    if strategies:
        check_names(strategies, [name for ranking in rankings for name in ranking.rows["strategy"]])
        rankings = [_only_rows(ranking, strategies) for ranking in rankings]
    times = None if speed is None else _read_times(speed)
    tables = [_paper_of(ranking, times, speed) for ranking in rankings]
    notes = []
    for ranking in () if strategies else rankings:
        tested = ranking.comparison.every.loc[np.unique(ranking.comparison.tested["entry"]), "strategy"]
        missing = tested[~tested.isin(ranking.rows["strategy"])].unique().tolist()
        if missing:
            notes.append(f"not in the table, as they are oracles or not ranked: {few(missing, MOST_NAMED, 100)}")
    columns = PAPER if speed is None else TIMED
    data = Table([row for table in tables for row in table.rows], columns)
    return Report(tables or [Table([], columns)], data, notes)


def _only_rows(ranking: Ranking, strategies: Sequence[str]) -> Ranking:
    """Return a ranking with the rows of some strategies, and of dense."""
    mask = ranking.rows["strategy"].map(lambda name: is_chosen(name, strategies)).astype(bool)
    return ranking._replace(rows=ranking.rows[mask])


def _read_times(speed: Path) -> pd.DataFrame:
    """Return the times in a folder of `sparsebench speed`, without those of compiled networks.

    Raises:
        UserError: the folder has no times.
    """
    try:
        times = pd.read_json(speed / TIMES, lines=True, dtype=False)[list(COLUMNS_OF_TIMES)]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{speed / TIMES} cannot be read",
            got=reason_of(error),
            next_step="give a folder that sparsebench speed has written, or measure again with it",
        ) from error
    return times[(times["mode"] == "eager") & times["latency"].notna()]


def _paper_of(ranking: Ranking, times: pd.DataFrame | None, speed: Path | None) -> Table:
    """Return the table of a paper for one ranking.

    Args:
        ranking: the ranking.
        times: rows of the file TIMES with the columns COLUMNS_OF_TIMES; None for the speeds of records.
        speed: the folder of the times.
    """
    comparison = ranking.comparison
    network, precision = _network_of(comparison)
    rows = _rows_of_paper(ranking)
    tested = comparison.tested[comparison.tested["entry"].isin(ranking.rows.index)]
    legend = [] if times is None else _add_times(rows, times, network, precision)
    has_times = bool(legend)
    if not has_times:
        legend = _on_speed_of_records(ranking.rows, tested, precision)
    if times is not None and not has_times:
        legend.append(
            f"{plain(str(speed))} has no times of these strategies on {network} in {precision}, on images of this size."
        )
    seeds = tested.groupby("entry")[SEED].nunique()
    n_networks = _from_to(seeds) if len(rows) else "0"
    networks = "1 network" if n_networks == "1" else f"{n_networks} networks"
    n_items = tested[ITEMS].max() if len(rows) else 0
    quantities = "top-1 and top-5" if rows["accuracy_top5"].notna().any() else "top-1"
    above = (
        f"{network} on {comparison.task}, {networks}, {n_items:,} test {items_of(comparison)} each: {quantities} in %, "
        "gain over dense in points with its 95 % interval."
    )
    return Table(
        dicts(rows),
        TIMED if has_times else PAPER,
        above=plain(above, 500),
        legend=[plain(line, 500) for line in legend],
        group="group",
        label=_label_of(comparison, network),
        bold="the best of a budget" if rows["accuracy_best"].any() else "",
    )


def _add_times(rows: pd.DataFrame, times: pd.DataFrame, network: str, precision: str) -> list[str]:
    """Write the times of `sparsebench speed` into the rows of a table, and return lines on them for its legend.

    Without times of dense on this network, nothing is written and there are no lines.
    """
    times = _times_of(rows, times, network, precision)
    # The file has no budget for dense.
    budgets = rows["budget"].mask(rows["strategy"] == DENSE, "")
    entries = list(zip(rows["strategy"], budgets, strict=True))
    timed = set(zip(times["strategy"], times["budget"], strict=True))
    if (DENSE, "") not in timed or (DENSE, "") not in entries:
        return []

    batch = int(times.loc[times["strategy"] == DENSE, "batch"].max())
    by_entry = times.set_index(["strategy", "budget"])
    at_largest = by_entry[by_entry["batch"] == batch].reindex(entries)
    at_one = by_entry[by_entry["batch"] == 1].reindex(entries)
    for name in ("images_per_s", "speed_up", "memory"):
        rows[name] = at_largest[name].to_numpy(float)
    rows["latency"] = 1000 * at_one["latency"].to_numpy(float)

    devices = ", ".join(sorted(set(times["device"].astype(str))))
    legend = [f"Images/s and speed-up on {devices}, {precision}, batch {batch}; every network in turn."]
    without = [f"{strategy} ({budget})" for strategy, budget in entries if (strategy, budget) not in timed]
    if without:
        legend.append(f"Without times: {few(without, MOST_NAMED, 100)}.")
    return legend


def _network_of(comparison: Comparison) -> tuple[str, str]:
    """Return the names of the network and of its precision, as `sparsebench speed` writes them."""
    model = comparison.params[1]
    return str(model.get("arch", comparison.model)), str(model.get("precision", "float32"))


def _times_of(rows: pd.DataFrame, times: pd.DataFrame, network: str, precision: str) -> pd.DataFrame:
    """Return the times of this network in this precision, on images of the same size as those of the rows."""
    dense_macs = (rows["macs"] / rows["macs_ratio"]).median()
    has_same_macs = (times["macs"] / times["macs_ratio"] / dense_macs - 1).abs() <= TOLERANCE
    return times[(times["network"] == network) & (times["precision"] == precision) & has_same_macs]


def _on_speed_of_records(rows: pd.DataFrame, tested: pd.DataFrame, precision: str) -> list[str]:
    """Return a line on where the records were timed; none if they were not.

    Args:
        rows: the ranked rows.
        tested: the records of these rows.
        precision: the precision of the network.
    """
    devices = sorted(set(rows["device"].dropna()))
    if not devices:
        return []
    where = [*devices, precision]
    batches = tested.loc[tested["timed_batch"] > 0, "timed_batch"].astype(int)
    if len(batches):
        where.append(f"batch {_from_to(batches)}")
    return [f"Images/s on {', '.join(where)}."]


def _from_to(numbers: pd.Series) -> str:
    """Return the smallest and the largest number, such as "3 to 5"; one number if they are equal."""
    ends = sorted({numbers.min(), numbers.max()})
    return " to ".join(str(end) for end in ends)


def _label_of(comparison: Comparison, network: str) -> str:
    """Return the label of a table in LaTeX: each word of task, model, network and number of samples once."""
    text = f"{comparison.task} {comparison.model} {network} {comparison.largest or ''}"
    words = dict.fromkeys(text.lower().split())
    label = re.sub(r"[^a-z0-9]+", "-", " ".join(words)).strip("-")
    return f"tab:{label}"


def _rows_of_paper(ranking: Ranking) -> pd.DataFrame:
    """Return the rows in order. `group` is the budget, and `accuracy_best` marks the best rows of a budget."""
    comparison = ranking.comparison
    is_dense = ranking.rows["strategy"] == DENSE
    means = over_seeds(comparison.tested, {"parameters": "mean", "accuracy_top5": "mean"})
    forms = comparison.entries.loc[ranking.rows.index, "form"]
    names = ranking.rows["strategy"]
    rows = ranking.rows.assign(
        task=comparison.task,
        model=comparison.model,
        method=names.where(forms == "", names + ", " + forms),
        n_train=comparison.largest,
        parameters=means["parameters"],
        accuracy_top5=means["accuracy_top5"],
        speed_up=speed_ups(comparison.tested),
    )
    rows.loc[is_dense, list(BY_KEY["accuracy_delta"].keys)] = np.nan

    # Dense, then the groups by falling cost, each with its most accurate row first.
    groups = _groups_of_paper(comparison, rows)
    order = {
        "dense": ~is_dense,
        "cost": -rows["macs_ratio"].fillna(0).groupby(groups).transform("max"),
        "group": groups,
        "accuracy": -rows["accuracy"],
        "method": rows["method"],
    }
    rows = in_order(rows, order)

    # All rows that print as the best accuracy of their group are best, unless all rows of the group print alike.
    top_1 = next(column for column in PAPER if column.key == "accuracy")
    texts = pd.Series([text_of(row, top_1) for row in dicts(rows)], rows.index, dtype=object)
    highest = texts.groupby(groups).transform("first")
    lowest = texts.groupby(groups).transform("last")
    return rows.assign(
        group=groups if groups.duplicated().any() else is_dense,
        accuracy_best=(texts == highest) & (highest != lowest),
    )


def _groups_of_paper(comparison: Comparison, rows: pd.DataFrame) -> pd.Series:
    """Return the group of each row: dense, the share of dense MACs whatever else its budget says, or its budget."""
    shares = comparison.entries.loc[rows.index, "asked"]
    is_dense = rows["strategy"] == DENSE
    other_budgets = rows["budget"].mask(is_dense, DENSE)
    return shares.map("macs {:g}".format).where(shares.notna() & ~is_dense, other_budgets)
