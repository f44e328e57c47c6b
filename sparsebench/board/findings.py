"""What a board says of its strategies, in sentences; pure functions of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebench.board.board import Row
from sparsebench.board.columns import NOT_RANKED
from sparsebench.board.references import RANDOM

MOST = 3
"""Strategies of which sentences are printed; the best of more."""
HALF = 0.5
"""Of several budgets of a strategy the one whose MACs are nearest to this share of dense's."""


def findings(rows: Sequence[Row]) -> list[str]:
    """Return sentences on the deployable strategies of a board with a row a strategy and budget.

    Is it better than random tokens inside the network, what does it cost against dense, what would an oracle gain; each
    with its 95 % interval, and "not significant" where it is.
    """
    able = [row for row in rows if row.get("accuracy") is not None]
    chosen = [_middle([row for row in able if row["strategy"] == name]) for name in _names(able)]
    lines = [line for row in chosen[:MOST] for line in _sentences(row)]
    return lines + list(dict.fromkeys(f"{_oracle(row, able)}." for row in chosen[:MOST]))


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the deployable strategies, in the order of the board."""
    return list(dict.fromkeys(row["strategy"] for row in rows if row["kind"] == "deployable"))


def _middle(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: (abs((row["macs_ratio"] or 0.0) - HALF), row["budget"]))


def _sentences(row: Row) -> list[str]:
    at = "" if row["budget"] in (None, "") else f" at {row['budget']}"
    if row["rank"] == NOT_RANKED:
        return [f"{row['strategy']}{at}: cells failed or are missing, so it is not ranked and nothing is concluded."]
    return [
        f"{row['strategy']}{at}: {_against_random(row)}.",
        f"Against dense: {_difference(row, 'accuracy_delta', 'versus_dense')}, for {_cost(row)}.",
    ]


def _against_random(row: Row) -> str:
    if row["random_inside_delta"] is None:
        return f"not compared with random tokens inside the network; run {RANDOM} beside it"
    said = _difference(row, "random_inside_delta", "versus_random_inside")
    return f"{said}, against random tokens inside the network ({RANDOM})"


def _cost(row: Row) -> str:
    return "unknown MACs" if row["macs_ratio"] is None else f"{row['macs_ratio']:.2f} of its MACs"


def _oracle(row: Row, rows: Sequence[Row]) -> str:
    """Return what knowing the relevant tokens gains at the row's budget, or at the nearest cost."""
    oracles = [one for one in rows if one["strategy"] == "oracle" and one["accuracy_delta"] is not None]
    if not oracles:
        return "No oracle was run, so what better scores could gain is not known"
    same = [one for one in oracles if one["budget"] == row["budget"]]
    nearest = min(same or oracles, key=lambda one: abs((one["macs_ratio"] or 0.0) - (row["macs_ratio"] or 0.0)))
    said = _difference(nearest, "accuracy_delta", "versus_dense")
    return f"An oracle, which knows the relevant tokens, at {nearest['budget']}: {said}, against dense"


def _difference(row: Row, name: str, mark: str) -> str:
    """Return a difference of accuracy in points, with its interval and what it comes to."""
    if row[name] is None:
        return "no difference is known"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    interval = "" if low is None or high is None else f" [{_points(low)}, {_points(high)}]"
    return f"{_points(row[name])} points{interval}, {row.get(mark) or 'not judged'}"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"  # no minus zero
