"""Ranks of rows: as numbers, as text, and as an order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sparsebench.board.columns import NOT_RANKED, RANK_ENDS, rank_text
from sparsebench.stats.paired import Pairs


def remove_ranks(rows: pd.DataFrame) -> None:
    """Write that no row is ranked."""
    rows[["rank", *RANK_ENDS]] = NOT_RANKED, math.nan, math.nan


def add_ranks(rows: pd.DataFrame, ranked: Sequence[Any], pairs: Pairs) -> None:
    """Write the ranks of some rows.

    Args:
        rows: the rows.
        ranked: the labels of the ranked ones in the index.
        pairs: the comparisons of the ranked ones, in this order.
    """
    ends = pairs.ranks()
    rows.loc[ranked, list(RANK_ENDS)] = ends
    rows.loc[ranked, "rank"] = [rank_text(low, high) for low, high in ends]


def in_order(rows: pd.DataFrame, keys: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows sorted by several keys, each with a value for each row."""
    table = pd.DataFrame(keys, rows.index)
    return rows.loc[table.sort_values(list(keys)).index]
