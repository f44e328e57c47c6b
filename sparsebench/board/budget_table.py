"""Boards as text: with a row a strategy where strategies have several budgets, and with a row a budget elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparsebench.board import latex, summary
from sparsebench.board.board import BudgetBoard, Row, Table
from sparsebench.board.build import columns_of as columns_of_rows
from sparsebench.board.columns import (
    BADGE,
    BY_KEY,
    BY_TASK,
    CHECKS,
    EVERY,
    HOW,
    KEPT,
    MACS_AT_2,
    NOT_RANKED,
    NOT_REACHED,
    P_LABEL,
    SPEED_UP,
    Column,
    accuracy_at,
    short,
    text_of,
)
from sparsebench.board.entries import TRACK
from sparsebench.board.fit import ALL, Choice
from sparsebench.board.tables import (
    LEGEND_OF_CHECKS,
    NOT_REACHED_MEANS,
    as_list,
    cells,
    grid,
    legend_of,
    meanings_of,
    render,
    shown_columns,
)
from sparsebench.errors import UserError
from sparsebench.text import markdown

BEST = (
    "Of each budget the strategies from which the best one does not differ significantly, and the numbers of the best "
    "one. Random is random_inside: as many tokens inside the network, by chance. Brackets are 95 % intervals."
)
LEGEND = (
    "A rank of 3-9: two strategies are significantly better, and all but nine are significantly worse. "
    "Kept accuracy: mean height of accuracy by realised MACs, in straight lines from the lowest budget to dense at 1, "
    "over dense's accuracy; ranks are by it. MACs at -2 %: smallest share of dense MACs at which that line, followed "
    "down from 1, is at most 2 points below dense; not reached: it is below at the largest budget; <=: it never is. "
    "@: accuracy at a budget, and in ( ) what was spent where that is more than 2 % off. [ ]: 95 % intervals of seeds "
    "and items, each for itself. vs random_inside: all strategies judged together at that budget. Speed-up: images/s "
    "over dense's. Oracles see the relevance mask and are not ranked, nor is dense."
)


def columns_of(board: BudgetBoard) -> list[Column]:
    """Return the columns of a board's rows in which some row has something."""
    at = f"@{short(board.middle)}"
    every = (
        BY_KEY["rank"]._replace(what="ranks by kept accuracy that the strategy may have"),
        BY_KEY["strategy"],
        HOW,
        KEPT,
        MACS_AT_2,
        *map(accuracy_at, board.budgets),
        BY_KEY["random_inside_delta"]._replace(heading=f"- random_inside {at}"),
        BY_KEY["versus_random_inside"],
        BY_KEY["selection_auroc"]._replace(heading=f"AUROC {at}"),
        SPEED_UP._replace(heading=f"speed-up {at}"),
        P_LABEL._replace(heading=f"p(label) {at}"),
        *(column._replace(heading=f"{column.heading} {at}") for column in board.declared),
        CHECKS,
        BADGE,
    )
    return [one for one in every if any(row.get(one.key) not in (None, "", NOT_RANKED) for row in board.rows)]


class _Part(NamedTuple):
    """One table of a text, with what stands above and below; `main` if a reader chooses its columns."""

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    main: bool = False
    legend: str = ""
    below: Sequence[str] = ()
    above: str = ""


