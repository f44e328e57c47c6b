"""The ledger of published orders: tables in which one party measured several methods on one network. Their votes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparsebench.board.columns import Column, interval_row
from sparsebench.board.judge import Leaderboard
from sparsebench.board.orders import Answer, Standing, standings_of
from sparsebench.board.tables import Report, Table
from sparsebench.paper.claims import LedgerRow, Positive, read_ledger
from sparsebench.stats.agreement import share_interval
from sparsebench.stats.intervals import Interval
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

    @model_validator(mode="after")
    def _check(self) -> Row:
        names = [result.strategy for result in self.results if result.strategy]
        if len(set(names)) < len(names):
            raise ValueError("a row has each strategy once")
        return self


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
        accuracies = [float(result.accuracy) for answer in answers for result in answer]
        loss = float(order.dense_accuracy) - float(np.mean(accuracies))
    return Vote(
        order=order,
        better=better,
        worse=worse,
        n_rows=len(answers),
        n_for=max(n_first, n_second),
        share=float(np.mean([float(cost / order.dense_cost) for cost in costs])) if costs else float("nan"),
        loss=round(loss, 6),
    )


AGREES, OPPOSITE, NO_ANSWER, NOT_MEASURED = "agrees", "opposite", "no answer", "not measured"
NOT_EXPLAINED = "not explained"
CLASS_ATTENTION = ("attn_topk", "evit")
MERGERS = ("tome", "tome_cis", "pitome", "diffrate", "mctf", "atc")


class Explanation(NamedTuple):
    """What explains an opposite order, and where it does.

    Attributes:
        better, worse: the strategies that are better and worse in the table.
        relevant: it holds where the share of relevant tokens on the board is smaller.
        budgets: the least and the largest share of dense MACs at which it holds, near those of its measurement. It does
            not explain a comparison at a loss of accuracy, which has no budget.
        text: the explanation.
    """

    better: Collection[str]
    worse: Collection[str]
    relevant: float
    budgets: tuple[float, float]
    text: str


EXPLANATIONS = (
    Explanation(
        better=MERGERS,
        worse=CLASS_ATTENTION,
        relevant=0.5,
        budgets=(0.4, 0.5),
        text="few tokens are relevant: on a ViT-S/14 at .45 of the MACs class attention is ahead of mergers where "
        "one token in six is relevant, and behind where objects fill the picture",
    ),
)


class OnBoard(NamedTuple):
    """What one section of a board says to a vote.

    Attributes:
        vote: the vote.
        board: name of the board.
        standing: the section, at default or at chosen schedules.
        answer: which strategy is better there; its difference is that of the better one in the vote.
    """

    vote: Vote
    board: str
    standing: Standing
    answer: Answer

    @property
    def word(self) -> str:
        """Whether the board agrees, has the opposite order, has no answer, or lacks a strategy."""
        if not self.answer.measured:
            return NOT_MEASURED
        if not self.answer.better:
            return NO_ANSWER
        return AGREES if self.answer.better == self.vote.better else OPPOSITE

    @property
    def explanation(self) -> str:
        """What explains an opposite order, as far as it was measured."""
        if self.word != OPPOSITE:
            return ""
        for explanation in EXPLANATIONS:
            if self._is_case_of(explanation):
                return explanation.text
        return NOT_EXPLAINED

    def _is_case_of(self, explanation: Explanation) -> bool:
        """Return whether an explanation is about these strategies, pictures and this budget."""
        budget = self.answer.budget
        least, largest = explanation.budgets
        if budget is None or not least <= budget <= largest:
            return False
        is_about_them = self.vote.better in explanation.better and self.vote.worse in explanation.worse
        return is_about_them and self.standing.comparison.relevant < explanation.relevant


def on_boards(votes: Sequence[Vote], boards: Mapping[str, Leaderboard]) -> list[OnBoard]:
    """Return what each section of each board says to each vote, at default and at chosen schedules."""
    found = []
    for name, judged in boards.items():
        for standing in standings_of(judged):
            for vote in votes:
                if vote.order.matched == "accuracy":
                    answer = standing.better_at_loss(vote.better, vote.worse, vote.loss / 100)
                else:
                    answer = standing.better_at(vote.better, vote.worse, vote.share)
                found.append(OnBoard(vote, name, standing, answer))
    return found


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


SHARES = (
    Column("board", "board", "text", "folder of the board"),
    Column("section", "section", "text", "task, model and track"),
    Column("schedules", "schedules", "text", "published: default schedules; auto: chosen ones"),
    Column("training", "training", "text", "whether networks of the tables were trained with the methods"),
    Column("baselines", "baselines", "text", "run by the sources, or copied in whole or in part"),
    Column("n_votes", "votes", "count", "votes of the ledger"),
    Column("agrees", "agrees", "count", "votes that agree"),
    Column("opposite", "opposite", "count", "votes with the opposite order on the board"),
    Column("no_answer", "no answer", "count", "votes on pairs that do not differ significantly on the board"),
    Column("not_measured", "not measured", "count", "votes on strategies that the board lacks"),
    Column("share", "share that agrees", "fraction", "agrees / (agrees + opposite)", True),
    Column("n_tables", "tables", "count", "tables of the votes that agree or are opposite"),
    Column("n_pairs", "pairs", "count", "pairs of strategies of these votes"),
    Column("sources", "sources", "text", "with how many sources of these votes most votes agree, of all"),
)
LEGEND = (
    "Published: default schedules; auto: chosen ones. Training: whether networks were trained with the methods. "
    "Baselines: run by the source, or copied in whole or in part.",
    "Opposite: the board has the other order. No answer: the two do not differ significantly, or the better one spends "
    "more. Not measured: the board lacks one of them.",
    "Share that agrees: agrees / (agrees + opposite); a coin has 0.5. [ ]: 95 % interval over sources, whose votes "
    "depend on each other.",
    "Tables, pairs and sources are those of votes that agree or are opposite. Sources: in how many most votes agree.",
)
OPPOSITES = (
    Column("board", "board", "text", "folder of the board"),
    Column("section", "section", "text", "task, model and track"),
    Column("schedules", "schedules", "text", "published: default schedules; auto: chosen ones"),
    Column("order", "order", "text", "the table in the ledger"),
    Column("better", "better there", "text", "the strategy that is better in the table"),
    Column("worse", "better here", "text", "the strategy that is better on the board"),
    Column("at", "at", "text", "share of dense MACs, or points of loss, at which they are compared on the board"),
    Column("difference", "difference", "points", "of accuracies or MACs on the board, first minus second", True),
    Column("explanation", "explanation", "text", "what explains it, as far as it was measured"),
)
EVERY = (
    *SHARES[:3],
    Column("said", "board says", "text", "agrees, opposite, no answer or not measured"),
    Column("why", "why not", "text", "why there is no answer"),
    *OPPOSITES[6:],
    *VOTES,
)


def report_on_boards(orders: Sequence[Order], boards: Mapping[str, Leaderboard]) -> Report:
    """Return the share of votes with which boards agree, and the opposite ones. Programs get every vote."""
    found = on_boards(votes_of(orders), boards)
    opposites = [_row_on_board(one) for one in found if one.word == OPPOSITE]
    tables = [Table(_rows_of_shares(found), SHARES, "Votes of published orders", legend=LEGEND)]
    if opposites:
        tables.append(Table(opposites, OPPOSITES, "Votes with the opposite order", main=False))
    notes = ["CSV and JSON have what each board says to each vote."]
    return Report(tables, Table([_row_on_board(one) for one in found], EVERY), notes)


def _rows_of_shares(found: Sequence[OnBoard]) -> list[dict[str, Any]]:
    """Return a row for each section, with the votes of tables of one kind."""
    groups: dict[tuple[str, ...], list[OnBoard]] = {}
    for one in found:
        order = one.vote.order
        copied = "run" if order.baselines == "run" else "copied"
        section = one.standing.comparison.title
        key = one.board, section, one.standing.schedules, order.training, copied
        groups.setdefault(key, []).append(one)
    return [_row_of_share(key, part) for key, part in groups.items()]


def _row_of_share(key: tuple[str, ...], part: Sequence[OnBoard]) -> dict[str, Any]:
    words = Counter(one.word for one in part)
    answered = [one for one in part if one.word in (AGREES, OPPOSITE)]
    share: Interval | None = None
    if answered:
        share = share_interval([one.word == AGREES for one in answered], [one.vote.order.source for one in answered])
    return {
        **dict(zip(("board", "section", "schedules", "training", "baselines"), key, strict=True)),
        "n_votes": len(part),
        "agrees": words[AGREES],
        "opposite": words[OPPOSITE],
        "no_answer": words[NO_ANSWER],
        "not_measured": words[NOT_MEASURED],
        **interval_row("share", share),
        "n_tables": len({one.vote.order.id for one in answered}),
        "n_pairs": len({frozenset((one.vote.better, one.vote.worse)) for one in answered}),
        "sources": _sources(answered),
    }


def _sources(answered: Sequence[OnBoard]) -> str:
    """Return with how many sources a board agrees in most votes, of all sources."""
    balance: Counter[str] = Counter()
    for one in answered:
        balance[one.vote.order.source] += 1 if one.word == AGREES else -1
    return f"{sum(votes > 0 for votes in balance.values())} of {len(balance)}" if balance else ""


def _row_on_board(one: OnBoard) -> dict[str, Any]:
    answer, vote = one.answer, one.vote
    at = f"loss of {vote.loss:g} points" if answer.budget is None else f"{answer.budget:g}"
    return {
        **_row_of_vote(vote),
        "board": one.board,
        "section": one.standing.comparison.title,
        "schedules": one.standing.schedules,
        "said": one.word,
        "why": answer.why,
        "at": at if answer.measured else "",
        **interval_row("difference", answer.difference),
        "explanation": one.explanation,
    }


def _row_of_vote(vote: Vote) -> dict[str, Any]:
    order = vote.order
    return {
        **order.model_dump(include={"matched", "training", "baselines", "model", "source", "note"}),
        "order": order.id,
        "better": vote.better,
        "worse": vote.worse,
        "rows": f"{vote.n_for} of {vote.n_rows}",
        "share": None if math.isnan(vote.share) else vote.share,
        "loss": f"{vote.loss:g}" if vote.loss else "",
    }
