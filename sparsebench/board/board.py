"""A board: all that tables, figures and the page show of a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebench.board.columns import EVERY, Column

Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Success rates of one row's trials by number of training samples, with Wilson 95 % intervals.

    Attributes:
        task, model, strategy, kind, budget: whose.
        sizes: rising numbers of training samples.
        rates, low, high: one each.
        n: trials at each size.
    """

    task: str
    model: str
    strategy: str
    kind: str
    budget: str
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    n: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """One group's accuracy of one row, mean over seeds with its 95 % interval, None from a single seed."""

    task: str
    model: str
    strategy: str
    kind: str
    budget: str
    group: str
    accuracy: float
    low: float | None
    high: float | None
    n_seeds: int


@dataclass(frozen=True)
class BudgetCurve:
    """Accuracy of one strategy by the share of dense MACs that it really spends, mean over seeds.

    Attributes:
        strategy, kind: whose.
        budgets: shares of dense MACs that were asked for, in the order of `spent`.
        spent: rising realised shares, mean over seeds.
        accuracy, low, high: one each, with the ends of its 95 % interval, None from a single seed.
    """

    strategy: str
    kind: str
    budgets: tuple[float, ...]
    spent: tuple[float, ...]
    accuracy: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Table:
    """A table of its own under another.

    Attributes:
        title: what stands above it.
        columns: of its rows.
    """

    title: str
    columns: tuple[Column, ...]
    rows: list[Row]


@dataclass(frozen=True)
class BudgetBoard:
    """The strategies of one task and model over their budgets.

    Attributes:
        task, model: their names.
        n_train: training samples.
        track: see `cell.Track`.
        budgets: falling shares of dense MACs that were asked for; `middle` the one nearest one half.
        rows: one a strategy; keys as in `budget_table.columns_of`.
        curves: one a row, dense's of the point at 1 alone.
        notes: lines that say what can be told apart.
        declared: columns of the metrics that the task declares.
        tables: what is measured beside it.
        about: what the data, the networks and the track are.
        best: the best strategies at each budget; keys as in `summary.COLUMNS`.
    """

    task: str
    model: str
    n_train: int
    track: str
    budgets: tuple[float, ...]
    middle: float
    rows: list[Row]
    curves: list[BudgetCurve]
    notes: list[str]
    declared: tuple[Column, ...] = ()
    tables: list[Table] = field(default_factory=list)
    about: str = ""
    best: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Board:
    """What records come to; a pure function of what lies in their folder.

    Attributes:
        rows: one a strategy and budget over all tasks; `by_task` one a task and model as well. Keys as in `columns`.
        columns: of those that rows may have each, with the task that those of `rows` were taken from.
        notes: what a reader must know besides.
        over_budgets: of the task that `rows` are of, None where it has a single budget; `budgets` of all tasks.
        curves, groups: of tasks that have them.
        bibtex: entries of what is in it.
        environments: machine and libraries by hash; `suites` lines that say what was asked for.
        pictures: PNG files by what they show, such as which tokens were kept.
        data, networks: what the pictures and the networks of a task are, in words, by the task; some are not known.
    """

    rows: list[Row]
    by_task: list[Row]
    notes: list[str]
    columns: Sequence[Column] = EVERY
    over_budgets: BudgetBoard | None = None
    budgets: list[BudgetBoard] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    bibtex: list[str] = field(default_factory=list)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    suites: list[str] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    networks: Mapping[str, str] = field(default_factory=dict)
