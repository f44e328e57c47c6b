"""Tables as text for people and as files for programs. Each format is an entry of FORMATS."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from tabulate import SEPARATING_LINE, tabulate

from sparsebench.board.columns import NOT_RANKED, Column, Row, file_value, keys_of, side, text_of
from sparsebench.errors import UserError, entry_names, is_address, short_names

DIGITS = 10
"""Significant digits of numbers in files; differences between machines are beyond them."""
WIDTH = 100
LINES = 45
"""Most rows of a LaTeX table, so that it fits a page."""
STRATEGY = "strategy"
STRATEGIES_OF_ROW = (STRATEGY, "other")
"""Keys of the strategies of a row: one, or the two of a pair."""
BETWEEN = 2
"""Characters between columns. Headings are counted as this much wider."""
STAY = (
    "task",
    "rank",
    "strategy",
    "other",
    "variant",
    "badge",
    "authors",
    "budget",
    "accuracy",
    "kept_accuracy",
    "told",
    "spearman",
    "agrees",
    "opposite",
    "better",
    "worse",
)
"""Keys of columns that narrow terminals keep."""
MINOR = ("n_train", "kind", "trained", "parameters")
"""Keys of columns that narrow terminals leave out first."""
CLEAR = {
    "task",
    "model",
    "strategy",
    "kind",
    "budget",
    "other",
    "other_budget",
    "device",
    "n_seeds",
    "track",
    "accuracy_with_gap",
}
"""Keys of columns that the legend does not explain."""
ROOM = 12
"""Characters that a clipped text keeps at least."""
LONG = {"authors": 24}
"""Keys of columns whose texts are clipped first, and the characters that they keep."""
INTERVALS = "[ ]: 95 % intervals over seeds and items (one seed: items alone), not adjusted for multiple comparisons."
_FORMULA = re.compile(r"(^|;)(?=\s*(?:[=+@\uff0b\uff0d\uff1d\uff20]|-.))")
"""Where a spreadsheet sees a formula. Full-width signs count, and semicolons divide cells in many countries."""
_RANGE = re.compile(r"(\d+)-(\d+)")
"""A range of ranks such as 3-9, which a spreadsheet reads as a date."""
_LINKS = r"<(?=[A-Za-z/!?])|(?<!\[ )\](?=[(\[:])|:(?=//)|(?<=\b[wW]{3})\."
"""Beginnings and ends of links, images and HTML in Markdown."""
_SIGNS = r"[\\|~$]|\*(?=\S)|(?<=\S)\*|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)"
"""Signs of emphasis, formulas and entities in Markdown, and `|`, which divides cells. Underscores in words are text."""
_MARKUP, _MARKUP_OR_CODE = re.compile(f"({_SIGNS}|{_LINKS})"), re.compile(f"({_SIGNS}|{_LINKS}|`)")
_ADDRESS = re.compile(r"(?<=[\w.+-])@(?=[\w-]+\.)")


class Table(NamedTuple):
    """A table with title and legend.

    Attributes:
        rows: mappings with the keys of the columns.
        columns: all columns, for files; people see those with `Column.tables` and a value in some row.
        title: heading above the table.
        above: paragraph above the table.
        below: paragraph below the table, before the legend.
        legend: sentences below the table.
        main: whether the user's choice of columns applies to it.
        bold: meaning of the values that rows mark with KEY_best; LaTeX has them in bold.
        label: LaTeX label.
        group: key of the rows' groups, which are separated by rules; by default oracles are separated from the rest.
        explained: whether the legend explains the columns.
    """

    rows: Sequence[Row]
    columns: Sequence[Column]
    title: str = ""
    above: str = ""
    below: str = ""
    legend: Sequence[str] = ()
    main: bool = True
    bold: str = ""
    label: str = ""
    group: str = ""
    explained: bool = False

    @property
    def shown(self) -> list[Column]:
        """The columns that people see, see `with_values`."""
        return with_values(self.rows, self.columns)


class Report(NamedTuple):
    """Tables with notes.

    Attributes:
        tables: tables for people.
        data: the table for files.
        notes: lines below all tables.
    """

    tables: Sequence[Table]
    data: Table
    notes: Sequence[str] = ()


class Choice(NamedTuple):
    """A user's choice of columns, and the width of the terminal.

    Attributes:
        names: keys of the main table's columns, in order; empty for all.
        width: characters of a line in a terminal; None for no limit.
    """

    names: tuple[str, ...] = ()
    width: int | None = None

    def of(self, table: Table, columns: Sequence[Column]) -> list[Column]:
        """Return the chosen columns of a table, or `columns` if the choice does not apply to it."""
        if not self.names or not table.main:
            return list(columns)
        by_key = {column.key: column for column in table.columns}
        return [by_key[name] for name in self.names if name in by_key]

    def report(self, report: Report, for_people: bool) -> Report:
        """Return a report whose main tables, or whose data if not `for_people`, have the chosen columns.

        Tables may have a row for each strategy, and data a row for each strategy and budget. If only the data have the
        columns, the rows of the data are shown; if only the tables have them, a file has the rows of the tables.

        Raises:
            UserError: no column has one of the names, or neither the tables nor the data have all columns.
        """
        main = [table for table in report.tables if table.main]
        of_tables = {column.key: column for table in main for column in table.columns}
        of_data = {column.key: column for column in report.data.columns}
        first, second = (of_tables, of_data) if for_people else (of_data, of_tables)
        for name in self.names:
            if name not in first and name not in second:
                raise UserError("--columns", got=f"'{name}'", allowed=list(first | second))
        if first.keys() >= set(self.names):
            return report
        if not second.keys() >= set(self.names):
            several = " or ".join(", ".join(columns) for columns in (first, second))
            raise UserError("no table has all of these --columns", got=", ".join(self.names), allowed=several)
        if for_people:
            return report._replace(tables=[report.data._replace(explained=True)])
        rows = [row for table in main for row in table.rows]
        return report._replace(data=Table(rows, list(of_tables.values())))


ALL = Choice()


def render(report: Report | Table, form: str, choice: Choice = ALL) -> str:
    """Return a report, or a single table, in one of FORMATS.

    Formats for people show intervals next to values. CSV and JSON have every column of the data, with DIGITS digits.

    Raises:
        UserError: unknown format or column.
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=list(FORMATS))
    if isinstance(report, Table):
        report = Report([report], report)
    write, for_people = FORMATS[form]
    return write(choice.report(report, for_people), choice)


