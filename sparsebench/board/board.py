"""A board: all that tables, figures and the page show of a run's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
class Board:
    """What records come to; a pure function of what lies in their folder.

    Attributes:
        rows: one a strategy and budget over all tasks; `by_task` one a task and model as well. Keys as in `columns`.
        notes: what a reader must know besides.
        curves, groups: of tasks that have them.
        bibtex: entries of what is in it.
        environments: machine and libraries by hash; `suites` lines that say what was asked for.
        pictures: PNG files by what they show, such as which tokens were kept.
    """

    rows: list[Row]
    by_task: list[Row]
    notes: list[str]
    curves: list[Curve] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    bibtex: list[str] = field(default_factory=list)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    suites: list[str] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
