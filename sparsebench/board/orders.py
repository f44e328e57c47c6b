"""The order of strategies on a board: which of two is better at a budget or at a loss, and agreement with a board.

docs/results/orders.md has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.columns import Column, interval_row
from sparsebench.board.comparison import Comparison
from sparsebench.board.judge import Leaderboard
from sparsebench.board.over_budgets import nearest
from sparsebench.board.picture import new_figure, sheet
from sparsebench.board.reading import DENSE, entry_of_dense, over_seeds
from sparsebench.board.tables import Report, Table
from sparsebench.errors import UserError, plain, unknown
from sparsebench.stats import curves, paired, style
from sparsebench.stats.agreement import correlation_of_means, rank_correlation
from sparsebench.stats.intervals import LEVEL, Interval
from sparsebench.stats.paired import Pairs, Results
from sparsebench.strategy.budget import AUTO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Schedules = Literal["published", "auto"]
MOST_MORE = 0.05
"""A better strategy may spend this share more MACs than the other."""
FEWEST_COMMON = 3
"""Fewer common strategies have no rank correlation."""


class Answer(NamedTuple):
    """Which of two strategies a board has as better.

    Attributes:
        better: its name; "" without an answer.
        why: why there is no answer.
        measured: whether the board has both strategies, where they are compared.
        budget: the share of dense MACs at which they are compared; None at a loss.
        difference: the first minus the second: of accuracies, or of MACs at a loss, as a fraction.
    """

    better: str
    why: str
    measured: bool
    budget: float | None = None
    difference: Interval = (math.nan, None, None)


@dataclass(eq=False)
class Standing:
    """The strategies of one comparison, at default or at chosen schedules.

    Attributes:
        comparison: the comparison.
        schedules: "published" for default schedules, "auto" for chosen ones.
        rows: a row for each strategy and budget, by entry: strategy, asked (share of dense MACs), accuracy, macs_ratio.
            Strategies are complete and no oracles.
    """

    comparison: Comparison
    schedules: Schedules
    rows: pd.DataFrame

    @cached_property
    def budgets(self) -> list[float]:
        """The budgets, falling."""
        return sorted(set(self.rows["asked"]), reverse=True)

    def at(self, budget: float) -> pd.Series:
        """Return the entry of each strategy at a budget."""
        of_budget = self.rows[self.rows["asked"] == budget]
        return pd.Series(of_budget.index, of_budget["strategy"])

    def better_at(self, first: str, second: str, share: float) -> Answer:
        """Return which strategy is more accurate at the budget that is nearest to a share of dense MACs."""
        budgets = [budget for budget in self.budgets if {first, second} <= set(self.at(budget).index)]
        if not budgets or math.isnan(share):
            return Answer("", "not measured", False)
        budget = nearest(budgets, share)
        entries = self.at(budget)
        pairs = self._pairs_at(budget)
        row, column = entries.index.get_loc(first), entries.index.get_loc(second)
        mean, half = float(pairs.mean[row, column]), float(pairs.half[row, column])
        ends = (None, None) if math.isnan(half) else (mean - half, mean + half)
        difference: Interval = (mean, *ends)
        if not pairs.p_alone[row, column] <= 1 - LEVEL:  # not significant, or too few seeds for a test
            return Answer("", "not significant", True, budget, difference)

        better, worse = (first, second) if mean > 0 else (second, first)
        spent = self.rows["macs_ratio"]
        if spent[entries[better]] > (1 + MOST_MORE) * spent[entries[worse]]:
            return Answer("", f"{better} is better and spends more", True, budget, difference)
        return Answer(better, "", True, budget, difference)

    def _pairs_at(self, budget: float) -> Pairs:
        """Return the comparisons of all strategies at a budget."""
        if budget not in self._pairs:
            results = [self.comparison.results[entry] for entry in self.at(budget)]
            self._pairs[budget] = paired.compare(results)
        return self._pairs[budget]

    @cached_property
    def _pairs(self) -> dict[float, Pairs]:
        return {}

    def better_at_loss(self, first: str, second: str, loss: float) -> Answer:
        """Return which strategy needs fewer MACs at a loss of accuracy against dense, 0.02 for two points."""
        dense = entry_of_dense(self.comparison.tested)
        one, other = self._points(first), self._points(second)
        if dense is None or min(len(one[1]), len(other[1])) < 2:
            return Answer("", "not measured", False)
        results = self.comparison.results[dense]
        if not curves.common_seeds([results, *one[0], *other[0]]):
            return Answer("", "not measured", False)
        difference = curves.macs_difference(one, other, results, self.comparison.lone, loss)
        mean, low, high = difference
        if low is None or high is None or low <= 0 <= high:
            return Answer("", "not significant", True, None, difference)
        return Answer(first if mean < 0 else second, "", True, None, difference)

    def _points(self, strategy: str) -> tuple[list[Results], list[float]]:
        """Return the results of a strategy's curve below the dense MACs, and the shares of dense MACs, rising."""
        common = self.comparison.common.budgets.common or self.budgets
        rows = self.rows[(self.rows["strategy"] == strategy) & self.rows["asked"].isin(common)]
        rows = rows[rows["macs_ratio"] < 1].sort_values(["macs_ratio", "asked"])
        return [self.comparison.results[entry] for entry in rows.index], rows["macs_ratio"].tolist()


