"""A board of curves: a row a strategy, over the shares of dense MACs that it was asked to spend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparsebench.board import references
from sparsebench.board.board import BudgetBoard, BudgetCurve, Row
from sparsebench.board.columns import (
    BADGE,
    BY_KEY,
    CHECKS,
    HOW,
    KEPT,
    MACS_AT_2,
    NOT_RANKED,
    P_LABEL,
    SPEED_UP,
    Column,
    accuracy_at,
    keys_of,
    short,
    text_of,
)
from sparsebench.board.entries import DENSE, SEED, Entry, Key, Setting, asked_of, line_of
from sparsebench.board.missing import Missing
from sparsebench.stats import curves, paired
from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Contender, Pairs

MISSED = 0.02
"""How far what was spent may be from a budget, as a share of it, before the table says so."""
HALF = 0.5
Entries = Mapping[Key, Entry]


@dataclass(frozen=True)
class Line:
    """One strategy, with its row at each share of dense MACs that it was asked to spend."""

    strategy: str
    rows: Mapping[float, Row]

    @property
    def kind(self) -> str:
        """See `Strategy`."""
        return str(next(iter(self.rows.values()))["kind"])

    @property
    def points(self) -> dict[float, Row]:
        """The rows that spend less than dense does, by budget, in the order of what they spend."""
        points = [(asked, row) for asked, row in self.rows.items() if row["macs_ratio"] < 1]
        return dict(sorted(points, key=lambda point: (point[1]["macs_ratio"], point[0])))


def board(
    main: Setting, rows: Sequence[Row], missing: Missing, unranked: Collection[Key], declared: Sequence[Column] = ()
) -> BudgetBoard | None:
    """Return the board of curves of some rows, and give the rows their columns of it.

    None where no strategy has two budgets that are shares of dense MACs, or dense was not measured.

    Args:
        main: what the rows are of.
        rows: those of a board with a row a strategy and budget.
        missing: what strategies lack.
        unranked: those that are not ranked, as they lack cells or some failed.
        declared: columns of the metrics that the task declares.
    """
    able = [row for row in rows if row["accuracy"] is not None and row["macs_ratio"] is not None]
    dense = next((row for row in able if row["strategy"] == DENSE), None)
    lines = lines_of(main.largest_entries, able)
    if dense is None or not any(len(line.rows) > 1 for line in lines):
        return None
    budgets = tuple(sorted({asked for line in lines for asked in line.rows}, reverse=True))
    common = missing.budgets or budgets
    middle = min(common, key=lambda budget: (abs(budget - HALF), budget))
    _add_costs(main.largest_entries, able, dense)
    heights = [_add_curve(main, line, dense, common[-1]) for line in lines]
    dense |= {KEPT.key: 1.0, MACS_AT_2.key: 1.0}
    first, *table = [_row(line, budgets, middle, keys_of(declared)) for line in (Line(DENSE, {1.0: dense}), *lines)]
    of_lines = [{_key(row) for row in line.rows.values()} for line in lines]
    whole = [not keys & set(unranked) for keys in of_lines]
    fair = [of_all and line.kind != "oracle" for of_all, line in zip(whole, lines, strict=True)]
    lack = [bool(keys & missing.apart) for keys in of_lines]
    area = _rank(table, heights, fair, lack)
    at_middle = _beside_random(main.largest_entries, table, [line.rows.get(middle) for line in lines], whole, lack)
    notes = [_measure(main, dense)]
    notes += [
        f"{_significant(area)} pairs of ranked strategies differ significantly on the area, "
        f"{_significant(at_middle)} at {short(middle)}"
    ]
    notes += [] if (clause := paired.detectable(area, "the area", main.of)) is None else [clause]
    if high := sorted(line.strategy for line, of_all in zip(lines, whole, strict=True)
                      if of_all and common[-1] not in line.rows):  # fmt: skip
        notes.append(f"not ranked, as they have no result at the lowest budget: {', '.join(high)}")
    if others := len(able) - 1 - sum(len(line.rows) for line in lines):
        notes.append(
            f"not in this table: {others} rows whose budgets are no shares of dense MACs; CSV and JSON have them"
        )
    shown = [first, *sorted(table, key=_order)]
    drawn = {line.strategy: _curve(line) for line in (Line(DENSE, {1.0: dense}), *lines)}
    return BudgetBoard(
        main.task, main.model, main.largest, main.track, budgets, middle, shown,
        [drawn[row["strategy"]] for row in shown], notes, tuple(declared),
    )  # fmt: skip


def _key(row: Row) -> Key:
    return row["strategy"], row["kind"], row["budget"]


def lines_of(tested: Entries, rows: Sequence[Row]) -> list[Line]:
    """Return the strategies with budgets below 1; what else a budget says is part of a name where names are alike."""
    by_line: dict[tuple[str, str, str], dict[float, Row]] = defaultdict(dict)
    for row in rows:
        entry = tested[_key(row)]
        if (line := line_of(_key(row), entry)) is not None:
            by_line[line][asked_of(entry)] = row
    alike = [(strategy, kind) for strategy, kind, _ in by_line]
    return [
        Line(f"{strategy} {rest}" if alike.count((strategy, kind)) > 1 and rest else strategy, rows_at)
        for (strategy, kind, rest), rows_at in sorted(by_line.items())
    ]


def _add_costs(tested: Entries, rows: Sequence[Row], dense: Row) -> None:
    """Add to rows how tokens are disposed of, the speed-up, and the mean probability of the right class."""
    base = dict(_speeds(tested[_key(dense)]))
    for row in rows:
        entry = tested[_key(row)]
        words = entry.words(HOW.key)
        row[HOW.key] = words.pop() if len(words) == 1 else ""
        ratios = [speed / base[where] for where, speed in _speeds(entry) if base.get(where)]
        row[SPEED_UP.key] = float(np.median(ratios)) if ratios else None
        sure = list(entry.by_seed(P_LABEL.key).values())
        row[P_LABEL.key] = float(np.mean(sure)) if sure else None


def _speeds(entry: Entry) -> list[tuple[tuple[int, str, str], float]]:
    """Return images/s with seed, device and machine."""
    where = zip(*(entry.column(name).tolist() for name in (SEED, "device", "environment")), strict=True)
    speeds = zip(where, entry.column("images_per_s").tolist(), strict=True)
    return [(place, speed) for place, speed in speeds if not math.isnan(speed)]


def _add_curve(main: Setting, line: Line, dense: Row, lowest: float) -> Contender | None:
    """Add to a strategy's rows its kept accuracy and least MACs; return what it is ranked by, None without points."""
    points = list(line.points.values())
    spent = [row["macs_ratio"] for row in points]
    contenders = [main.largest_entries[_key(row)].contender for row in (*points, dense)]
    height = curves.area(contenders, spent, lowest) if points and lowest in line.rows else None
    if height is None:
        return None
    interval = _interval(KEPT.keys, curves.kept_accuracy(height, contenders[-1], main.lone))
    least = _interval(MACS_AT_2.keys, curves.least_macs(contenders, spent, main.lone))
    if least[MACS_AT_2.key] == spent[0]:
        least[MACS_AT_2.key] = f"<= {spent[0]:.3f}"
    for row in line.rows.values():
        row |= interval | least
    return height