def with_values(rows: Sequence[Row], columns: Sequence[Column]) -> list[Column]:
    """Return the columns for people in which some row has a value; if there are no rows, all columns for people."""

    def has_value(column: Column) -> bool:
        return any(row.get(column.key) not in (None, "", NOT_RANKED) for row in rows)

    visible = [column for column in columns if column.tables]
    return [column for column in visible if has_value(column)] if rows else visible


def legend_of(table: Table, columns: Sequence[Column]) -> list[str]:
    """Return lines on the meanings of columns and on the tasks that they were taken from, then the table's legend."""
    meanings, tasks = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for column in columns if table.explained else ():
        if column.what and column.key not in CLEAR:
            meanings[column.what].append(column.heading)
        if column.task:
            tasks[column.task].append(column.heading)
    lines = [f"{', '.join(headings)}: {meaning}." for meaning, headings in meanings.items()]
    lines += [f"Of task {task}, where it was run: {', '.join(headings)}." for task, headings in tasks.items()]
    lines += [INTERVALS] * (table.explained and any(column.interval for column in columns))
    return [*lines, *table.legend]


def _text(report: Report, choice: Choice, style: str, escape: Callable[..., str]) -> str:
    """Return the tables and notes of a report in a style of tabulate, with escaped texts."""
    parts: list[str] = []
    for table in report.tables:
        rows = table.rows
        columns = choice.of(table, table.shown)
        if style == "simple" and choice.width is not None:
            rows, columns = fit(rows, columns, choice.width)
        lines: list[Any] = [[_text_in_cell(row, column, style, escape) for column in columns] for row in rows]
        for place in reversed(_rules(table, rows)) if style == "simple" else ():
            lines.insert(place, SEPARATING_LINE)
        headings = [escape(column.title) for column in columns]
        sides = [side(column) for column in columns]
        text = tabulate(lines, headings, style, disable_numparse=True, colalign=sides)
        texts = (table.title, table.above, table.below, *legend_of(table, columns))
        title, above, below, *legend = (escape(words, code=True) for words in texts)
        parts += [title, above, text, below, _bullets(legend)] if columns else []
    return "\n\n".join(filter(None, [*parts, _bullets(map(escape, report.notes))])) + "\n"


def _text_in_cell(row: Row, column: Column, style: str, escape: Callable[..., str]) -> str:
    """Return the text of a value; in Markdown an address is a link."""
    text = text_of(row, column)
    if style == "pipe" and column.shown == "link" and is_address(text):
        return f"[{column.heading}]({text})"
    return escape(text)


