"""The ledger of published orders: tables in which one party measured several methods on one network. Their votes."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparsebench.board.columns import Column
from sparsebench.board.tables import Report, Table
from sparsebench.paper.claims import LedgerRow, Positive, read_ledger
from sparsebench.strategy.spec import parse

LEAST_POINTS = Decimal("0.3")
"""Accuracies answer if they differ by more points."""
LEAST_COST = Decimal("0.05")
"""Costs at equal accuracy answer if they differ by a larger share of the larger one."""


class Result(BaseModel):
    """What a table has of one method.

    Attributes:
        method: name of the method in the source.
        plugin: the argument of --plugin, as far as the source says it; "" if sparsebench has no such strategy.
        cost: cost of an image, in the unit of the order.
        accuracy: in percent.
        speed: images/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(min_length=1)
    plugin: str = ""
    cost: Positive | None = None
    accuracy: Annotated[Positive, Field(le=100)]
    speed: Positive | None = None

    @property
    def strategy(self) -> str:
        """The name of the strategy; "" if sparsebench has none."""
        return parse(self.plugin).name if self.plugin else ""


class Row(BaseModel):
    """Methods that are matched: at equal cost, accuracy or throughput."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: tuple[Result, ...] = Field(min_length=2)


class Order(LedgerRow):
    """A table in which one party measured several methods on one network.

    Attributes:
        id: its name.
        source: the place of the numbers in the literature.
        model: the network.
        test: the images on which accuracy was measured.
        training: whether the network was trained with the methods.
        baselines: whether the source ran the methods that are not its own.
        matched: what is equal in a row.
        unit: of the costs.
        dense_cost, dense_accuracy: of the dense network.
        hardware: the hardware of the speeds.
        note: remarks.
        row: the rows.
    """

    source: str = Field(min_length=1)
    model: str = Field(min_length=1)
    test: str = "ImageNet-1k"
    training: Literal["none", "trained"]
    baselines: Literal["run", "partly copied", "copied"]
    matched: Literal["cost", "accuracy", "throughput"]
    unit: str = Field(min_length=1)
    dense_cost: Positive
    dense_accuracy: Annotated[Positive, Field(le=100)] | None = None
    hardware: str = ""
    note: str = ""
    row: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Order:
        results = [result for row in self.row for result in row.results]
        if self.matched == "accuracy" and (self.dense_accuracy is None or any(one.cost is None for one in results)):
            raise ValueError("an order at equal accuracy needs dense_accuracy and the cost of each method")
        return self


class Vote(NamedTuple):
    """What a table says of two strategies.

    Attributes:
        order: the table.
        better, worse: names of the strategies.
        n_rows: number of rows that answer.
        n_for: number of rows of the majority.
        share: mean share of dense cost of these rows, where the source states costs; NaN without any.
        loss: points of accuracy below dense at which costs are compared; 0 if accuracy is not matched.
    """

    order: Order
    better: str
    worse: str
    n_rows: int
    n_for: int
    share: float
    loss: float


def load(path: Path | None = None) -> list[Order]:
    """Return the orders of a TOML file with [[order]] tables, by default of sparsebench's ledger; see `read_ledger`."""
    return read_ledger("orders.toml", path, "order", Order)


def votes_of(orders: Sequence[Order]) -> list[Vote]:
    """Return the votes of tables: one for each pair of strategies, the majority of the rows that answer."""
    return [vote for order in orders for vote in _votes(order)]


def _votes(order: Order) -> list[Vote]:
    answers: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for row in order.row:
        available = [result for result in row.results if result.strategy]
        for first, second in combinations(sorted(available, key=lambda result: result.strategy), 2):
            answer = _better(order, first, second)
            if answer is not None:
                answers.setdefault((first.strategy, second.strategy), []).append(answer)
    votes = (_majority(order, pair, of_rows) for pair, of_rows in answers.items())
    return [vote for vote in votes if vote is not None]


def _better(order: Order, first: Result, second: Result) -> tuple[Result, Result] | None:
    """Return the better and the worse of two results of a row; None if they do not differ enough."""
    if order.matched == "accuracy":
        assert first.cost is not None and second.cost is not None
        if abs(first.cost - second.cost) <= LEAST_COST * max(first.cost, second.cost):
            return None
        return (first, second) if first.cost < second.cost else (second, first)
    if abs(first.accuracy - second.accuracy) <= LEAST_POINTS:
        return None
    return (first, second) if first.accuracy > second.accuracy else (second, first)


def _majority(order: Order, pair: tuple[str, str], answers: Sequence[tuple[Result, Result]]) -> Vote | None:
    """Return the vote of the rows that answer for a pair, each with the better result first; None for a tie."""
    n_first = sum(better.strategy == pair[0] for better, _ in answers)
    n_second = len(answers) - n_first
    if n_first == n_second:
        return None
    better, worse = pair if n_first > n_second else reversed(pair)
    costs = [result.cost for answer in answers for result in answer if result.cost is not None]
    loss = 0.0
    if order.matched == "accuracy":
        assert order.dense_accuracy is not None
        accuracies = [result.accuracy for answer in answers for result in answer]
        loss = float(order.dense_accuracy - sum(accuracies) / len(accuracies))
    return Vote(
        order=order,
        better=better,
        worse=worse,
        n_rows=len(answers),
        n_for=max(n_first, n_second),
        share=float(np.mean([float(cost / order.dense_cost) for cost in costs])) if costs else float("nan"),
        loss=round(loss, 6),
    )


VOTES = (
    Column("order", "order", "text", "the table in the ledger"),
    Column("better", "better", "text", "the strategy that is better there"),
    Column("worse", "worse", "text", "the strategy that is worse there"),
    Column("rows", "rows", "text", "rows for the majority, of those that answer"),
    Column("matched", "matched", "text", "what is equal for both"),
    Column("share", "MACs", "percent", "mean share of dense cost of the rows that answer"),
    Column("loss", "loss", "text", "points below dense at which costs are compared"),
    Column("training", "training", "text", "whether networks were trained with the methods"),
    Column("baselines", "baselines", "text", "whether the source ran the methods that are not its own"),
    Column("model", "network", "text", "as the source calls it"),
    Column("source", "source", "text", "where the numbers were read"),
    Column("note", "note", "text", "remarks on the table", tables=False),
)


def report_of_votes(orders: Sequence[Order]) -> Report:
    """Return the table of all votes of some orders."""
    votes = votes_of(orders)
    table = Table([_row_of_vote(vote) for vote in votes], VOTES)
    pairs = {frozenset((vote.better, vote.worse)) for vote in votes}
    tables = {vote.order.id for vote in votes}
    note = f"{len(votes)} votes of {len(tables)} tables on {len(pairs)} pairs of strategies"
    silent = [order.id for order in orders if order.id not in tables]
    notes = [note, f"no vote: {', '.join(silent)}"] if silent else [note]
    return Report([table], table, notes)


def _row_of_vote(vote: Vote) -> dict[str, Any]:
    order = vote.order
    return {
        **order.model_dump(include={"matched", "training", "baselines", "model", "source", "note"}),
        "order": order.id,
        "better": vote.better,
        "worse": vote.worse,
        "rows": f"{vote.n_for} of {vote.n_rows}",
        "share": vote.share,
        "loss": f"{vote.loss:g}" if vote.loss else "",
    }