def _interval(keys: Sequence[str], interval: Interval) -> Row:
    """Return an interval as three columns."""
    ends = (None if x is None or math.isnan(x) else x for x in interval)
    return dict(zip(keys, ends, strict=True))


def _row(line: Line, budgets: Sequence[float], middle: float, declared: Sequence[str]) -> Row:
    """Return a strategy's row of the table, with the metrics of these keys, and without what comparisons say."""
    first = next(iter(line.rows.values()))
    row: Row = {"rank": NOT_RANKED, "strategy": line.strategy, "kind": line.kind}
    row |= {key: first.get(key) for column in (HOW, KEPT, MACS_AT_2) for key in column.keys}
    for budget in budgets:
        at = line.rows.get(budget)
        missed = at is not None and abs(at["macs_ratio"] / budget - 1) > MISSED
        row[accuracy_at(budget).key] = None if at is None else at["accuracy"]
        row[f"{accuracy_at(budget).key}_spent"] = at["macs_ratio"] if at is not None and missed else None
    row |= dict.fromkeys(("random_inside_delta", "random_inside_delta_low", "random_inside_delta_high"))
    row["versus_random_inside"] = None
    at_middle = line.rows.get(1.0 if line.strategy == DENSE else middle, {})
    row |= {key: at_middle.get(key) for key in ("selection_auroc", SPEED_UP.key, P_LABEL.key, *declared)}
    return row | {column.key: first.get(column.key) for column in (CHECKS, BADGE)}


