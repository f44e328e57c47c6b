"""The strategies of a board over the shares of dense MACs that they were asked to spend: a row a strategy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
    Row,
    accuracy_at,
    interval_row,
    keys_of,
    rank_text,
)
from sparsebench.board.entries import DENSE, SEED, Entry, Key, Setting, asked_of, key_of, line_of
from sparsebench.stats import curves, paired
from sparsebench.stats.paired import Contender, Pairs

HALF = 0.5
OF_STRATEGY = (HOW, KEPT, MACS_AT_2, CHECKS, BADGE)
Entries = Mapping[Key, Entry]
Lines = Mapping[str, Mapping[float, Row]]
"""By strategy, and by the share of dense MACs that it was asked to spend, the rows of a board."""


@dataclass(frozen=True)
class BudgetBoard:
    """The strategies of one setting over their budgets.

    Attributes:
        budgets: falling shares of dense MACs that were asked for; `middle` the one nearest one half.
        rows: one a strategy, dense first; keys as in `report.columns_of`, and all of the strategy's row at `middle`.
        lines: the rows a strategy and budget, dense's at 1.
        pairs: the comparisons of the ranked ones by their areas.
    """

    budgets: tuple[float, ...]
    middle: float
    rows: list[Row]
    lines: Lines
    pairs: Pairs


def over_budgets(
    main: Setting, rows: Sequence[Row], common: Sequence[float], apart: Collection[Key], unranked: Collection[Key]
) -> BudgetBoard | None:
    """Return the board of curves of some rows, and give the rows their columns of it.

    None where no strategy has two budgets that are shares of dense MACs, or dense was not measured.

    Args:
        main: what the rows are of.
        rows: those of a board with a row a strategy and budget, in order.
        common: falling shares of dense MACs that most strategies were run at; none where none has several.
        apart: those that lack something, which say nothing of how much others vary.
        unranked: those that are not ranked, as they lack cells or some failed.
    """
    tested = main.largest_entries
    able = [row for row in rows if row["accuracy"] is not None and row["macs_ratio"] is not None]
    dense = next((row for row in able if row["strategy"] == DENSE), None)
    lines = lines_of(tested, able)
    if dense is None or not any(len(at) > 1 for at in lines.values()):
        return None
    budgets = tuple(sorted({asked for at in lines.values() for asked in at}, reverse=True))
    common = common or budgets
    middle = min(common, key=lambda budget: (abs(budget - HALF), budget))
    _add_costs(tested, able, dense)
    heights = _add_curves(main, lines, dense, common[-1])
    table = {name: _row(name, at, budgets, middle) for name, at in {DENSE: {1.0: dense}, **lines}.items()}
    whole = {name for name, at in lines.items() if not any(key_of(row) in unranked for row in at.values())}
    lack = {name for name, at in lines.items() if any(key_of(row) in apart for row in at.values())}
    pairs = _rank(table, heights, whole, lack)
    shown = [table.pop(DENSE), *sorted(table.values(), key=_order)]
    return BudgetBoard(budgets, middle, shown, {DENSE: {1.0: dense}, **lines}, pairs)


def lines_of(tested: Entries, rows: Sequence[Row]) -> Lines:
    """Return the strategies with budgets below 1; what else a budget says is part of a name where names are alike."""
    by_line: dict[tuple[str, str, str], dict[float, Row]] = defaultdict(dict)
    for row in rows:
        entry = tested[key_of(row)]
        if (line := line_of(key_of(row), entry)) is not None:
            by_line[line][asked_of(entry)] = row
    alike = [(strategy, kind) for strategy, kind, _ in by_line]
    return {
        f"{strategy} {rest}" if alike.count((strategy, kind)) > 1 and rest else strategy: at
        for (strategy, kind, rest), at in sorted(by_line.items())
    }


def points_of(at: Mapping[float, Row]) -> list[Row]:
    """Return the rows of a strategy that spend less than dense does, in the order of what they spend."""
    points = sorted(at.items(), key=lambda point: (point[1]["macs_ratio"], point[0]))
    return [row for _, row in points if row["macs_ratio"] < 1]


def _add_costs(tested: Entries, rows: Sequence[Row], dense: Row) -> None:
    """Add to rows how tokens are disposed of, the speed-up, and the mean probability of the right class."""
    for row in rows:
        entry = tested[key_of(row)]
        words = entry.words(HOW.key)
        row[HOW.key] = words.pop() if len(words) == 1 else ""
        row[SPEED_UP.key] = speed_up(entry, tested[key_of(dense)])
        row[P_LABEL.key] = entry.over_seeds(P_LABEL.key)


def speed_up(entry: Entry, dense: Entry) -> float | None:
    """Return images/s over dense's of the same seed and machine, the median; None where they were not measured."""
    base = dict(_speeds(dense))
    ratios = [speed / base[where] for where, speed in _speeds(entry) if base.get(where)]
    return float(np.median(ratios)) if ratios else None


