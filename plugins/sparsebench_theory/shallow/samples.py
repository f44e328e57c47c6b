"""Figures 1 and 3 of Li et al. (ICLR 2023): the training samples needed, also with each strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, Word, interval, judge
from sparsebench.stats.intervals import percentiles
from sparsebench_theory.models import Shallow
from sparsebench_theory.panels import draw_dashed, heat_map, legend, points, verdicts_of
from sparsebench_theory.shallow import published
from sparsebench_theory.shallow import theorems as theory
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.trials import ENOUGH, Fit, Grid, columns, compete, group_by, resamples_of, slopes, values_of

HARD = 0.28
"""Largest alpha_* of Figure 3."""

verdict = verdicts_of(__package__, ENOUGH=ENOUGH, HARD=HARD)


def tau(trial: Trial) -> float:
    """Return the distance of a token from its pattern, about c0 sqrt(d)."""
    return float(trial.task.noise * trial.task.d**0.5)


class Sweep:
    """Success grids over alpha_*, with the same rule for alpha_#."""

    def __init__(self, trials: Sequence[Trial]):
        self.trials = trials
        groups = group_by(trials, lambda t: t.task.realised_shares())
        self.grids = {shares: Grid.of(group) for shares, group in groups.items()}
        self.relevant = np.array([shares[0] for shares in groups])
        self.gap = self.relevant - np.array([shares[1] for shares in groups])
        self.n50 = [grid.n50 for grid in self.grids.values()]
        self.values = np.array([value for value, _, _ in self.n50])

    def fits(self) -> list[Fit]:
        """Return the fits of N50 by alpha_*^-2, alpha_*^-4 and gap^-2."""
        a, gap = self.relevant, self.gap
        xs = {"alpha_*^-2": a**-2, "alpha_*^-4": a**-4, "gap^-2": gap**-2}
        return compete(xs, self.values, *resamples_of(self.grids.values()))

    def rows(self, **labels: Any) -> list[dict[str, Any]]:
        """Return a row with N50 and N95 for each alpha_*."""
        return [
            labels | {"alpha_*": a, "alpha_#": c, "alpha_nd": nd, **grid.row, "N95": grid.n95}
            for (a, c, nd), grid in self.grids.items()
        ]

    def success_rows(self, **labels: Any) -> list[dict[str, Any]]:
        """Return a row with the successes for each cell of the map."""
        return [
            labels | {"alpha_*": a, "alpha_#": c, **row}
            for (a, c, _), grid in self.grids.items()
            for row in grid.success_rows()
        ]

    def map(self, axis: Any, title: str, power: int) -> None:
        """Draw the success rates over alpha_*^-power."""
        draw_successes(axis, title, dict(zip(self.relevant, self.grids.values(), strict=True)), power)


def draw_successes(axis: Any, title: str, grids: Mapping[float, Grid], power: int) -> None:
    """Draw the success rates over alpha_*^-power and N."""
    order = sorted(grids, reverse=True)
    sizes = np.array(sorted({n for grid in grids.values() for n in grid.sizes}), dtype=int)
    rates = np.full((len(sizes), len(order)), np.nan)
    for column, a in enumerate(order):
        rates[np.searchsorted(sizes, grids[a].sizes), column] = grids[a].rates
    heat_map(axis, title, np.array(order) ** -power, sizes, rates, f"$\\alpha_*^{{-{power}}}$")


def _draw_published(axis: Any, title: str, grid: Mapping[str, np.ndarray], power: int) -> None:
    heat_map(axis, title, grid[f"alpha_*^-{power}"], grid["N"], grid["rates"], f"$\\alpha_*^{{-{power}}}$")


def figure_1a(trials: Sequence[Trial]) -> Result:
    """Success over alpha_* and N, with half of the tokens irrelevant, as in the paper, and with a fixed alpha_#."""
    names = {True: "half of the tokens irrelevant, as printed", False: "a fixed alpha_#"}
    by_rule = group_by(trials, lambda t: t.task.irrelevant is not None)
    sweeps = {names[printed]: Sweep(group) for printed, group in by_rule.items()}
    panels: list[Panel] = [partial(_draw_published, title="published", grid=published.FIGURE_1A, power=2)]
    verdicts, success, needed = [], [], []
    for name, sweep in sweeps.items():
        panels += [
            partial(sweep.map, title=f"measured, {name}", power=2),
            partial(_draw_needed, sweep=sweep, title=name),
        ]
        success += sweep.success_rows(setting=name)
        needed += sweep.rows(setting=name)
        verdicts += _linear("1a", sweep, name, "alpha_*^-2", "linear; N95 grows by 38 a unit of alpha_*^-2")
    tables = {"fig1a": success, "fig1a-n50": needed}
    return Result("Figure 1a: samples needed against the share of relevant tokens", tables, panels, verdicts)


