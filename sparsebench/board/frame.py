"""A board's rows as a DataFrame that can be computed with."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from sparsebench.board.columns import Column, Row, keys_of, rank_ends
from sparsebench.strategy import budget, spec

FLAGS = ("trained", "pareto", "pareto_speed")
"""Columns that are "yes" or "no" in files."""


def frame(rows: Sequence[Row], columns: Sequence[Column]) -> pd.DataFrame:
    """Return rows as a DataFrame; `attrs` says what each column is, with its unit.

    Flags are booleans. What is not reached is infinity.
    `rank_low` and `rank_high` are the ends of a rank; each parameter of a strategy that is not its default is a column
    `strategy.NAME`, what was asked for of a budget is `budget.macs` or `budget.keep_rate`.
    """
    table = pd.DataFrame(rows, columns=keys_of(columns))
    attrs = {key: column.what for column in columns for key in column.keys}
    for key in (column.key for column in columns if column.interval):
        attrs |= {f"{key}_{end}": f"{end} end of the 95 % interval of {key}" for end in ("low", "high")}
    for name in FLAGS:
        if name in table:
            table[name] = table[name].map({"yes": True, "no": False}).astype("boolean")
    for column in (column for column in columns if column.shown != "text"):
        for key in column.keys:
            table[key] = pd.to_numeric(table[key])
        bounded = [bool(row.get(f"{column.key}_at_most")) for row in rows]
        if any(bounded):
            table[f"{column.key}_at_most"] = bounded
            attrs[f"{column.key}_at_most"] = f"whether {column.key} may be less: no lower one was tried"
    _add_parts(table, attrs)
    table.attrs = attrs
    return table


def _add_parts(table: pd.DataFrame, attrs: dict[str, str]) -> None:
    """Add the parts of ranks, strategies and budgets as columns."""
    if "rank" in table:
        table["rank_low"], table["rank_high"] = (
            zip(*map(rank_ends, table["rank"]), strict=True) if len(table) else ([], [])
        )
        attrs |= {"rank_low": "first rank that it may have", "rank_high": "last rank that it may have"}
    params = [spec.parts_of(str(label))[1] for label in table.get("strategy", ())]
    amounts = [budget.parts_of(str(label)) for label in table.get("budget", ())]
    asked = [{name: float(x) for name, x in one.items() if name in ("macs", "keep_rate")} for one in amounts]
    for owner, parts in (("strategy", params), ("budget", asked)):
        for name in sorted({name for one in parts for name in one}):
            table[f"{owner}.{name}"] = [one.get(name) for one in parts]
            attrs[f"{owner}.{name}"] = f"{name} of the {owner}; missing where it is the default, or not asked for"