def _unchanged(text: str, code: bool = False) -> str:
    return text


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _rules(table: Table, rows: Sequence[Row]) -> list[int]:
    """Return the rows that have a rule above them: the first row of each group but the first, or the first oracle."""
    groups = [row.get(table.group) if table.group else row.get("kind") == "oracle" for row in rows]
    return [place for place, (group, other) in enumerate(pairwise(groups), 1) if group != other]


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "_": r"\_",
        "%": r"\%",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "`": r"\textasciigrave{}",
    }
)


def _latex_text(text: str) -> str:
    """Return a text for LaTeX, with question marks for characters beyond Latin-1, which pdflatex's fonts lack."""
    visible = "".join(map(_visible, text))
    return visible.encode("latin-1", "replace").decode("latin-1").translate(_LATEX)


def _visible(letter: str) -> str:
    """Return a character, a blank for one of its kinds, or a question mark for one that cannot be printed."""
    if letter.isspace():
        return " "
    return letter if letter.isprintable() else "?"


def _latex(report: Report, choice: Choice) -> str:
    """Return a `table*` for each table. LaTeX scales it down if it is wider than the text."""
    parts = [
        _latex_table(part, choice.of(part, table.shown))
        for table in map(_with_entry_names, report.tables)
        for part in _of_a_page(table)
    ]
    return "\n".join(parts) + "".join(f"% {' '.join(note.split())}\n" for note in report.notes)


def _of_a_page(table: Table) -> list[Table]:
    """Split a table into parts that fit a page each, between groups where possible."""
    parts: list[list[Row]] = [[]]
    for _, rows in groupby(table.rows, key=lambda row: row.get(table.group)):
        group = list(rows)
        for chunk in (group[i : i + LINES] for i in range(0, len(group), LINES)):
            if parts[-1] and len(parts[-1]) + len(chunk) > LINES:
                parts.append([])
            parts[-1].extend(chunk)
    first, *others = parts
    continued = table._replace(label="", above="Continued.", below="", legend=(), explained=False)
    return [table._replace(rows=first), *(continued._replace(rows=rows) for rows in others)]


def _with_entry_names(table: Table) -> Table:
    """Return a table whose entries of one strategy have only the parameters that tell them apart.

    The legend has the parameters that they have in common.
    """
    names = [name for row in table.rows for name in strategies_of(row)]
    shorter, shared = entry_names(names)
    if not shared:
        return table
    rows = []
    for row in table.rows:
        strategies = {key: row[key] for key in STRATEGIES_OF_ROW if row.get(key) in shorter}
        rows.append(row | {key: shorter[name] for key, name in strategies.items()})
    legend = [f"All rows of {strategy} have {parameters}." for strategy, parameters in shared.items()]
    return table._replace(rows=rows, legend=[*table.legend, *legend])


def strategies_of(row: Row) -> list[str]:
    """Return the strategies of a row: one, the two of a pair, or none."""
    return [row[key] for key in STRATEGIES_OF_ROW if isinstance(row.get(key), str)] if STRATEGY in row else []


def _latex_table(table: Table, columns: Sequence[Column]) -> str:
    if not table.rows or not columns:
        return "% no rows\n"
    bold = f"Bold: {table.bold}." if table.bold else ""
    title = f"{table.title}." if table.title else ""
    caption = " ".join(filter(None, [title, table.above, table.below, *legend_of(table, columns), bold]))
    body = [_latex_line(_latex_cell(row, column, bool(table.bold)) for column in columns) for row in table.rows]
    for place in reversed(_rules(table, table.rows)):
        body.insert(place, r"\midrule")
    label = [f"\\label{{{table.label}}}"] if table.label else []
    return "\n".join(
        [
            r"% needs \usepackage{booktabs,graphicx}",
            r"\begin{table*}",
            r"\centering",
            r"\footnotesize",
            f"\\sbox0{{\\begin{{tabular}}{{{''.join(side(column)[0] for column in columns)}}}",
            r"\toprule",
            _latex_line(_latex_text(column.title) for column in columns),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}%",
            r"\ifdim\wd0>\textwidth\resizebox{\textwidth}{!}{\usebox0}\else\usebox0\fi",
            f"\\caption{{{_latex_text(caption)}}}",
            *label,
            r"\end{table*}",
            "",
        ]
    )


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(row: Row, column: Column, bold: bool) -> str:
    text = _latex_text(text_of(row, column))
    if column.shown != "text":
        text = re.sub(r"-(?=\d)", "$-$", text)
    return rf"\textbf{{{text}}}" if bold and row.get(f"{column.key}_best") else text


def _csv(report: Report, choice: Choice) -> str:
    keys = keys_of(choice.of(report.data, report.data.columns))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([[cell(value) for value in _values(row, keys).values()] for row in report.data.rows])
    return out.getvalue()


