"""Records of the theory task as trials, success grids, and the fits that compete to explain them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from sparsebench.board.statistics import LEVEL, RESAMPLES, common_sizes, complete, half_success, sample_complexity
from sparsebench.models.base import Shallow
from sparsebench.sweep.record import Record
from sparsebench.tasks.theory import Theory

K = TypeVar("K", str, float, bool, tuple[float, float, float])


@dataclass(frozen=True)
class Trial:
    """One record: the parameters of its data and model, and what came out.

    Attributes:
        strategy: its label; `removed` the share of tokens it removes.
        where: whether it acts in training, in the test, or in both.
        values: metrics by name; None where there was nothing to measure.
        curves: what was watched while training, by name.
        diverged: training reached NaN or infinity, which is no success.
    """

    task: Theory
    model: Shallow
    strategy: str
    removed: float
    where: str
    n: int
    repetition: int
    values: Mapping[str, float | None]
    curves: Mapping[str, tuple[float, ...]]
    diverged: bool

    @property
    def success(self) -> float:
        """1 or 0."""
        return 0.0 if self.diverged else float(self.values["success"] or 0)


def has_no_answer(record: Record) -> bool:
    """Say whether a record is neither ok nor that of a training that diverged, which is an answer too."""
    return record.status != "ok" and (record.failure is None or record.failure.kind != "DivergedError")


def trials_of(records: Iterable[Record]) -> list[Trial]:
    """Return the trials of the records that have an answer."""
    return [_trial(record) for record in records if not has_no_answer(record)]


def _trial(record: Record) -> Trial:
    cell = record.cell
    return Trial(
        task=Theory(**cell.task.params), model=Shallow(**cell.model.params), strategy=record.label,
        removed=round(1 - (cell.budget.keep_rate or 1.0), 6), where=cell.where, n=cell.n_train,
        repetition=cell.repetition, values={name: metric.value for name, metric in record.metrics.items()},
        curves=record.samples, diverged=record.status != "ok",
    )  # fmt: skip


def grouped(trials: Iterable[Trial], key: Callable[[Trial], K]) -> dict[K, list[Trial]]:
    """Return the trials by a key, in rising order of it."""
    groups: dict[K, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(trial)
    return dict(sorted(groups.items()))


@dataclass(frozen=True)
class Grid:
    """Successes of one condition: a row a complete repetition, a column a number of samples."""

    trials: Mapping[int, Mapping[int, float]]

    @classmethod
    def of(cls, trials: Iterable[Trial]) -> Grid:
        """Collect the trials of one condition."""
        grid: dict[int, dict[int, float]] = defaultdict(dict)
        for trial in trials:
            grid[trial.repetition][trial.n] = trial.success
        return cls(grid)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The numbers of samples N, rising."""
        return np.array(common_sizes(self.trials))

    @cached_property
    def wins(self) -> np.ndarray:
        """(repetitions, sizes), 0 or 1."""
        return np.array(list(complete(self.trials).values()), dtype=float).reshape(-1, len(self.sizes))

    @cached_property
    def n50(self) -> tuple[float, float | None, float | None]:
        """Samples for half of the trials to succeed, with its interval; infinite where they never do."""
        return sample_complexity(self.trials)

    @property
    def n95(self) -> float:
        """The smallest N from which on at least 95 % of the trials succeed."""
        below = np.flatnonzero(self.wins.mean(axis=0) < 0.95)
        first = 0 if below.size == 0 else int(below[-1]) + 1
        return float(self.sizes[first]) if first < len(self.sizes) else float("inf")

    def resampled(self) -> np.ndarray:
        """Return (RESAMPLES,) N50 of repetitions drawn again; the same draws for grids of as many repetitions."""
        drawn = np.random.default_rng(0).integers(0, len(self.wins), (RESAMPLES, len(self.wins)))
        return half_success(self.sizes, self.wins[drawn].mean(axis=1))


def quantiles(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval of the resampled values that are numbers."""
    known = values[~np.isnan(values)]
    if not known.size:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope, intercept and R2 of the least-squares line."""
    slope, intercept = np.polyfit(x, y, 1)
    rest, spread = ((y - slope * x - intercept) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    return float(slope), float(intercept), float(1 - rest / spread) if spread > 0 else float("nan")


@dataclass(frozen=True)
class Fit:
    """How well y is a line in x, and the exponent p of y ~ x^p with its interval."""

    name: str
    r2: float
    exponent: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """One phrase for the table."""
        return f"{self.name}: R2 {self.r2:.3f}, exponent {self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"


def compete(candidates: Mapping[str, np.ndarray], y: np.ndarray, resampled: np.ndarray) -> list[Fit]:
    """Return the fit of each candidate, best R2 first.

    Args:
        candidates: (P,) values of x by name.
        y: (P,) measured values; those that are not finite are left out.
        resampled: (P, R) the same, from resampled trials.
    """
    here = np.isfinite(y)
    if here.sum() < 3:
        return []
    fits = []
    for name, x in candidates.items():
        exponents = _exponents(np.log(x[here]), resampled[here])
        own = float(_exponents(np.log(x[here]), y[here, None])[0])
        fits.append(Fit(name, line(x[here], y[here])[2], own, *quantiles(exponents)))
    return sorted(fits, key=lambda fit: -fit.r2)


def _exponents(log_x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) slopes of log y on log x over the finite ones of y (P, R); NaN where there are fewer than two."""
    known = np.isfinite(y)
    weights = known / np.maximum(known.sum(axis=0), 1)
    log_y = np.log(np.where(known, y, 1.0))
    dx = log_x[:, None] - (weights * log_x[:, None]).sum(axis=0)
    dy = log_y - (weights * log_y).sum(axis=0)
    spread = (weights * dx**2).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known.sum(axis=0) >= 2, (weights * dx * dy).sum(axis=0) / spread, np.nan)


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) least-squares slopes of each column of y (P, R) on x (P,)."""
    dx = x - x.mean()
    return (dx[:, None] * (y - y.mean(axis=0))).sum(axis=0) / (dx**2).sum()


def paired(mine: Sequence[Trial], other: Sequence[Trial], metric: str) -> list[float]:
    """Return the difference of a metric, mine minus the other's, repetition by repetition."""
    ours, theirs = ({t.repetition: t.values[metric] for t in some if not t.diverged} for some in (mine, other))
    both = sorted(set(ours) & set(theirs))
    return [a - b for a, b in ((ours[r], theirs[r]) for r in both) if a is not None and b is not None]
