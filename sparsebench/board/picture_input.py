"""The tables and facts that pictures are drawn from, taken from a board's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparsebench.board import picture
from sparsebench.board.board import Board, Row
from sparsebench.board.entries import DENSE, Setting
from sparsebench.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY, GAP, SAMPLES = WHAT = ("accuracy", "gap", "samples")
"""What pictures show."""
COLUMN = {ACCURACY: "accuracy", GAP: "aligned_gap_reduction", SAMPLES: "sample_complexity"}
DELTA = ("accuracy_delta", "accuracy_delta_low", "accuracy_delta_high")
TRACKS = {
    "frozen": "trained without a strategy; strategies act in the test only",
    "tuned": "trained further with the strategy",
    "scratch": "trained with the strategy",
}


def accuracies(board: Board) -> pd.DataFrame:
    """Return a row a strategy and budget, as `picture.curves` takes it; a budget that is no share is part of a name."""
    if board.over_budgets is None:
        rows = [row for row in board.rows if row["accuracy"] is not None]
        found = [_row(_name(row, rows), row | {"budget": None}, row, _ranks(row["rank"])) for row in rows]
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


def values(board: Board, column: str, times: float = 1.0) -> pd.DataFrame:
    """Return a row a strategy that has a value of a column of the board, at the budget nearest one half.

    Where there are no curves over budgets, it is a row a strategy and budget.
    """
    rows = [row for row in board.rows if row.get(column) is not None]
    if board.over_budgets is not None:
        others = {f"macs {budget:g}" for budget in board.over_budgets.budgets if budget != board.over_budgets.middle}
        rows = [row for row in rows if " ".join(row["budget"].replace(",", " ").split()[:2]) not in others]
    found = [
        {"label": _name(row, rows)}
        | {key: row[key] for key in ("strategy", "kind", "macs_ratio")}
        | {end: row[f"{column}{of}"] for end, of in (("value", ""), ("low", "_low"), ("high", "_high"))}
        for row in rows
    ]
    frame = pd.DataFrame(found, columns=["strategy", "label", "kind", "macs_ratio", "value", "low", "high"])
    frame = frame.astype(dict.fromkeys(frame.columns[3:], float))
    return frame.assign(**{end: times * frame[end] for end in ("value", "low", "high")})


def facts(board: Board, part: str = "accuracy") -> dict[str, str]:
    """Return what the title of a picture says of the part of a board that it shows: data, networks, track."""
    task = next((column.task for column in board.columns if column.part == part and column.task), "")
    data = {"data": board.data.get(task, f"Task {task}.")} if task else {}
    if part != "accuracy":
        return data
    repetitions = max((row["n_seeds"] for row in board.rows), default=0)
    if not repetitions:
        return data
    networks = "One network" if repetitions == 1 else f"{repetitions} networks"
    networks += f" ({words})" if (words := board.networks.get(task)) else ""
    asked = {row["budget"] for row in board.rows if row["strategy"] != DENSE and row["accuracy"] is not None}
    if len(asked) == 1:
        data["budget"] = f"Strategies at {asked.pop()}."
    track = "" if board.over_budgets is None else TRACKS.get(board.over_budgets.track, board.over_budgets.track)
    return data | {"networks": f"{networks}{',' if track else '.'}", "track": f"{track}." if track else ""}


def measured(board: Board) -> list[str]:
    """Return which pictures there are of a board, of WHAT; of one without any result there is that of accuracy."""
    found = [what for what in WHAT if any(row.get(COLUMN[what]) is not None for row in board.rows)]
    return found or [ACCURACY]


def draw(board: Board, what: str = ACCURACY, strategies: Sequence[str] = (), width: str = "two") -> Figure:
    """Return one of the pictures of a board.

    Args:
        board: the board.
        what: one of WHAT.
        strategies: which are named in curves, or drawn beside dense; none means all, and the best are named.
        width: one of `style.COLUMNS`.

    Raises:
        UserError: it was not measured, or a strategy is not in the picture.
    """
    if what not in measured(board):
        raise UserError("nothing of this was measured", got=what, allowed=measured(board))
    if what == SAMPLES:
        about = {
            "what": "Training samples until half of the trials succeed (N50); fewer are better.",
            **facts(board, "trials"),
        }
        return picture.dots(
            values(board, COLUMN[what]), about, "training samples", strategies, width, falling=False, logarithmic=True
        )  # fmt: skip
    if what == GAP:
        about = {
            "what": "By how much the spurious gap shrinks: how much better a network is where the background fits the "
            "class than where it does not.", **facts(board, "gaps"),
        }  # fmt: skip
        return picture.dots(values(board, COLUMN[what], 100), about, "points less than dense", strategies, width)
    table = accuracies(board)
    if picture.has_curves(table):
        return picture.curves(table, facts(board), strategies, width)
    return picture.dots(
        values(board, COLUMN[what], 100), {"what": "Test accuracy.", **facts(board)}, "accuracy, %", strategies, width
    )


def data_of(setting: Setting) -> str:
    """Return in words what the pictures of a task are made of, with its name; nothing where it has no pictures."""
    parts = [_SOURCES.get(name.partition("-")[0], name) for key in ("images", "backgrounds")
             if isinstance(name := setting.params[0].get(key), str) and name]  # fmt: skip
    said = " on ".join(parts)
    return f"{said[:1].upper()}{said[1:]} (task {setting.task})." if parts else ""


def networks_of(setting: Setting) -> str:
    """Return in words what the networks of a task are: depth and width, where a ViT is described by them."""
    depth, dim = (setting.params[1].get(key) for key in ("depth", "dim"))
    return f"ViT, depth {depth}, width {dim}" if depth and dim else setting.model


_SOURCES = {"photos": "photographs", "pictures": "photographs of a folder", "folder": "pictures of a folder"}
"""What is said of sources of pictures, besides their names."""


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