def _draw_needed(axis: Any, sweep: Sweep, title: str) -> None:
    x = sweep.relevant**-2
    points(axis, x, sweep.n50, "N50, 95 % interval", COLOURS[0])
    is_finite = np.isfinite(sweep.values)
    if is_finite.any():
        group = sweep.trials[0]
        predicted = theory.samples_needed(sweep.relevant, group.model.sigma, tau(group))
        draw_dashed(axis, x, _through(predicted, sweep.values), "Theorem 1, scaled", COLOURS[5])
        draw_dashed(axis, x, _through(sweep.gap**-2, sweep.values), "gap$^{-2}$, scaled", COLOURS[1])
    axis.set(title=title, xlabel="$\\alpha_*^{-2}$", ylabel="N50", yscale="log")
    legend(axis)


def _through(shape: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the shape times the constant that fits the values best."""
    is_finite = np.isfinite(values) & np.isfinite(shape)
    return shape * np.exp(np.log(values[is_finite] / shape[is_finite]).mean()) if is_finite.any() else shape * np.nan


def _linear(figure: str, sweep: Sweep, name: str, form: str, says: str) -> list[Verdict]:
    """Return the verdicts on whether N50 rises as alpha_* falls, and whether it does with the paper's power."""
    fits, about = sweep.fits(), {"figure": figure, "name": name}
    if not fits:
        few = "fewer than three values of alpha_* with a finite N50"
        first = verdict("grows", few, "undecided", published=says, **about)
        return [first, verdict("linear", few, "undecided", form=form, **about)]
    fit_of_form = next(fit for fit in fits if fit.name == form)
    best = fits[0]
    linear = fit_of_form.r2 >= 0.95 and best.r2 - fit_of_form.r2 <= 0.02
    against = fit_of_form.flat and all(grid.within(*grid.ends) for grid in sweep.grids.values())
    linear_word: Word = "undecided"
    if fit_of_form.points >= ENOUGH:
        linear_word = judge([fit_of_form.rises, fit_of_form.rises and linear], [against])

    reached = f"{fit_of_form.points} of {len(sweep.values)} alpha_* reach N50"
    at_smallest = sum(grid.n50[0] == grid.ends[0] for grid in sweep.grids.values())
    if at_smallest:
        reached += f", {at_smallest} at the smallest N"
    exponent = interval(fit_of_form.exponent, fit_of_form.low, fit_of_form.high)
    grows = f"N50 ~ ({form})^{exponent}; {reached}"
    r2 = f"R2 {fit_of_form.r2:.3f}; best: {best.name}; {reached}"
    all_fits = "; ".join(fit.text for fit in fits)
    return [
        verdict("grows", grows, judge([fit_of_form.rises], [against]), published=says, **about),
        verdict("linear", r2, linear_word, all_fits, form=form, **about),
    ]


def figure_1b(trials: Sequence[Trial]) -> Result:
    """N50 against sigma, for each kind of first weights, and against the noise of the tokens.

    Parameters that are not swept have their defaults.
    """
    of_sigma = group_by([t for t in trials if t.task.noise == Theory().noise], lambda t: t.model.init)
    standard = [t for t in trials if t.model.sigma == Shallow().sigma and t.model.init == Shallow().init]
    by_init: dict[str, dict[float, Grid]] = {
        init: _grids(group, lambda t: t.model.sigma) for init, group in of_sigma.items()
    }
    by_noise: dict[str, dict[float, Grid]] = {Shallow().init: _grids(standard, lambda t: t.task.noise)}
    rows = [row for init, grids in by_init.items() for row in _trend_rows(grids, "sigma", init)]
    verdicts = [
        trend("1b", grids, f"N grows with sigma (first weights: {init})", "N ~ (c - sigma)^-2")
        for init, grids in by_init.items()
    ]
    panels: list[Panel] = [partial(_trends, curves=by_init, label="sigma")]
    if any(len(grids) > 1 for grids in by_noise.values()):
        rows += [row for init, grids in by_noise.items() for row in _trend_rows(grids, "c0", init)]
        verdicts += [
            trend("1b", grids, "N grows with the noise of the tokens, c0", "the same picture as sigma")
            for grids in by_noise.values()
        ]
        panels.append(partial(_trends, curves=by_noise, label="token noise $c_0$"))
    return Result("Figure 1b: samples needed against errors and noise", {"fig1b": rows}, panels, verdicts)


def _grids(trials: Sequence[Trial], key: Callable[[Trial], float]) -> dict[float, Grid]:
    return {value: Grid.of(group) for value, group in group_by(trials, key).items()}


def _trend_rows(grids: Mapping[float, Grid], swept: str, init: str) -> list[dict[str, Any]]:
    return [
        {"swept": swept, "init": init, "value": value, **grid.row, "N95": grid.n95, "largest N": grid.ends[1]}
        for value, grid in grids.items()
    ]


def trend(figure: str, grids: Mapping[float, Grid], claim: str, says: str) -> Verdict:
    """Return the verdict on whether N50 rises with x, the keys of `grids`; N50 is clipped to the N of all grids."""
    about = {"figure": figure, "claim": claim, "published": says}
    tried = {value: grid for value, grid in grids.items() if len(grid.wins)}
    if len(tried) < 2:
        return verdict("trend", "fewer than two values with an N50", "undecided", **about)
    x = np.array(list(tried))
    smallest = max(grid.ends[0] for grid in tried.values())
    largest = min(grid.ends[1] for grid in tried.values())

    n50 = np.clip([grid.n50[0] for grid in tried.values()], smallest, largest)
    slope = float(slopes(x, np.log(n50)[:, None])[0])
    resamples, repetitions = resamples_of(tried.values())
    resampled_slopes = slopes(x, np.log(np.clip(resamples, smallest, largest)))
    low, high = percentiles(resampled_slopes, min(repetitions))

    # Flat: N50 does not even double from the first x to the last.
    doubles = high * (x[-1] - x[0]) >= np.log(2)
    flat = not doubles and all(grid.within(smallest, largest) for grid in tried.values())
    first, last = tried[x[0]], tried[x[-1]]
    measured = (
        f"slope of log N50 {interval(slope, low, high)}; N50 {interval(*first.n50)} at {x[0]:g}, "
        f"{interval(*last.n50)} at {x[-1]:g}; N {smallest:g} to {largest:g}"
    )
    return verdict("trend", measured, judge([low > 0], [flat]), **about)


def _trends(axis: Any, curves: Mapping[str, Mapping[float, Grid]], label: str) -> None:
    for (name, grids), colour in zip(curves.items(), COLOURS, strict=False):
        points(axis, np.array(list(grids)), [grid.n50 for grid in grids.values()], name, colour)
    axis.set(xlabel=label, ylabel="N50, 95 % interval", yscale="log", title="measured (triangle: open above)")
    legend(axis, title="first weights")


def figure_3(trials: Sequence[Trial]) -> Result:
    """N50 with frozen and with trained attention."""
    sweeps = {name: Sweep([t for t in trials if t.model.attention == name]) for name in ("frozen", "trained")}
    frozen, trained = sweeps["frozen"], sweeps["trained"]
    ratios = {}
    for shares, grid in frozen.grids.items():
        if shares in trained.grids:
            ratios[shares[0]] = _ratio(grid, trained.grids[shares])
    verdicts = [
        _saves(ratios),
        *_linear("3", frozen, "frozen attention", "alpha_*^-4", "N95 grows by 7.6 a unit"),
    ]
    panels: list[Panel] = [
        partial(_draw_published, title="published, frozen", grid=published.FIGURE_3, power=4),
        partial(frozen.map, title="measured, frozen", power=4),
        partial(_both, sweeps=sweeps),
    ]
    success, needed = [], []
    for name, sweep in sweeps.items():
        success += sweep.success_rows(attention=name)
        needed += sweep.rows(attention=name)
    ratio_rows = [{"alpha_*": a, **columns(ratio, "frozen / trained")} for a, ratio in ratios.items()]
    tables = {"fig3": success, "fig3-n50": needed, "fig3-ratio": ratio_rows}
    return Result("Figure 3: samples needed without training the attention", tables, panels, verdicts)


def _saves(ratios: Mapping[float, tuple[float, float, float]]) -> Verdict:
    """Return the verdict on whether trained attention saves samples where few tokens are relevant."""
    hard = {a: ratio for a, ratio in ratios.items() if a <= HARD + 1e-9}
    saves = [low > 1 for _, low, _ in hard.values()]
    costs = [high < 1 for _, _, high in hard.values()]
    text = "; ".join(f"alpha_* {a:g}: {interval(*ratio)}" for a, ratio in hard.items())
    return verdict("saves", f"N50 frozen / trained: {text}", judge(saves, costs))


def _ratio(grid: Grid, other: Grid) -> tuple[float, float, float]:
    """Return the ratio of two N50, with its interval over the same resampled repetitions for both.

    An N50 at the smallest N may be smaller in truth, so its ratio is at most 1. If a resample reaches neither N50, its
    ratio is unknown, and the interval covers all values.
    """

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.where(a <= grid.ends[0], np.minimum(a / b, 1), a / b)

    value = float(ratio(np.array(grid.n50[0]), np.array(other.n50[0])))
    (resamples, others), repetitions = resamples_of([grid, other])
    ratios = ratio(resamples, others)
    unknown = np.isnan(ratios)
    if unknown.all():
        return value, float("nan"), float("nan")
    low, _ = percentiles(np.where(unknown, 0, ratios), min(repetitions))
    _, high = percentiles(np.where(unknown, np.inf, ratios), min(repetitions))
    return value, low, high


def _both(axis: Any, sweeps: Mapping[str, Sweep]) -> None:
    for (name, sweep), colour in zip(sweeps.items(), COLOURS, strict=False):
        if not sweep.trials:
            continue
        points(axis, sweep.relevant**-2, sweep.n50, f"{name} attention, 95 % interval", colour)
        group = sweep.trials[0]
        needed = theory.samples_needed_frozen if name == "frozen" else theory.samples_needed
        shape = needed(sweep.relevant, group.model.sigma, tau(group))
        proof = "Proposition 1" if name == "frozen" else "Theorem 1"
        draw_dashed(axis, sweep.relevant**-2, _through(shape, sweep.values), f"{proof}, scaled", colour)
    axis.set(title="measured", xlabel="$\\alpha_*^{-2}$", ylabel="N50", yscale="log")
    legend(axis)


def strategies(trials: Sequence[Trial]) -> Result:
    """N50 and steps with each strategy and with dense; not in the paper."""
    groups = group_by(trials, lambda t: t.strategy)
    grids = {name: Grid.of(group) for name, group in groups.items()}
    rows = []
    for name, grid in grids.items():
        ratio = _ratio(grid, grids.get("dense", Grid({})))
        largest = max(t.n for t in groups[name])
        rows.append(
            {
                "strategy": name,
                "removed": groups[name][0].removed,
                **grid.row,
                **columns(ratio, "N50 / dense", "ratio_low", "ratio_high"),
                "largest N": largest,
                "median steps there": _median_steps([t for t in groups[name] if t.n == largest]),
            }
        )
    panels: list[Panel] = [partial(_rates, grids=grids), partial(_steps, groups=groups)]
    title = "Samples and steps needed with each strategy (removes a fifth of the tokens, in training and test)"
    return Result(title, {"strategies": rows}, panels, [])


def _median_steps(trials: Sequence[Trial]) -> float:
    return float(np.median(values_of(trials, "steps") or [np.nan]))


def _rates(axis: Any, grids: Mapping[str, Grid]) -> None:
    for (name, grid), colour in zip(grids.items(), cycle(COLOURS), strict=False):
        axis.plot(grid.sizes, grid.rates, "o-", color=colour, label=name, markersize=3)
    axis.set(xscale="log", xlabel="training samples N", ylabel="success rate", title="trials that succeed")
    legend(axis)


def _steps(axis: Any, groups: Mapping[str, Sequence[Trial]]) -> None:
    for (name, group), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        by_n = group_by(group, lambda t: t.n)
        axis.plot(list(by_n), [_median_steps(ts) for ts in by_n.values()], "o-", color=colour, label=name, markersize=3)
    axis.set(xscale="log", xlabel="training samples N", ylabel="steps", title="steps until the training loss is zero")