def _json(report: Report, choice: Choice) -> str:
    keys = keys_of(choice.of(report.data, report.data.columns))
    rows = [_values(row, keys) for row in report.data.rows]
    return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _values(row: Row, keys: Sequence[str]) -> Row:
    """Return a row's values for files, rounded to DIGITS."""
    values: Row = {}
    for key in keys:
        value = file_value(row, key)
        values[key] = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
    return values


def cell(value: Any) -> Any:
    """Return a value for CSV: a quote precedes each text that a spreadsheet would read as a formula, 3-9 is 3 to 9."""
    if not isinstance(value, str):
        return value
    if between := _RANGE.fullmatch(value):
        return f"{between[1]} to {between[2]}"
    return _FORMULA.sub(r"\1'", value)


def markdown(text: str, code: bool = False) -> str:
    """Escape a plain text for Markdown, so that it makes no link, image or HTML, and unless `code` no code."""
    escaped = (_MARKUP if code else _MARKUP_OR_CODE).sub(r"\\\1", text)
    return _ADDRESS.sub("@ ", escaped)


FORMATS: dict[str, tuple[Callable[[Report, Choice], str], bool]] = {
    "table": (partial(_text, style="simple", escape=_unchanged), True),
    "md": (partial(_text, style="pipe", escape=markdown), True),
    "csv": (_csv, False),
    "json": (_json, False),
    "latex": (_latex, True),
}
"""By format, the function that writes a report, and whether it writes tables for people rather than data."""


def fit(
    rows: Sequence[Row], columns: Sequence[Column], width: int, order: Sequence[str] | None = None
) -> tuple[list[Row], list[Column]]:
    """Return rows and columns that fit into `width` characters.

    Texts of LONG are clipped first. Then intervals are left out, from the right, then columns in `order`, by default
    that of `_order`. At last the longest texts are clipped.
    """
    rows = _with_clipped_texts(rows, columns, width)
    remaining = list(columns)
    widths = {column: _width(rows, column) for column in columns}

    def excess() -> int:
        return sum(widths[column] for column in remaining) + BETWEEN * (len(remaining) - 1) - width

    for place in reversed(range(len(columns))):
        if excess() > 0 and columns[place].interval:
            remaining[place] = columns[place]._replace(interval=False)
            widths[remaining[place]] = _width(rows, remaining[place])
    for key in _order(rows, columns) if order is None else order:
        if excess() > 0:
            remaining = [column for column in remaining if column.key != key]

    clipped = list(rows)
    of_pair = [column for column in remaining if column.key in STRATEGIES_OF_ROW]
    for column in sorted(remaining, key=lambda column: -widths[column]):
        if column.shown == "text" and excess() > 0:
            # The strategies of a pair get one width, so that a short name means one strategy in both columns.
            together = of_pair if column in of_pair else [column]
            each = max(ROOM, widths[column] - math.ceil(excess() / len(together)))
            for one in together:
                widths[one] = min(widths[one], each)
            clipped = _clip(clipped, [one.key for one in together], each)
    return clipped, remaining


def _with_clipped_texts(rows: Sequence[Row], columns: Sequence[Column], width: int) -> Sequence[Row]:
    """Return rows in which texts of LONG are clipped, if the rows are wider than `width` characters."""
    if sum(_width(rows, column) for column in columns) + BETWEEN * (len(columns) - 1) <= width:
        return rows
    for column in columns:
        if column.key in LONG:
            rows = _clip(rows, [column.key], LONG[column.key])
    return rows


def _order(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Return the keys of the columns that may be left out: those of MINOR, then others from the right.

    Accuracies at budgets come last, and columns of STAY are never left out. The number of seeds stays if it differs
    between rows.
    """
    stay = {*STAY}
    if len({row.get("n_seeds") for row in rows}) > 1:
        stay.add("n_seeds")
    optional = [column for column in reversed(columns) if column.key not in stay]
    optional.sort(key=lambda column: (column.shown == "spent", column.key not in MINOR))
    return [column.key for column in optional]


def _clip(rows: Sequence[Row], keys: Sequence[str], width: int) -> list[Row]:
    """Return rows whose texts in some columns have at most `width` characters; different texts stay different."""
    short = short_names([row[key] for row in rows for key in keys if isinstance(row[key], str)], width)
    return [row | {key: short.get(row[key], row[key]) for key in keys} for row in rows]


def _width(rows: Sequence[Row], column: Column) -> int:
    return max([len(column.title) + BETWEEN, *(len(text_of(row, column)) for row in rows)])
