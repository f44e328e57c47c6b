"""A board's rows as a DataFrame that can be computed with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparsebench.board.columns import Column, keys_of

if TYPE_CHECKING:
    import pandas as pd

FLAGS = ("trained", "pareto", "pareto_speed")
"""Columns that are "yes" or "no" in files."""
AT_MOST = "<= "
"""What stands before a number that is known to be no more than that."""
_RANKS = re.compile(r"(\d+)(?:-(\d+))?")
_NAMED = re.compile(r"[^()]*\((.*)\)", re.DOTALL)


def frame(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> pd.DataFrame:
    """Return rows as a DataFrame; `attrs` says what each column is, with its unit.

    Flags are booleans. What is not reached is infinity, and KEY_reached says so of each column where that may be.
    `rank_low` and `rank_high` are the ends of a rank; each parameter of a strategy that is not its default is a column
    `strategy.NAME`, what was asked for of a budget is `budget.macs` or `budget.keep_rate`.
    """
    import pandas as pd

    table = pd.DataFrame(rows, columns=keys_of(columns))
    attrs = {key: column.what for column in columns for key in column.keys}
    for key in (column.key for column in columns if column.interval):
        attrs |= {f"{key}_{end}": f"{end} end of the 95 % interval of {key}" for end in ("low", "high")}
    for name in FLAGS:
        if name in table:
            table[name] = table[name].map({"yes": True, "no": False}).astype("boolean")
    for column in columns:
        if column.shown != "text":
            _add_numbers(table, column, attrs)
    if "rank" in table:
        ranks = [_RANKS.fullmatch(str(rank)) for rank in table["rank"]]
        table["rank_low"] = [float(one[1]) if one else math.nan for one in ranks]
        table["rank_high"] = [float(one[2] or one[1]) if one else math.nan for one in ranks]
        attrs |= {"rank_low": "first rank that it may have", "rank_high": "last rank that it may have"}
    for owner, parts in (("strategy", parameters), ("budget", _amount)):
        given = [parts(str(label)) for label in table.get(owner, ())]
        for name in sorted({name for one in given for name in one}):
            table[f"{owner}.{name}"] = [one.get(name) for one in given]
            attrs[f"{owner}.{name}"] = f"{name} of the {owner}; missing where it is the default, or not asked for"
    table.attrs = attrs
    return table


def _add_numbers(table: pd.DataFrame, column: Column, attrs: dict[str, str]) -> None:
    """Make a column numbers; add whether each is reached, and whether it is only known to be no more than that."""
    import pandas as pd

    for key in column.keys:
        bounded = table[key].map(lambda value: isinstance(value, str) and value.startswith(AT_MOST))
        if bounded.any():
            table[f"{key}_at_most"] = bounded
            attrs[f"{key}_at_most"] = f"whether {key} may be less: no lower one was tried"
        table[key] = pd.to_numeric(table[key].map(_number_in))
    if column.shown == "samples" or column.key == "macs_at_2":
        known = table[column.key].notna()
        table[f"{column.key}_reached"] = (table[column.key] < math.inf).astype("boolean").where(known)
        attrs[f"{column.key}_reached"] = f"whether {column.key} is reached: it is infinity where it is not"


def _number_in(value: Any) -> Any:
    return float(value.removeprefix(AT_MOST)) if isinstance(value, str) and value.startswith(AT_MOST) else value


def parameters(label: str) -> dict[str, Any]:
    """Return the parameters in a strategy's label, NAME(PARAM=VALUE, ...), as numbers and booleans where they are."""
    inside = _NAMED.fullmatch(label)
    parts = re.split(r", (?=\w+=)", inside[1]) if inside else []
    return {name: _value(text) for name, _, text in (part.partition("=") for part in parts) if name}


def _amount(label: str) -> dict[str, Any]:
    """Return the share of the dense MACs or the keep rate that a budget's label says."""
    said = re.match(r"(macs|keep) ([\d.]+)\b", label)
    return {"macs" if said[1] == "macs" else "keep_rate": float(said[2])} if said else {}


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    return text
