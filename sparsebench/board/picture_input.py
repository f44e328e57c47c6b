"""The tables and facts that pictures are drawn from, taken from a board's rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sparsebench.board.board import Board, Row
from sparsebench.board.entries import DENSE

DELTA = ("accuracy_delta", "accuracy_delta_low", "accuracy_delta_high")
TRACKS = {
    "frozen": "strategies act in the test only",
    "tuned": "networks trained on with the strategy",
    "scratch": "networks trained with the strategy",
}


def accuracies(board: Board) -> pd.DataFrame:
    """Return a row a strategy and budget, as `picture.curves` takes it; a budget that is no share is part of a name."""
    if board.over_budgets is None:
        rows = [row for row in board.rows if row["accuracy"] is not None]
        found = [
            _row(_name(row, rows), row | {"budget": None}, row, _ranks(row["rank"])) for row in rows
        ]
    else:
        deltas = {_point(row): row for row in board.rows}
        found = []
        for curve, summary in zip(board.over_budgets.curves, board.over_budgets.rows, strict=True):
            ends = zip(curve.budgets, curve.spent, curve.accuracy, curve.low, curve.high, strict=True)
            for budget, spent, accuracy, low, high in ends:
                one = {"budget": budget, "macs_ratio": spent, "accuracy": accuracy, "kind": curve.kind}
                one |= {"accuracy_low": low, "accuracy_high": high}
                beside = deltas.get((curve.strategy.split(" ")[0], spent, accuracy), {})
                found.append(_row(curve.strategy, one, beside, _ranks(summary["rank"])))
    names = ("strategy", "kind", "budget", "macs_ratio", "accuracy", "accuracy_low", "accuracy_high",
             "rank_first", "rank_last", *DELTA)  # fmt: skip
    frame = pd.DataFrame(found, columns=list(names))
    return frame.astype(dict.fromkeys(names[3:], float))


def values(board: Board, column: str) -> pd.DataFrame:
    """Return a row a strategy that has a value of a column of the board, at the budget nearest one half."""
    rows = [row for row in board.rows if row.get(column) is not None]
    if board.over_budgets is not None:
        others = {f"macs {budget:g}" for budget in board.over_budgets.budgets if budget != board.over_budgets.middle}
        rows = [row for row in rows if " ".join(row["budget"].replace(",", " ").split()[:2]) not in others]
    found = [
        {
            "strategy": _name(row, rows), "kind": row["kind"], "macs_ratio": row["macs_ratio"],
            "value": row[column], "low": row[f"{column}_low"], "high": row[f"{column}_high"],
        }
        for row in rows
    ]  # fmt: skip
    frame = pd.DataFrame(found, columns=["strategy", "kind", "macs_ratio", "value", "low", "high"])
    return frame.astype(dict.fromkeys(("macs_ratio", "value", "low", "high"), float))


def facts(board: Board, part: str = "accuracy") -> dict[str, str]:
    """Return what the title of a picture says of the part of a board that it shows: data, networks, track."""
    task = next((column.task for column in board.columns if column.part == part and column.task), "")
    repetitions = max((row["n_seeds"] for row in board.rows), default=0)
    if part != "accuracy":
        return {"data": f"Task {task}." if task else ""}
    track = "" if board.over_budgets is None else TRACKS.get(board.over_budgets.track, "")
    model = "networks" if board.over_budgets is None else f"{board.over_budgets.model} networks"
    networks = "One network" if repetitions == 1 else f"{repetitions} {model}"
    return {"data": f"Task {task}." if task else "", "networks": networks + (f": {track}." if track else ".")}


def _point(row: Row) -> tuple[Any, ...]:
    return row["strategy"], row["macs_ratio"], row["accuracy"]


def _row(name: str, row: Row, beside: Row, ranks: tuple[float, float]) -> Row:
    keys = ("kind", "budget", "macs_ratio", "accuracy", "accuracy_low", "accuracy_high")
    ends = dict(zip(("rank_first", "rank_last"), ranks, strict=True))
    return {"strategy": name, **{key: row[key] for key in keys}, **ends, **{key: beside.get(key) for key in DELTA}}


def _ranks(rank: str) -> tuple[float, float]:
    first, _, last = str(rank).partition("-")
    return (float(first), float(last or first)) if first.isdigit() else (float("nan"), float("nan"))


def _name(row: Row, rows: list[Row]) -> str:
    """Return a strategy, with its budget where it has several."""
    alone = sum(other["strategy"] == row["strategy"] for other in rows) == 1
    return row["strategy"] if alone or row["strategy"] == DENSE else f"{row['strategy']}, {row['budget']}"
