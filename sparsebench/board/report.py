"""What a board tells, in which order: the data and the best strategies, then all of them, then what lies beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sparsebench.board.columns import (
    BADGE,
    BEST,
    BY_KEY,
    CHECKS,
    EVERY,
    GAPS,
    HOW,
    KEPT,
    MACS_AT_2,
    P_LABEL,
    SPEED_UP,
    TRIALS,
    Column,
    Row,
    accuracy_at,
    dicts,
    short,
)
from sparsebench.board.judge import RANDOM, Curves, Leaderboard, Ranking
from sparsebench.board.settings import DENSE, about
from sparsebench.board.tables import Report, Table, with_values
from sparsebench.errors import few

NAMED = 3
"""Of strategies that are not significantly worse those that are named; of the others it is said how many there are."""
LEGEND = (
    "[ ]: 95 % intervals over seeds and items, not adjusted for multiple comparisons. Differences and ratios are to "
    "dense unless named.",
    "Oracles see the relevance mask and are not ranked.",
)
LEGEND_OF_BEST = (
    "All columns but random_inside describe the most accurate strategy. [ ]: 95 % intervals. Gains are computed before "
    "rounding.",
    "random_inside: random tokens are dropped inside the network, at the same MACs.",
    "Speed-up: images/s over dense's on the same machine; below 1 is slower than dense, - is not measured.",
)


def report(judged: Leaderboard, notes: Sequence[str] = (), *, whole: bool = True) -> Report:
    """Return what a leaderboard tells, with lines below.

    Args:
        judged: the leaderboard; files for programs have its rows, one a strategy and budget.
        notes: the lines.
        whole: whether it begins with what was measured and the best at each budget, not with the full table.
    """
    tables: list[Table] = []
    for one in judged.rankings:
        title = one.setting.title if judged.by_task else ""
        if whole and (one.curves is not None or not judged.by_task):
            tables.append(best(one, title))
        if one.curves is not None:
            title = ", ".join(filter(None, ("All strategies" if whole else "", title)))
            tables += _of_curves(one, one.curves, judged, title)
    several = judged.over_budgets is not None
    others = [row for one in judged.rankings if one.curves is None for row in dicts(one.every)]
    if others or not several:
        title = "Other tasks" if several else "All strategies" if tables else ""
        tables.append(Table(others, judged.columns, title, legend=LEGEND, explained=True))
    return Report(tables, Table(dicts(judged.rows), judged.columns), notes)


def best(one: Ranking, title: str = "") -> Table:
    """Return what was measured, and at each budget the most accurate strategy and those that are not worse."""
    every, ranked = dicts(one.every), dicts(one.rows)
    beside = dict.fromkeys(BY_KEY["accuracy_delta"].keys)
    rows = [{**row, **beside, "budget": "1", "best": DENSE} for row in every if row["strategy"] == DENSE]
    random = {_budget_of(row): row["accuracy"] for row in reversed(every) if row["strategy"] == RANDOM}
    budgets = defaultdict[tuple[float, str], list[int]](list)
    for i, row in enumerate(ranked):
        if row["kind"] == "deployable":
            budgets[_budget_of(row)].append(i)
    for (share, label), at in sorted(budgets.items()):
        better = one.pairs.among(at).better()
        first, *others = sorted(
            (ranked[i] for k, i in enumerate(at) if not better[:, k].any()), key=lambda row: -row["accuracy"]
        )
        rows.append({
            **first, "budget": label or f"{-share:g}", "random": random.get((share, label)), "best": first["strategy"],
            "equal": few([row["strategy"] for row in others], NAMED),
        })  # fmt: skip
    return Table(rows, BEST, title, about(one.setting), legend=LEGEND_OF_BEST, main=False)


def _budget_of(row: Row) -> tuple[float, str]:
    """Return the share of dense MACs that a row was asked for, negative, or else the label of its budget."""
    return (0.0, row["budget"]) if row["asked"] is None else (-row["asked"], "")


def columns_of(board: Curves, declared: Sequence[Column] = ()) -> list[Column]:
    """Return the columns of a board with a row a strategy in which some row has something, with those of tasks."""
    at = f"@{short(board.middle)}"
    every = (
        BY_KEY["rank"]._replace(
            what="by kept accuracy; 3-9: two strategies are significantly better than it, six do not differ "
            "significantly from it, and all others are worse; dense has no rank"
        ),
        BY_KEY["strategy"],
        HOW,
        KEPT,
        MACS_AT_2,
        *map(accuracy_at, board.budgets),
        BY_KEY["random_inside_delta"]._replace(heading=f"gain over random_inside {at}"),
        BY_KEY["versus_random_inside"],
        BY_KEY["selection_auroc"]._replace(heading=f"AUROC {at}"),
        SPEED_UP._replace(heading=f"speed-up {at}"),
        P_LABEL._replace(heading=f"p(label) {at}"),
        *(column._replace(heading=f"{column.heading} {at}") for column in declared),
        CHECKS,
        BADGE,
    )
    return with_values(dicts(board.rows), every)


def _of_curves(one: Ranking, board: Curves, judged: Leaderboard, title: str) -> list[Table]:
    """Return the table with a row a strategy, and those of gaps, with the accuracy there, and of trials beside it."""
    known = {column.key for column in EVERY}
    columns = columns_of(board, [c for c in judged.columns if c.key not in known and c.task in ("", one.task)])
    others = (one.every["accuracy"].notna() & one.every["line"].isna()).sum()
    apart = (f"{others} rows have budgets that are no shares of dense MACs; CSV and JSON have them.",) if others else ()
    tables = [Table(dicts(board.rows), columns, title, legend=(*LEGEND, *apart), explained=True)]
    rows = sorted(dicts(one.every.sort_index()), key=lambda row: (row["kind"] == "oracle", row["strategy"] != DENSE))
    for what, key, of in (
        ("Spurious correlations", "accuracy_with_gap", GAPS),
        ("Sample complexity", "sample_complexity", TRIALS),
    ):
        if part := [row for row in rows if row.get(key) is not None]:
            task = next((column.task for column in judged.columns if column.key == of[2].key and column.task), one.task)
            tables.append(Table(part, of, f"{what}, task {task}", main=False, explained=True))
    return tables
