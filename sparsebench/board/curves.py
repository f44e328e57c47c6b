"""The strategies of a board over the shares of dense MACs that they were asked to spend: a row a strategy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pandas as pd

from sparsebench.board.columns import (
    BADGE,
    CHECKS,
    HOW,
    KEPT,
    MACS_AT_2,
    NOT_RANKED,
    P_LABEL,
    SPEED_UP,
    TOLERANCE,
    accuracy_at,
    interval_row,
    keys_of,
    rank_text,
)
from sparsebench.board.settings import DENSE, Setting, over_seeds, speed_ups
from sparsebench.stats import curves, paired
from sparsebench.stats.paired import Contender, Pairs

HALF = 0.5
OF_STRATEGY = (HOW, KEPT, MACS_AT_2, CHECKS, BADGE)


@dataclass(frozen=True)
class Curves:
    """The strategies of one setting over their budgets.

    Attributes:
        budgets: falling shares of dense MACs that were asked for; `middle` the one nearest one half.
        rows: one a strategy, dense first; keys as in `report.columns_of`, and all of the strategy's row at `middle`.
        pairs: the comparisons of the ranked ones by their areas.
    """

    budgets: tuple[float, ...]
    middle: float
    rows: pd.DataFrame
    pairs: Pairs


def curves_of(
    main: Setting, rows: pd.DataFrame, common: Sequence[float], apart: Collection[int], unranked: Collection[int]
) -> tuple[pd.DataFrame, Curves | None]:
    """Return rows with the columns that their curves have, and those curves, a row a strategy.

    None where no strategy has two budgets that are shares of dense MACs, or dense was not measured.

    Args:
        main: what the rows are of.
        rows: those of a board with a row a strategy and budget, in order.
        common: falling shares of dense MACs that most strategies were run at; none where none has several.
        apart: those that lack something, which say nothing of how much others vary.
        unranked: those that are not ranked, as they lack cells or some failed.
    """
    able = rows["accuracy"].notna() & rows["macs_ratio"].notna()
    dense = rows.index[able & (rows["strategy"] == DENSE)][:1]
    several = rows[able].dropna(subset="line").duplicated("line").any()
    rows = rows.assign(line=_names(rows["line"].where(able)))
    if not several or dense.empty:
        return rows.assign(line=None), None
    rows.loc[dense, "line"], rows.loc[dense, "asked"] = DENSE, 1.0
    points = rows.dropna(subset="line")
    budgets = tuple(sorted(set(points["asked"]) - {1.0}, reverse=True))
    common = common or budgets
    middle = min(common, key=lambda budget: (abs(budget - HALF), budget))
    how = main.tested[HOW.key].astype(str).groupby(main.tested["entry"])
    costs = {
        HOW.key: how.first().where(how.nunique() == 1, ""),
        SPEED_UP.key: speed_ups(main.tested),
        P_LABEL.key: over_seeds(main.tested, {P_LABEL.key: "mean"})[P_LABEL.key],
    }
    rows = rows.assign(**{name: values.reindex(rows.index[able]) for name, values in costs.items()})
    heights, of_lines = _heights(main, points[["line", "asked", "macs_ratio"]], common[-1])
    of_lines = rows[["line"]].join(of_lines, on="line").drop(columns="line")
    rows = rows.drop(columns=[name for name in of_lines if name in rows]).join(of_lines)
    points = rows.dropna(subset="line")
    table = _table(points, budgets, middle)
    left = set(points.loc[points.index.isin(unranked), "line"]), set(points.loc[points.index.isin(apart), "line"])
    pairs = _rank(table, heights, *left)
    order = {"not dense": table.index != DENSE, "oracle": table["kind"] == "oracle",
             "last": table["rank"] == NOT_RANKED, "kept": -table[KEPT.key].fillna(0)}  # fmt: skip
    table = table.sort_index().loc[pd.DataFrame(order, table.index).sort_index().sort_values(list(order)).index]
    return rows, Curves(budgets, middle, table, pairs)


def _names(lines: pd.Series) -> pd.Series:
    """Return the names of curves: strategies, and what else their budgets say where some are of one strategy."""
    every = sorted(set(lines.dropna()))
    alike = [(strategy, kind) for strategy, kind, _ in every]
    names = {
        (strategy, kind, rest): f"{strategy} {rest}" if alike.count((strategy, kind)) > 1 and rest else strategy
        for strategy, kind, rest in every
    }
    return lines.map(names.get).astype(object)


def points_of(rows: pd.DataFrame, line: str) -> pd.DataFrame:
    """Return the rows of a strategy that spend less than dense does, in the order of what they spend."""
    return rows[(rows["line"] == line) & (rows["macs_ratio"] < 1)].sort_values(["macs_ratio", "asked"])


def _heights(main: Setting, rows: pd.DataFrame, lowest: float) -> tuple[dict[str, Contender], pd.DataFrame]:
    """Return what curves are ranked by, and their kept accuracy and least MACs, of those that reach the lowest budget.

    Args:
        main: what the rows are of.
        rows: the points of all curves, dense's too.
        lowest: budget from which on curves are compared.
    """
    dense = main.contenders[rows.index[rows["line"] == DENSE][0]][0]
    heights, found = {}, {DENSE: {KEPT.key: 1.0, MACS_AT_2.key: 1.0}}
    for name in sorted(set(rows.loc[rows["asked"] == lowest, "line"])):
        points = points_of(rows, name)
        spent = points["macs_ratio"].tolist()
        contenders = [*(main.contenders[entry][0] for entry in points.index), dense]
        if not spent or (height := curves.area(contenders, spent, lowest)) is None:
            continue
        heights[name] = height
        found[name] = interval_row(MACS_AT_2.key, curves.least_macs(contenders, spent, main.lone))
        found[name] |= {f"{MACS_AT_2.key}_at_most": True} if found[name][MACS_AT_2.key] == spent[0] else {}
    kept = curves.kept_accuracy(list(heights.values()), dense, main.lone)
    for name, interval in zip(heights, kept, strict=True):
        found[name] |= interval_row(KEPT.key, interval)
    return heights, pd.DataFrame.from_dict(found, orient="index")


def _table(rows: pd.DataFrame, budgets: Sequence[float], middle: float) -> pd.DataFrame:
    """Return strategies' rows of the table, by the names of their curves, without what comparisons say."""
    first = rows.drop_duplicates("line").set_index("line")
    table = rows[(rows["asked"] == middle) | (rows["line"] == DENSE)].set_index("line").reindex(first.index)
    shared = ["kind", *(key for key in (*keys_of(OF_STRATEGY), f"{MACS_AT_2.key}_at_most") if key in first)]
    table = table.assign(**first[shared], rank=NOT_RANKED, strategy=table.index)
    for budget in budgets:
        of, key = rows[rows["asked"] == budget].set_index("line"), accuracy_at(budget).key
        missed = (of["macs_ratio"] / budget - 1).abs() > TOLERANCE
        table = table.assign(**{key: of["accuracy"], f"{key}_spent": of["macs_ratio"].where(missed)})
    return table


def _rank(
    table: pd.DataFrame, heights: dict[str, Contender], unranked: Collection[str], lack: Collection[str]
) -> Pairs:
    """Add the ranks by area of strategies that are whole and no oracles, and return their comparisons.

    Those that lack cells have no say in how much others vary.
    """
    names = list(heights)
    places = [k for k, name in enumerate(names) if name not in unranked and table.loc[name, "kind"] != "oracle"]
    apart = [k for k, name in enumerate(names) if name in lack]
    pairs = paired.compare(list(heights.values()), apart).among(places)
    table.loc[[names[k] for k in places], "rank"] = [rank_text(first, last) for first, last in pairs.rank_sets()]
    return pairs
