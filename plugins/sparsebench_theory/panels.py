"""Parts of the figures of several papers: verdicts, maps, bands, points with intervals, predictions."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebench.paper import COLOURS, Verdict, Word
from sparsebench.stats import style
from sparsebench.stats.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PUBLISHED = style.BLACK
NOTHING = "#d6e8f5"
"""Colour of a map's cells without a value; other cells are grey."""


def verdicts_of(package: str, **constants: Any) -> Callable[..., Verdict]:
    """Return the function that makes verdicts on the claims of a package.

    Its claims.toml states for each claim the figure, the published value and the rule. The constants replace their
    names in braces in these texts.
    """
    text = (resources.files(package) / "claims.toml").read_text(encoding="utf-8")
    claims: dict[str, dict[str, str]] = tomllib.loads(text)

    def verdict(key: str, measured: str, word: Word, fits: str = "", **names: Any) -> Verdict:
        """Return the verdict on the claim `key`; `names` replace the other names in braces."""
        fields: dict[str, Any] = {field: text.format(**constants, **names) for field, text in claims[key].items()}
        return Verdict(measured=measured, fits=fits, verdict=word, **fields)

    return verdict


def heat_map(axis: Axes, title: str, x: np.ndarray, sizes: np.ndarray, rates: np.ndarray, label: str) -> None:
    """Draw success rates (len(sizes), len(x)): white if all trials succeed, black if none does."""
    axis.set_facecolor(NOTHING)  # cells that were not run
    if rates.size:
        axis.imshow(rates, cmap="gray", vmin=0, vmax=1, origin="lower", aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        if np.isfinite(rate):
            colour = "black" if rate > 0.5 else "white"
            axis.text(column, row, f"{rate:.2g}", ha="center", va="center", fontsize=6, color=colour)
    axis.set_xticks(range(len(x)), [f"{value:.4g}" for value in x], rotation=60)
    axis.set_yticks(range(len(sizes)), [str(n) for n in sizes])
    axis.set(title=title, xlabel=label, ylabel="training samples N")


def band(axis: Axes, x: np.ndarray, values: np.ndarray, label: str, colour: str) -> None:
    """Draw the mean of values (repetitions, len(x)), if any, with a band of one standard deviation."""
    if not len(values):
        return
    mean = values.mean(axis=0)
    axis.plot(x, mean, color=colour, label=label, marker="o", markersize=3)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axis.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def points(axis: Axes, x: np.ndarray, triples: list[Interval], label: str, colour: str) -> None:
    """Draw values with their intervals.

    A triangle is a value whose interval has no upper end. A hollow triangle at the lower end of the interval stands for
    an infinite value.
    """
    for place, (value, low, high) in zip(x, triples, strict=True):
        if np.isfinite(value):
            closed = high is None or np.isfinite(high)
            ends = (value if low is None else low, value if high is None or not closed else high)
            axis.plot([place, place], ends, color=colour, linewidth=1)
            axis.plot(place, value, "o" if closed else "^", color=colour, markersize=4)
        elif low is not None and np.isfinite(low):
            axis.plot(place, low, "^", color=colour, markerfacecolor="none")
    axis.plot([], [], "o", color=colour, label=label)


def draw_categories(axis: Axes, series: Mapping[str, Mapping[str, Interval]]) -> None:
    """Draw the values of each series by category, with intervals, side by side."""
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    for number, ((label, values), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        places = np.array([names.index(name) for name in values]) + 0.2 * number
        points(axis, places, list(values.values()), label, colour)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    legend(axis)


def legend(axis: Axes, title: str | None = None) -> None:
    """Draw the legend, if the axis has labelled artists."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, title=title)


def draw_dashed(axis: Axes, x: np.ndarray, y: np.ndarray, label: str, colour: str = style.GREY) -> None:
    """Draw a prediction as a dashed line."""
    order = np.argsort(x)
    axis.plot(x[order], y[order], "--", color=colour, linewidth=1, label=label)
