"""Other looks at a board: pair by pair, at equal cost, and at equal accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from sparsebench.board.board import Row
from sparsebench.board.build import Ranking
from sparsebench.board.columns import COLUMNS, Column
from sparsebench.board.entries import DENSE
from sparsebench.board.notes import TOLERANCE

NEAR = 0.001
"""How far below dense an accuracy may be that counts as the same: a tenth of a point."""
PAIRS = (
    Column("task", "task", "text", "name of the task"),
    Column("strategy", "strategy", "text", "one of both"),
    Column("budget", "budget", "text", "and its budget"),
    Column("other", "against", "text", "the other one"),
    Column("other_budget", "its budget", "text", "and its budget"),
    Column("difference", "difference", "signed", "in accuracy, mean over the seeds that both have", True),
    Column("p", "p", "p", "the larger of the next two, by Holm's method over all pairs of the task"),
    Column("p_items", "p items", "p", "would these networks differ on other items?"),
    Column("p_seeds", "p seeds", "p", "would networks from other seeds differ on other items?"),
    Column("overdispersion", "overdispersion", "ratio",
           "variance over seeds as a multiple of what the items explain, as judged with the help of all rows"),
    Column("told", "differs significantly", "text", "yes where p is 0.05 or less"),
    Column("n_seeds", "seeds", "count", "repetitions that both have"),
)  # fmt: skip
_SHOWN = {column.key: column for column in COLUMNS}
MATCHED = (
    Column("matched", "matched", "text", "what the rows have in common: their cost, or their accuracy"),
    Column("task", "task", "text", "name of the task"),
    *(_SHOWN[key] for key in ("rank", "strategy", "kind", "budget", "macs_ratio", "accuracy", "accuracy_delta")),
)
LEGEND_OF_PAIRS = (
    "Differences with 95 % intervals of seeds and items, each for itself. p: the larger of p items (McNemar's exact "
    "test, where no items go together) and p seeds (Student's t, of a variance that is what items explain times the "
    "overdispersion), by Holm's method over all pairs."
)
LEGEND_OF_MATCHED = (
    f"At equal cost: rows whose realised MACs are within {TOLERANCE:.0%} of each other, ranked among themselves. At "
    f"equal accuracy: of each strategy the row of least MACs that is at most {100 * NEAR:g} points below dense; - "
    "where there is none. Nothing is interpolated."
)


def pairs(rankings: Iterable[Ranking]) -> list[Row]:
    """Return a row for each two ranked strategies of each task, see `PAIRS`, the surest differences first."""
    rows = []
    for one in rankings:
        result, p, better = one.pairs, one.pairs.p, one.pairs.better()
        for i, j in zip(*np.triu_indices(len(one.rows), 1), strict=True):
            if math.isnan(result.mean[i, j]):
                continue
            i, j = (i, j) if result.mean[i, j] >= 0 else (j, i)
            row, other, mean, half = one.rows[i], one.rows[j], float(result.mean[i, j]), _or_none(result.half[i, j])
            ends = (None, None) if half is None else (mean - half, mean + half)
            rows.append({
                "task": one.task, "strategy": row["strategy"], "budget": row["budget"], "other": other["strategy"],
                "other_budget": other["budget"], "difference": mean, "difference_low": ends[0],
                "difference_high": ends[1], "p": _or_none(p[i, j]), "p_items": _or_none(result.p_items[i, j]),
                "p_seeds": _or_none(result.p_seeds[i, j]), "overdispersion": _or_none(result.overdispersion[i, j]),
                "told": "yes" if better[i, j] else "no",
                "n_seeds": int(result.n_seeds[i, j]),
            })  # fmt: skip
    names = ("strategy", "budget", "other", "other_budget")
    return sorted(
        rows, key=lambda r: (r["task"], 2 if r["p"] is None else r["p"], -r["difference"], *(r[name] for name in names))
    )


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def matches(rankings: Iterable[Ranking]) -> list[Row]:
    """Return the rows of each task at equal cost, then those at equal accuracy; see `MATCHED`."""
    rankings = list(rankings)
    return [row for one in rankings for row in (*_at_equal_cost(one), *_at_equal_accuracy(one))]


def _at_equal_cost(one: Ranking) -> list[Row]:
    rows = []
    for places in _alike([row["macs_ratio"] for row in one.rows]):
        cost = float(np.mean([one.rows[i]["macs_ratio"] for i in places]))
        for place, (first, last) in zip(places, one.pairs.among(places).rank_sets(), strict=True):
            rank = str(first) if first == last else f"{first}-{last}"
            rows.append(_matched_row(one, one.rows[place], f"at {cost:.2f} of dense MACs", rank))
    return sorted(rows, key=lambda row: (row["matched"], -row["accuracy"], row["strategy"], row["budget"]))


def _alike(costs: Sequence[float | None]) -> list[list[int]]:
    """Return the places of costs that lie within the tolerance of the smallest of them, two or more each."""
    groups: list[list[int]] = []
    for place in sorted((i for i, cost in enumerate(costs) if cost is not None), key=lambda i: (costs[i], i)):
        cost, first = costs[place], costs[groups[-1][0]] if groups else None
        if first is not None and cost is not None and cost <= first * (1 + TOLERANCE):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [group for group in groups if len(group) > 1]


def _at_equal_accuracy(one: Ranking) -> list[Row]:
    dense = next((row for row in one.rows if row["strategy"] == DENSE), None)
    if dense is None:
        return []
    rows = []
    for name in sorted({row["strategy"] for row in one.rows} - {DENSE}):
        strategy_rows = [row for row in one.rows if row["strategy"] == name and row["macs_ratio"] is not None]
        good = [row for row in strategy_rows if row["accuracy"] >= dense["accuracy"] - NEAR]
        best = min(good, key=lambda row: (row["macs_ratio"], row["budget"]), default=None)
        none = {column.key: None for column in COLUMNS} | {
            "strategy": name,
            "kind": strategy_rows[0]["kind"] if strategy_rows else "",
        }
        rows.append(_matched_row(one, best or none, "at dense accuracy", ""))
    return sorted(rows, key=lambda row: (row["macs_ratio"] or math.inf, row["strategy"]))


def _matched_row(one: Ranking, row: Row, matched: str, rank: str) -> Row:
    keys = [key for column in MATCHED for key in column.keys]
    return {key: row.get(key) for key in keys} | {"matched": matched, "task": one.task, "rank": rank}