def text(
    rows: Sequence[Row],
    budgets: Sequence[BudgetBoard],
    form: str,
    notes: Sequence[str] = (),
    choice: Choice = ALL,
    columns: Sequence[Column] = EVERY,
) -> str:
    """Return a board in one of FORMATS: tables of curves, then the other rows; CSV and JSON have all rows.

    Args:
        rows: one a strategy and budget.
        budgets: those of their tasks that have several budgets.
        form: see `tables.render`.
        notes: lines below.
        choice: of columns.
        columns: that rows may have, see `Leaderboard`.

    Raises:
        UserError: another format, or a column that there is not.
    """
    if not budgets or form not in ("table", "md", "latex"):
        shown = columns_of_rows(rows, columns) if form == "csv" else shown_columns(rows, columns)
        return table_of_choice(rows, shown, form, notes, legend_of(rows, shown), choice)
    summed = form != "latex" and not choice.names
    parts = [part for one in budgets for part in _parts(one, "task" in rows[0], summed)]
    several = {(one.task, one.model, one.n_train, one.track) for one in budgets}
    others = [row for row in rows if (*(row.get(column.key) for column in BY_TASK), _track(row)) not in several]
    if others and "task" in rows[0]:
        shown = shown_columns(others, columns)
        parts.append(_Part("Other tasks", others, shown, True, legend_of(others, shown)))
    choice.check([column for part in parts if part.main for column in part.columns])
    done = "\n".join if form == "latex" else "\n\n".join
    made = done(line for part in parts for line in _lines(part, form, choice))
    if form == "latex":
        return made + "".join(f"% {' '.join(note.split())}\n" for note in notes)
    return "\n\n".join([made, *as_list(notes, form)]) + "\n"


def _track(row: Row) -> str:
    """Return the track of a row of a board by task; those that say none are of the first."""
    return str(row.get("track") or TRACK)


def table_of_choice(
    rows: Sequence[Row], columns: Sequence[Column], form: str, notes: Sequence[str], legend: str, choice: Choice
) -> str:
    """Return one table with the columns that are chosen, or have room.

    Raises:
        UserError: another format, or a column that there is not.
    """
    if choice.names and form == "json":
        raise UserError("--columns is of tables", got="--format json", allowed="table, md, csv or latex")
    choice.check(columns)
    columns = choice.choose(columns)
    if form == "table":
        rows, columns = choice.fit(rows, columns)
    return render(rows, form, notes, columns, legend)


def first(board: BudgetBoard) -> str:
    """Return in Markdown what a board tells first: what was measured, and the best strategies at each budget."""
    return "\n\n".join(_lines(_best(board, ""), "md", ALL))


def _best(board: BudgetBoard, title: str) -> _Part:
    columns = [one for one in summary.COLUMNS if any(row[one.key] for row in board.best)]
    return _Part(title, board.best, columns, legend=BEST, above=board.about)


def _parts(board: BudgetBoard, titled: bool, summed: bool) -> list[_Part]:
    """Return the tables of a board of curves, after that of the best strategies where it is `summed` up."""
    columns = columns_of(board)
    title = f"{board.task}, {board.model}, N {board.n_train}" if titled else ""
    legend = " ".join([LEGEND, *([LEGEND_OF_CHECKS] if CHECKS in columns else []), *meanings_of(board.declared)])
    beside = [_beside(one) for one in board.tables]
    best = [_best(board, title)] if summed else []
    if summed:
        title = f"All strategies, {title}" if title else "All strategies"
    return [*best, _Part(title, board.rows, columns, True, legend, board.notes), *beside]


def _beside(table: Table) -> _Part:
    """Return a table of what was measured beside the curves."""
    columns = [one for one in table.columns if any(row.get(one.key) not in (None, "") for row in table.rows)]
    said = any(NOT_REACHED in text_of(row, column) for row in table.rows for column in columns)
    return _Part(table.title, table.rows, columns, legend=NOT_REACHED_MEANS if said else "")


def _lines(part: _Part, form: str, choice: Choice) -> list[str]:
    """Return the paragraphs of a table."""
    columns = choice.choose(part.columns) if part.main else list(part.columns)
    rows = list(part.rows)
    if form == "latex":
        caption = " ".join(filter(None, [part.title and f"{part.title}.", part.above, part.legend]))
        return [latex.table(columns, cells(rows, columns, form), caption, part.below)]
    if form == "table":
        rows, columns = choice.fit(rows, columns)
    texts = (part.title, part.above, part.legend)
    title, above, legend = ((markdown(x, code=True) if form == "md" else x) for x in texts)
    shown = (title, above, grid(rows, columns, form), *as_list(part.below, form), legend)
    return [x for x in shown if x] if columns else []
