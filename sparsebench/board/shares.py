"""The picture of accuracy against dense over the share of relevant tokens in the pictures, the alpha of the theory.

The main task of a board can be tested at several shares, on the same networks: each is a section of the board. The
share is that among all tokens, as dense keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from sparsebench.board.board import Board
from sparsebench.board.columns import BY_KEY, over_budget
from sparsebench.board.comparison import about
from sparsebench.board.judge import Ranking
from sparsebench.board.over_budgets import Curves, middle_of
from sparsebench.board.picture import (
    LINEAR,
    REFERENCES,
    add_legend,
    check_number,
    fit,
    looks_of,
    new_charts,
    notes_on_references,
    sheet,
)
from sparsebench.board.reading import DENSE
from sparsebench.errors import UserError, unknown
from sparsebench.stats import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITY = "shares"
APART = 0.006
"""Points of different strategies at one share stand this far apart, in powers of ten."""


class Section(NamedTuple):
    """The ranking of the main task at one share of relevant tokens, over its budgets."""

    share: float
    ranking: Ranking
    curves: Curves


def sections_of(board: Board) -> list[Section]:
    """Return the sections of a board by rising share; empty without two shares, and without a budget that all have."""
    judged = board.judged
    by_share: dict[float, Section] = {}
    for ranking in (*judged.rankings[:1], *judged.sections):
        if ranking.curves is None:
            continue
        share = ranking.comparison.relevant
        if not math.isnan(share):
            by_share.setdefault(round(share, 4), Section(share, ranking, ranking.curves))
    sections = [by_share[share] for share in sorted(by_share)]
    return sections if len(sections) > 1 and _budgets(sections) else []


def draw(board: Board, strategies: Sequence[str] = (), width: str = "two", title: str | None = None) -> Figure:
    """Return the picture: a chart for each of two budgets, the one nearest to one half and the smallest.

    Args:
        board: the board.
        strategies: the strategies to draw beside the references; by default those that are the most accurate at one
            of the shares and budgets.
        width: one of `style.COLUMNS`.
        title: text above the picture; None for a description of the networks.

    Raises:
        UserError: the board has fewer than two shares, a strategy has no point, or there are too many.
    """
    sections = sections_of(board)
    if not sections:
        raise UserError(
            "the main task was not tested at two shares of relevant tokens with a common budget",
            next_step="run the suite vit-s, or --task composite:foreground=S,S with several sizes of the object",
        )
    budgets = _budgets(sections)
    points = _points(sections)
    points = points[points["asked"].isin(budgets)]
    chosen = _checked(strategies, points) if strategies else _most_accurate(points)
    check_number(chosen)
    looks = looks_of(set(points["curve"]), chosen)
    drawn = points[points["curve"].isin(looks)]

    if title is None:
        main = sections[0].ranking.comparison
        title = about(replace(main, task=main.source), with_share=False) if width == "two" else ""
    notes = [
        "Bars: 95 % intervals of differences to dense.",
        "The horizontal axis is logarithmic, the vertical one is stretched near dense.",
    ]
    if not strategies:
        notes.append("In colour: the most accurate at one of the shares and budgets.")
    notes += notes_on_references(looks, width)

    with sheet(width):
        figure, axes, legend = new_charts(len(budgets), len(looks), width, title, " ".join(notes))
        for axis in axes[1:]:
            axis.sharey(axes[0])
            axis.tick_params(labelleft=False)
        for axis, budget in zip(axes, budgets, strict=True):
            _draw_chart(axis, drawn[drawn["asked"] == budget], looks)
            axis.set_title(f"{budget:g} of the MACs", fontsize="medium")
            axis.set_xlabel("share of relevant tokens" if width == "two" else "relevant tokens")
        fit(axes[0], min(-0.5, drawn["low"].min()), max(0.2, drawn["high"].max()))
        axes[0].set_ylabel("accuracy against dense, points")
        add_legend(legend, axes[0], width)
    return figure


def _checked(strategies: Sequence[str], points: pd.DataFrame) -> list[str]:
    """Return the strategies without dense and duplicates; raise UserError if one has no point."""
    known = set(points["curve"])
    for name in strategies:
        if name not in known:
            raise unknown("strategy in the picture", name, known)
    return [name for name in dict.fromkeys(strategies) if name != DENSE]


def _budgets(sections: Sequence[Section]) -> list[float]:
    """Return the common budget nearest to one half and the smallest one; empty without a common one."""
    common = set.intersection(*(set(section.curves.budgets) for section in sections))
    if not common:
        return []
    return sorted({middle_of(common), min(common)}, reverse=True)


def _points(sections: Sequence[Section]) -> pd.DataFrame:
    """Return a row for each strategy, budget and share.

    The columns are curve, asked, kind, accuracy, share, is_ranked, and in points value, low and high. Rows over their
    budget are left out, and dense is.
    """
    parts = []
    for section in sections:
        rows = section.ranking.every
        rows = rows[rows["curve"].notna() & rows["accuracy_delta"].notna() & (rows["curve"] != DENSE)]
        rows = rows[~over_budget(rows)]
        points = rows[["curve", "asked", "kind", "accuracy"]].assign(
            share=section.share, is_ranked=rows["rank_low"].notna()
        )
        for name, key in zip(("value", "low", "high"), BY_KEY["accuracy_delta"].keys, strict=True):
            points[name] = 100 * rows[key].fillna(rows["accuracy_delta"]).astype(float)
        parts.append(points)
    return pd.concat(parts, ignore_index=True)


def _most_accurate(points: pd.DataFrame) -> list[str]:
    """Return the strategies that are the most accurate at a share and a budget; those with ranks, if any has one."""
    candidates = points[points["kind"] == "deployable"]
    if candidates["is_ranked"].any():
        candidates = candidates[candidates["is_ranked"]]
    first = candidates.sort_values(["accuracy", "curve"], ascending=[False, True]).drop_duplicates(["share", "asked"])
    return sorted(first["curve"].unique())


def _draw_chart(axis: Axes, points: pd.DataFrame, looks: dict[str, style.Series]) -> None:
    """Draw the lines of one budget over the share, with intervals; references are drawn without."""
    axis.set_xscale("log")
    axis.set_yscale("asinh", linear_width=LINEAR)
    axis.axhline(0, color=style.BLACK, linewidth=style.THIN)
    for place, (name, look) in enumerate(looks.items()):
        line = points[points["curve"] == name].sort_values("share")
        x = line["share"].to_numpy(float) * 10 ** (APART * (place - len(looks) / 2))
        axis.plot(x, line["value"], color=look.color, linestyle=look.linestyle, marker=look.marker, label=name)
        if name not in REFERENCES:
            axis.vlines(x, line["low"], line["high"], color=look.color, linewidth=0.8, alpha=0.7)
    shares = sorted(points["share"].unique())
    axis.set_xticks(shares, [f"{100 * share:.{0 if share >= 0.1 else 1}f} %" for share in shares])
    axis.set_xticks([], minor=True)
    axis.grid(axis="y")
