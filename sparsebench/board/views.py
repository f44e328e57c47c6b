"""Other looks at a board: pair by pair, at equal cost, at equal accuracy, and as the table of a paper."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board.columns import BY_KEY, PAPER, SPEED_UP, TOLERANCE, Column, Row, keys_of, rank_text, text_of
from sparsebench.board.entries import DENSE, asked_of, besides_share, key_of
from sparsebench.board.judge import Ranking
from sparsebench.board.over_budgets import speed_up
from sparsebench.board.tables import Report, Table
from sparsebench.errors import UserError, few, plain, reason_of
from sparsebench.records.table import OUTCOMES

NEAR = 0.001
"""How far below dense an accuracy may be that counts as the same: a tenth of a point."""
NAMED = 5
"""Strategies that are not in the table of a paper, and are named below it."""
BY_BUDGET = [BY_KEY["strategy"], BY_KEY["budget"]]
TOP_1 = next(column for column in PAPER if column.key == "accuracy")
PAIRS = (
    Column("task", "task", "text", "name of the task"),
    Column("strategy", "strategy", "text", "one of both"),
    Column("budget", "budget", "text", "and its budget"),
    Column("other", "against", "text", "the other one"),
    Column("other_budget", "its budget", "text", "and its budget"),
    Column("difference", "difference", "signed",
           "in accuracy, mean over the seeds that both have, with its 95 % interval", True),
    Column("p", "p", "p", "the larger of p items and p seeds, by Holm's method over all pairs of the task"),
    Column("p_items", "p items", "p",
           "would these networks differ on other items? McNemar's exact test, where no items go together"),
    Column("p_seeds", "p seeds", "p", "would networks from other seeds differ on other items? Student's t"),
    Column("overdispersion", "overdispersion", "ratio",
           "variance over seeds as a multiple of what the items explain, as judged with the help of all rows"),
    Column("told", "differs significantly", "text", "yes where p is 0.05 or less"),
    Column("n_seeds", "seeds", "count", "repetitions that both have"),
)  # fmt: skip
MATCHED = (
    Column("matched", "matched", "text", "what the rows have in common: their cost, or their accuracy"),
    Column("task", "task", "text", "name of the task"),
    *(BY_KEY[key] for key in ("rank", "strategy", "kind", "budget", "macs_ratio", "accuracy", "accuracy_delta")),
)
LEGEND_OF_MATCHED = (
    f"At equal cost: rows whose realised MACs are within {TOLERANCE:.0%} of each other, ranked among themselves.",
    f"At equal accuracy: of each strategy the row of least MACs that is at most {100 * NEAR:g} points below dense; - "
    "where there is none. Nothing is interpolated.",
)
TIMES = "speed.jsonl"
"""What `sparsebench speed` writes."""
TIMED = (
    *PAPER,
    Column("latency", "ms at batch 1", "times", "median time of one image, in milliseconds"),
    Column("memory", "peak GB", "giga", "most bytes of the GPU in use at the batch of images/s"),
)


def pairs(rankings: Iterable[Ranking]) -> Table:
    """Return a row for each two ranked strategies of each task, the surest differences first."""
    rows = []
    for one in rankings:
        result, p, better = one.pairs, one.pairs.p, one.pairs.better()
        for i, j in zip(*np.triu_indices(len(one.rows), 1), strict=True):
            if math.isnan(result.mean[i, j]):
                continue
            i, j = (i, j) if result.mean[i, j] >= 0 else (j, i)
            mean, half = result.mean[i, j], result.half[i, j]
            numbers = {
                "difference": mean, "difference_low": mean - half, "difference_high": mean + half, "p": p[i, j],
                **{key: getattr(result, key)[i, j] for key in ("p_items", "p_seeds", "overdispersion")},
            }  # fmt: skip
            row: Row = {"task": one.task}
            for k, (name, budget) in ((i, ("strategy", "budget")), (j, ("other", "other_budget"))):
                row |= {name: one.rows[k]["strategy"], budget: one.rows[k]["budget"]}
            row |= {key: None if math.isnan(x) else float(x) for key, x in numbers.items()}
            row |= {"told": "yes" if better[i, j] else "no", "n_seeds": int(result.n_seeds[i, j])}
            rows.append(row)
    names = ("strategy", "budget", "other", "other_budget")
    rows.sort(key=lambda r: (r["task"], 2 if r["p"] is None else r["p"], -r["difference"], *(r[n] for n in names)))
    return Table(rows, PAIRS, explained=True)


def matched(rankings: Iterable[Ranking]) -> Table:
    """Return the rows of each task at equal cost, then those at equal accuracy."""
    rows = [row for one in rankings for row in (*_at_equal_cost(one), *_at_equal_accuracy(one))]
    return Table(rows, MATCHED, legend=LEGEND_OF_MATCHED)


def _at_equal_cost(one: Ranking) -> list[Row]:
    """Return the rows whose costs lie within the tolerance of the smallest of them, two or more each."""
    costs = [math.nan if row["macs_ratio"] is None else row["macs_ratio"] for row in one.rows]
    groups: list[list[int]] = []
    for place in sorted((i for i, cost in enumerate(costs) if not math.isnan(cost)), key=lambda i: (costs[i], i)):
        if groups and costs[place] <= costs[groups[-1][0]] * (1 + TOLERANCE):
            groups[-1].append(place)
        else:
            groups.append([place])
    rows = []
    for places in (group for group in groups if len(group) > 1):
        what = f"at {np.mean([costs[i] for i in places]):.2f} of dense MACs"
        for place, ends in zip(places, one.pairs.among(places).rank_sets(), strict=True):
            rows.append(one.rows[place] | {"matched": what, "task": one.task, "rank": rank_text(*ends)})
    return sorted(rows, key=lambda row: (row["matched"], -row["accuracy"], row["strategy"], row["budget"]))


def _at_equal_accuracy(one: Ranking) -> list[Row]:
    """Return of each strategy the cheapest row that is as accurate as dense; without numbers where there is none."""
    found: dict[str, Row] = {}
    dense = next((row["accuracy"] for row in one.rows if row["strategy"] == DENSE), math.nan)
    for row in sorted(one.rows, key=lambda row: (row["macs_ratio"] or math.inf, row["budget"])):
        if row["strategy"] != DENSE and row["macs_ratio"] is not None and row["accuracy"] >= dense - NEAR:
            found.setdefault(row["strategy"], row)
    for row in () if math.isnan(dense) else one.rows:
        if row["strategy"] != DENSE:
            found.setdefault(row["strategy"], {"strategy": row["strategy"], "kind": row["kind"]})
    rows = [dict.fromkeys(keys_of(MATCHED)) | row for row in found.values()]
    rows = [row | {"matched": "at dense accuracy", "task": one.task, "rank": ""} for row in rows]
    return sorted(rows, key=lambda row: (row["macs_ratio"] or math.inf, row["strategy"]))


def shifts(rankings: Iterable[Ranking]) -> Report:
    """Return a table a network: a row a strategy and budget, and for each set of pictures its accuracy and its rank.

    Sets are in falling order of the dense network's accuracy: the first is what the others are shifted from. Ranks are
    those among the strategies of a budget, and a note has their correlation.

    Args:
        rankings: a ranking of each set.
    """
    networks: dict[tuple[str, str], list[Ranking]] = defaultdict(list)
    for one in rankings:
        rest = {key: value for key, value in one.setting.params[0].items() if key not in ("images", "among", "head")}
        networks[one.setting.model, json.dumps(rest, sort_keys=True)].append(one)
    tables = [_shift(sets) for sets in networks.values()]
    return Report(tables, Table([row for table in tables for row in table.rows], tables[0].columns if tables else ()))


def _shift(sets: list[Ranking]) -> Table:
    sets = sorted(sets, key=lambda one: -next((r["accuracy"] for r in one.rows if r["strategy"] == DENSE), -1.0))
    columns = [*BY_BUDGET]
    rows: dict[tuple[str, str], Row] = defaultdict(dict)
    for number, one in enumerate(sets):
        name, at, rank = one.setting.params[0].get("images", one.task), f"accuracy_{number}", f"rank_{number}"
        columns += [
            Column(at, name, "fraction", f"accuracy on {name}"),
            Column(rank, "rank", "text", f"ranks that it may have on {name}, among the strategies of the budget"),
        ]
        budgets: dict[str, list[int]] = defaultdict(list)
        for place, row in enumerate(one.rows):
            budgets[row["budget"]].append(place)
        for budget, places in budgets.items():
            for place, ends in zip(places, one.pairs.among(places).rank_sets(), strict=True):
                strategy = one.rows[place]["strategy"]
                rows[budget, strategy] |= {
                    "strategy": strategy, "budget": budget, at: one.rows[place]["accuracy"],
                    rank: "" if strategy == DENSE else rank_text(*ends),
                }  # fmt: skip
    whole = [dict.fromkeys(keys_of(columns)) | row for row in rows.values()]
    whole.sort(key=lambda row: (row["strategy"] != DENSE, row["budget"], -(row["accuracy_0"] or 0)))
    return Table(whole, columns, above=sets[0].setting.model, legend=_rank_correlations(whole, columns[2::2]))


def _rank_correlations(rows: Sequence[Row], sets: Sequence[Column]) -> list[str]:
    """Return in a line how much the order of the strategies on the first set is that on each of the others.

    It is Kendall's tau of the accuracies of the strategies of a budget, as a mean over the budgets that have three or
    more; nothing is said of fewer.
    """
    accuracies = pd.DataFrame([row for row in rows if row["strategy"] != DENSE], columns=keys_of([*BY_BUDGET, *sets]))
    budgets = [part for _, part in accuracies.groupby("budget") if len(part) >= 3]
    first, *others = sets
    taus = {
        one.heading: np.mean([part[one.key].corr(part[first.key], method="kendall") for part in budgets])
        for one in (others if budgets else ())
    }
    said = "; ".join(f"{name} {tau:.2f}" for name, tau in taus.items() if not math.isnan(tau))
    over = f"mean over {len(budgets)} budgets" if len(budgets) > 1 else "one budget"
    return [f"Rank correlation with {first.heading} (Kendall's tau of the accuracies, {over}): {said}."] if said else []


def paper(rankings: Sequence[Ranking], speed: Path | None = None) -> Report:
    """Return the table of a paper of each ranking: dense, then its strategies by budget, the most accurate first.

    Args:
        rankings: of a board.
        speed: a folder of `sparsebench speed`: images/s, speed-up, latency and peak memory are its. Images/s and memory
            are those of the largest batch at which the dense network has times. What the records say of speed is then
            left out: it was measured beside other things.

    Raises:
        UserError: the folder holds no times.
    """
    columns = PAPER if speed is None else TIMED
    tables = [_paper_of(one) for one in rankings]
    if speed is None:
        beside = zip(tables, rankings, strict=True)
        tables = [replace(table, legend=[*_measured(one), *table.legend]) for table, one in beside]
    else:
        try:
            times = _times(speed / TIMES)
            tables = [_joined(table, one, times, speed) for table, one in zip(tables, rankings, strict=True)]
        except KeyError as error:
            missing = f"{speed / TIMES} has no {error.args[0]}"
            raise UserError(missing, next_step="measure again with sparsebench speed") from error
    data = Table([row for table in tables for row in table.rows], columns)
    return Report(tables or [Table([], columns)], data, [line for one in rankings for line in _left_out(one)])


def _left_out(one: Ranking) -> list[str]:
    """Return in a line which strategies of a setting are not in the table of a paper."""
    ranked = {row["strategy"] for row in one.rows}
    out = list(dict.fromkeys(name for name, *_ in one.setting.largest_entries if name not in ranked))
    return [f"not in the table, as they are oracles or not ranked: {few(out, NAMED, 100)}"] if out else []


def _paper_of(one: Ranking) -> Table:
    setting, rows = one.setting, _rows_of_paper(one)
    tested = [setting.largest_entries[key_of(row)] for row in one.rows]
    model = setting.params[1].get("arch", setting.model)
    images = max((int(entry.column(OUTCOMES[0]).max()) for entry in tested), default=0)
    what = "top-1 and top-5" if any(row["accuracy_top5"] is not None for row in rows) else "top-1"
    above = (
        f"{model} on {setting.task}, {images:,} test images: {what} in %, difference to dense in points with its 95 % "
        "interval."
    )
    label = re.sub(r"[^a-z0-9]+", "-", f"{setting.task} {model} {setting.largest or ''}".lower()).strip("-")
    return Table(
        rows, PAPER, above=plain(above, 500), group="group", label=f"tab:{label}",
        bold="the best of a budget" if any(row["accuracy_best"] for row in rows) else "",
    )  # fmt: skip


def _measured(one: Ranking) -> list[str]:
    """Return in a sentence where images/s of records were measured, if they were."""
    devices = sorted({row["device"] for row in one.rows if row["device"]})
    tested = [one.setting.largest_entries[key_of(row)] for row in one.rows]
    batches = sorted({int(n) for entry in tested for n in entry.column("timed_batch") if n > 0})
    batch = [f"batch {' to '.join(str(n) for n in dict.fromkeys((batches[0], batches[-1])))}"] if batches else []
    where = [*devices, str(one.setting.params[1].get("precision", "float32")), *batch]
    return [plain(f"Images/s on {', '.join(where)}.", 500)] if devices else []


def _rows_of_paper(one: Ranking) -> list[Row]:
    """Return the rows, which say to which budget they belong, and whether they are the best there."""
    tested = one.setting.largest_entries
    dense = next((entry for key, entry in tested.items() if key[0] == DENSE), None)
    groups: dict[str | float, list[Row]] = defaultdict(list)
    for row in one.rows:
        entry, named, is_dense = tested[key_of(row)], row["budget"], row["strategy"] == DENSE
        asked = asked_of(entry)
        share = not math.isnan(asked)
        beside = besides_share(named, asked) if share else named
        new = {key: row.get(key) for key in keys_of(PAPER)} | {
            "task": one.setting.task, "model": one.setting.model, "n_train": one.setting.largest,
            **(dict.fromkeys(BY_KEY["accuracy_delta"].keys) if is_dense else {}),
            "method": ", ".join(filter(None, (row["strategy"], beside))),
            **{metric: entry.over_seeds(metric) for metric in ("parameters", "accuracy_top5")},
            SPEED_UP.key: None if dense is None else speed_up(entry, dense),
        }  # fmt: skip
        groups[DENSE if is_dense else asked if share else named].append(new)
    several = any(len(group) > 1 for group in groups.values())
    for name, group in groups.items():
        group.sort(key=lambda row: (-row["accuracy"], row["method"]))
        best, last = text_of(group[0], TOP_1), text_of(group[-1], TOP_1)
        for row in group:
            row["group"] = name if several else name == DENSE
            row["accuracy_best"] = text_of(row, TOP_1) == best != last
    ordered = sorted(groups.items(), key=lambda each: (each[0] != DENSE, -max(r["macs_ratio"] or 0 for r in each[1])))
    return [row for _, group in ordered for row in group]


def _times(path: Path) -> pd.DataFrame:
    """Return the eager rows that have times."""
    try:
        timed = pd.read_json(path, lines=True, dtype=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read", got=reason_of(error), next_step="give a folder that sparsebench speed has written"
        ) from error
    return timed[(timed["mode"] == "eager") & timed["latency"].notna()]


def _joined(table: Table, one: Ranking, timed: pd.DataFrame, folder: Path) -> Table:
    """Return the table of a paper with times, joined by network, precision, strategy and budget."""
    params: dict[str, Any] = one.setting.params[1]
    network, precision = str(params.get("arch", one.setting.model)), str(params.get("precision", "float32"))
    timed = timed[(timed["network"] == network) & (timed["precision"] == precision)]
    keys = [(row["strategy"], "" if row["strategy"] == DENSE else row["budget"]) for row in table.rows]
    times = timed.set_index(["strategy", "budget", "batch"])
    known = {(strategy, budget) for strategy, budget, _ in times.index}
    if not known.intersection(keys) or (DENSE, "") not in known:
        note = f"{plain(str(folder), 200)} has no times of these strategies on {network} in {precision}."
        return replace(table, legend=[*_measured(one), *table.legend, note])
    batch = int(timed.loc[timed["strategy"] == DENSE, "batch"].max())
    nothing = dict.fromkeys(times.columns)
    found, rows = times.to_dict("index"), []
    for row, key in zip(table.rows, keys, strict=True):
        largest, single = found.get((*key, batch), nothing), found.get((*key, 1), nothing)
        new = {name: largest[name] for name in ("images_per_s", SPEED_UP.key, "memory")}
        new["latency"] = None if single["latency"] is None else 1000 * single["latency"]
        rows.append({**row, **{name: None if pd.isna(value) else float(value) for name, value in new.items()}})
    without = [f"{strategy} ({budget})" for strategy, budget in keys if (strategy, budget) not in known]
    devices = ", ".join(sorted(set(timed["device"].astype(str))))
    legend = [plain(f"Images/s and speed-up on {devices}, {precision}, batch {batch}; every network in turn.", 500)]
    legend += [*table.legend, *([f"Without times: {few(without, NAMED, 100)}."] if without else [])]
    return replace(table, rows=rows, columns=TIMED, legend=legend)