def standings_of(judged: Leaderboard) -> list[Standing]:
    """Return the standings of a board over all tasks: those of its main task, and of its sections."""
    rankings = [*judged.rankings[:1], *judged.sections]
    return [standing for ranking in rankings for standing in _standings(ranking.comparison)]


def _standings(comparison: Comparison) -> list[Standing]:
    """Return the standings of a comparison: at default schedules, and at chosen ones if any strategy chooses."""
    means = over_seeds(comparison.tested, {"accuracy": "mean", "macs_ratio": "mean"})
    every = comparison.entries[["strategy", "kind", "asked", "form"]].join(means)
    complete = ~every.index.isin(comparison.common.incomplete) & every["accuracy"].notna() & every["macs_ratio"].notna()
    rows = every[complete & (every["strategy"] != DENSE) & (every["kind"] != "oracle") & (every["asked"] < 1)]
    default = rows[rows["form"] == ""]
    chosen = rows[rows["form"] == AUTO]
    standings = [Standing(comparison, "published", default)]
    if len(chosen):
        # A strategy with one schedule, such as those at the input, has the same rows at chosen schedules.
        points = ["strategy", "asked"]
        has_chosen = pd.MultiIndex.from_frame(default[points]).isin(pd.MultiIndex.from_frame(chosen[points]))
        standings.append(Standing(comparison, "auto", pd.concat([chosen, default[~has_chosen]])))
    return [standing for standing in standings if len(standing.rows)]


# Agreement of two boards

AGREEMENT = (
    Column("section", "section", "text", "task, model and track on the first board"),
    Column("other", "other section", "text", "task, model and track on the other board"),
    Column("schedules", "schedules", "text", "published: default schedules; auto: chosen ones"),
    Column("budget", "budget", "ratio", "requested share of dense MACs on the first board"),
    Column("other_budget", "other budget", "ratio", "the nearest one of the other board"),
    Column("n_strategies", "strategies", "count", "those that both boards have there"),
    Column("spearman", "Spearman", "fraction", "rank correlation of accuracies", True),
)
LEGEND = ("[ ]: 95 % intervals; networks and strategies are drawn again. Dense and oracles are left out.",)


def agreement(first: Leaderboard, other: Leaderboard, strategies: Sequence[str] = ()) -> Report:
    """Return the rank correlations of two boards, by section and budget of the first one.

    Args:
        first, other: the boards.
        strategies: the only strategies; all if empty.

    Raises:
        UserError: the boards have too few strategies in common, or none has one of `strategies`.
    """
    _check_names(first, other, strategies)
    rows = []
    for standing, another in _with_equal_schedules(first, other):
        for budget in standing.budgets:
            common = _common(standing, budget, another, nearest(another.budgets, budget), strategies)
            if common is not None:
                rows.append(common.row())
    if not rows:
        raise _too_few()
    table = Table(rows, AGREEMENT, legend=LEGEND)
    return Report([table], table)


def _check_names(first: Leaderboard, other: Leaderboard, strategies: Sequence[str]) -> None:
    """Raise UserError if one of the strategies is on neither board."""
    standings = [*standings_of(first), *standings_of(other)]
    available = {str(name) for standing in standings for name in standing.rows["strategy"]}
    for name in strategies:
        if name not in available:
            raise unknown("strategy on the boards", name, available)


def _too_few() -> UserError:
    allowed = f"{FEWEST_COMMON} or more with the same schedules at shares of dense MACs"
    return UserError("the boards have too few strategies in common", allowed=allowed)


def _with_equal_schedules(first: Leaderboard, other: Leaderboard) -> list[tuple[Standing, Standing]]:
    return [
        (standing, another)
        for standing in standings_of(first)
        for another in standings_of(other)
        if standing.schedules == another.schedules
    ]


class _Common(NamedTuple):
    """Two standings at a budget each, with the results of the strategies that both have there, in the same order."""

    standing: Standing
    budget: float
    another: Standing
    other_budget: float
    results: list[Results]
    other_results: list[Results]

    def row(self) -> dict[str, Any]:
        """Return the row of AGREEMENT."""
        seeds = _seeds_of_same_networks(self.standing.comparison, self.another.comparison)
        other_results = [_renumbered(result, seeds) for result in self.other_results] if seeds else self.other_results
        return {
            "section": self.standing.comparison.title,
            "other": self.another.comparison.title,
            "schedules": self.standing.schedules,
            "budget": self.budget,
            "other_budget": self.other_budget,
            "n_strategies": len(self.results),
            **interval_row("spearman", rank_correlation(self.results, other_results, same_networks=bool(seeds))),
        }