def _rank(
    table: Sequence[Row], heights: Sequence[Contender | None], fair: Sequence[bool], lack: Sequence[bool]
) -> Pairs:
    """Add the ranks by area of strategies that are in fair competition, and return their comparisons.

    Those that lack cells have no say in how much others vary.
    """
    known = [(i, height) for i, height in enumerate(heights) if height is not None]
    places, apart = ([k for k, (i, _) in enumerate(known) if of[i]] for of in (fair, lack))
    pairs = paired.compare([height for _, height in known], apart).among(places)
    for k, (first, last) in zip(places, pairs.rank_sets(), strict=True):
        table[known[k][0]]["rank"] = str(first) if first == last else f"{first}-{last}"
    return pairs


def _beside_random(
    tested: Entries, table: Sequence[Row], rows: Sequence[Row | None], whole: Sequence[bool], lack: Sequence[bool]
) -> Pairs:
    """Add the differences to random tokens at one budget, and return the comparisons of ranked strategies there."""
    known = [(i, row) for i, row in enumerate(rows) if row is not None]
    copies = [dict(row) for _, row in known]
    apart = [k for k, (i, _) in enumerate(known) if lack[i]]
    pairs = paired.compare([tested[_key(row)].contender for row in copies], apart)
    random = references.random(copies)
    references.add_differences(copies, pairs, "random_inside_delta", random)
    able = {k for k, (i, _) in enumerate(known) if whole[i]}
    for row in copies:
        row["versus_random_inside"] = None
    references.add_marks(copies, pairs, "versus_random_inside", random, able)
    names = ("random_inside_delta", "random_inside_delta_low", "random_inside_delta_high", "versus_random_inside")
    for (i, _), row in zip(known, copies, strict=True):
        table[i] |= {name: row.get(name) for name in names}
    return pairs.among([k for k, (i, _) in enumerate(known) if table[i]["rank"] != NOT_RANKED])


def _measure(main: Setting, dense: Row) -> str:
    """Return what the measure of all rows is: dense's accuracy, and on what."""
    return f"dense: accuracy {text_of(dense, BY_KEY['accuracy'])} on {main.task}, track {main.track}"


def _significant(pairs: Pairs) -> str:
    """Return how many of all pairs differ significantly."""
    n = len(pairs.mean)
    return f"{int(pairs.better().sum())} of {n * (n - 1) // 2}"


def _order(row: Row) -> tuple[object, ...]:
    return row["kind"] == "oracle", row["rank"] == NOT_RANKED, -(row[KEPT.key] or 0), row["strategy"]


def _curve(line: Line) -> BudgetCurve:
    """Return the accuracies of a strategy by what it spends."""
    rows = sorted(line.rows.items(), key=lambda point: (point[1]["macs_ratio"], point[0]))
    names = ("macs_ratio", "accuracy", "accuracy_low", "accuracy_high")
    columns = (tuple(row[name] for _, row in rows) for name in names)
    return BudgetCurve(line.strategy, line.kind, tuple(asked for asked, _ in rows), *columns)