def _speeds(entry: Entry) -> list[tuple[tuple[int, str, str], float]]:
    """Return images/s with seed, device and machine."""
    where = zip(*(entry.column(name).tolist() for name in (SEED, "device", "environment")), strict=True)
    speeds = zip(where, entry.column("images_per_s").tolist(), strict=True)
    return [(place, speed) for place, speed in speeds if not math.isnan(speed)]


def _add_curves(main: Setting, lines: Lines, dense: Row, lowest: float) -> dict[str, Contender]:
    """Add to strategies' rows kept accuracy and least MACs; return what they are ranked by, of those with points."""
    heights: dict[str, Contender] = {}
    for name, at in lines.items():
        points = points_of(at)
        spent = [row["macs_ratio"] for row in points]
        contenders = [main.largest_entries[key_of(row)].contender for row in (*points, dense)]
        if not spent or lowest not in at or (height := curves.area(contenders, spent, lowest)) is None:
            continue
        heights[name] = height
        least = interval_row(MACS_AT_2.key, curves.least_macs(contenders, spent, main.lone))
        least |= {f"{MACS_AT_2.key}_at_most": True} if least[MACS_AT_2.key] == spent[0] else {}
        for row in at.values():
            row |= least
    of_dense = main.largest_entries[key_of(dense)].contender
    kept = curves.kept_accuracy(list(heights.values()), of_dense, main.lone)
    for name, interval in zip(heights, kept, strict=True):
        for row in lines[name].values():
            row |= interval_row(KEPT.key, interval)
    dense |= {KEPT.key: 1.0, MACS_AT_2.key: 1.0}
    return heights


def _row(name: str, at: Mapping[float, Row], budgets: Sequence[float], middle: float) -> Row:
    """Return a strategy's row of the table, without what comparisons say."""
    first = next(iter(at.values()))
    row = dict(at.get(1.0 if name == DENSE else middle, {}))
    row |= {"rank": NOT_RANKED, "strategy": name, "kind": first["kind"]}
    row |= {key: first.get(key) for key in (*keys_of(OF_STRATEGY), f"{MACS_AT_2.key}_at_most")}
    for budget in budgets:
        key, of = accuracy_at(budget).key, at.get(budget, {"accuracy": None, "macs_ratio": budget})
        missed = abs(of["macs_ratio"] / budget - 1) > TOLERANCE
        row |= {key: of["accuracy"], f"{key}_spent": of["macs_ratio"] if missed else None}
    return row


def _rank(
    table: Mapping[str, Row], heights: Mapping[str, Contender], whole: Collection[str], lack: Collection[str]
) -> Pairs:
    """Add the ranks by area of strategies that are whole and no oracles, and return their comparisons.

    Those that lack cells have no say in how much others vary.
    """
    names = list(heights)
    places = [k for k, name in enumerate(names) if name in whole and table[name]["kind"] != "oracle"]
    apart = [k for k, name in enumerate(names) if name in lack]
    pairs = paired.compare(list(heights.values()), apart).among(places)
    for k, (first, last) in zip(places, pairs.rank_sets(), strict=True):
        table[names[k]]["rank"] = rank_text(first, last)
    return pairs


def _order(row: Row) -> tuple[object, ...]:
    return row["kind"] == "oracle", row["rank"] == NOT_RANKED, -(row[KEPT.key] or 0), row["strategy"]