def _seeds_of_same_networks(first: Comparison, other: Comparison) -> dict[int, int]:
    """Return the seed on the first board of each seed of the other, if both have the same networks; {} if not.

    Networks are the same if their weights are, whatever their files are called. Pre-trained weights without a file are
    those of an architecture, so its parameters must be equal, too.
    """
    if _architecture(first) != _architecture(other) or set(first.weights.values()) != set(other.weights.values()):
        return {}
    seed_of = {weights: seed for seed, weights in first.weights.items()}
    return {seed: seed_of[weights] for seed, weights in other.weights.items()}


def _architecture(comparison: Comparison) -> dict[str, Any]:
    """Return the parameters of the model, without the precision of the test."""
    _, model = comparison.params
    return {name: value for name, value in model.items() if name != "precision"}


def _renumbered(result: Results, seeds: Mapping[int, int]) -> Results:
    """Return results with other numbers of seeds."""
    means = {seeds[seed]: mean for seed, mean in result.means.items()}
    hits = {seeds[seed]: of_seed for seed, of_seed in result.hits.items()}
    clusters = result.clusters and {seeds[seed]: numbers for seed, numbers in result.clusters.items()}
    return Results(means, hits, clusters)


def _common(
    standing: Standing, budget: float, another: Standing, other_budget: float, strategies: Sequence[str]
) -> _Common | None:
    """Return what two standings have in common at these budgets; None with fewer than FEWEST_COMMON strategies."""
    entries, others = standing.at(budget), another.at(other_budget)
    names = [name for name in entries.index if name in others.index and (not strategies or name in strategies)]
    if len(names) < FEWEST_COMMON:
        return None
    results = [standing.comparison.results[entries[name]] for name in names]
    other_results = [another.comparison.results[others[name]] for name in names]
    return _Common(standing, budget, another, other_budget, results, other_results)


def draw(
    first: Leaderboard,
    other: Leaderboard,
    strategies: Sequence[str] = (),
    width: str = "two",
    names: tuple[str, str] = ("the first board", "the other board"),
) -> Figure:
    """Return the heat map of rank correlations: budgets of the first board against all budgets of the other.

    There is a chart for default schedules and one for chosen ones, as far as both boards have them.

    Args:
        first, other, strategies: see `agreement`.
        width: one of `style.COLUMNS`.
        names: what the axes call the boards.

    Raises:
        UserError: see `agreement`.
    """
    _check_names(first, other, strategies)
    pairs = _with_equal_schedules(first, other)
    kinds = list(dict.fromkeys(standing.schedules for standing, _ in pairs))
    every = {kind: _cells(kind, pairs, strategies) for kind in kinds}
    cells = {kind: table for kind, table in every.items() if table.notna().any(axis=None)}
    if not cells:
        raise _too_few()
    n_rows = max(len(table) for table in cells.values())
    with sheet(width):
        notes = "Spearman's correlation of the accuracies of the strategies that both boards have."
        figure = new_figure(width, max(1.2, 0.28 * n_rows + 0.6), "", notes)
        for axis, (kind, table) in zip(np.atleast_1d(figure.subplots(1, len(cells))), cells.items(), strict=True):
            axis.imshow(table.to_numpy(float), cmap="PuOr", vmin=-1, vmax=1, aspect="auto")
            axis.set_title(f"{kind} schedules", loc="left")
            axis.set_xticks(range(table.shape[1]), table.columns, rotation=45 if table.shape[1] > 6 else 0)
            axis.set_yticks(range(len(table)), table.index)
            axis.set_xlabel(plain(f"{names[1]}, share of dense MACs"))
            axis.set_ylabel(plain(f"{names[0]}, share of dense MACs"))
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0)
            _write_values(axis, table.to_numpy(float))
    return figure


def _cells(kind: str, pairs: Sequence[tuple[Standing, Standing]], strategies: Sequence[str]) -> pd.DataFrame:
    """Return the correlations of standings with these schedules: a row and a column for each section and budget."""
    cells: dict[str, dict[str, float]] = {}
    chosen = [pair for pair in pairs if pair[0].schedules == kind]
    several = [len({id(pair[side]) for pair in chosen}) > 1 for side in (0, 1)]
    for standing, another in chosen:
        for budget in standing.budgets:
            row = cells.setdefault(_label(standing, budget, several[0]), {})
            for other_budget in another.budgets:
                common = _common(standing, budget, another, other_budget, strategies)
                value = math.nan if common is None else correlation_of_means(common.results, common.other_results)
                row[_label(another, other_budget, several[1])] = value
    return pd.DataFrame.from_dict(cells, orient="index")


def _label(standing: Standing, budget: float, several: bool) -> str:
    return f"{standing.comparison.task}, {budget:g}" if several else f"{budget:g}"


def _write_values(axis: Any, values: np.ndarray) -> None:
    """Write each value into its cell, white on dark cells."""
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            color = "white" if abs(value) > 0.6 else style.BLACK
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
