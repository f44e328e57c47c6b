"""A picture of what strategies keep: test pictures below each other, strategies and their stages side by side."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from sparsebench import style
from sparsebench.look.canvas import APART, BETWEEN, POINT, SIDE, Ink, Sheet, rgb, tint, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparsebench.look.show_tokens import Pictures, Shown, Stage

LEFT, TOP, BELOW, BOTTOM = 1.0, 1.05, 0.26, 0.45
"""Inches: of the margins, BELOW each picture."""
LEGEND = "yellow outline: what matters to the label    grey: removed"
SHARED = "    tinted and outlined together: patches that share a token"
TOKENS = np.array([rgb(colour) for colour in (*style.COLOURS, style.BLACK, "#ffffff")])
RIGHT, WRONG = style.COLOURS[0], style.COLOURS[3]


def paint(
    picture: np.ndarray, matters: np.ndarray, token: np.ndarray | None = None, grid: tuple[int, int] = (1, 1)
) -> np.ndarray:
    """Return a picture in which patches that are in no token are greyed, and those that share one are tinted together.

    Args:
        picture, matters, grid: see `canvas.tint`.
        token: (N,) which token each patch is in, -1 for none; None for all as they were.
    """
    counts = np.zeros(0) if token is None else np.bincount(token[token >= 0])
    inks = {int(number): Ink(TOKENS[turn % len(TOKENS)]) for turn, number in enumerate(np.flatnonzero(counts > 1))}
    return tint(picture, matters, token, grid, inks)


def draw(pictures: Pictures, form: str = "png") -> bytes:
    """Return the picture as one of `style.FORMS`; the same pictures give the same bytes."""
    return style.content(figure(pictures), form)


def figure(pictures: Pictures) -> Figure:
    """Return the figure: a column for the pictures, then each strategy with its stages."""
    wide = [_width(max(1, len(shown.stages))) for shown in pictures.shown]
    n = len(pictures.pictures)
    sheet = Sheet(pictures.title, LEFT + SIDE + sum(APART + width for width in wide) + 0.2, _top(n) + BOTTOM)
    sheet.text(LEFT + SIDE / 2, TOP - 0.06, "the picture", 7, va="bottom")
    for row, name in enumerate(pictures.names):
        sheet.text(LEFT - 0.1, _top(row) + SIDE / 2, wrap(name, LEFT - 0.2, 8), 8, ha="right")
        sheet.picture(LEFT, _top(row), paint(pictures.pictures[row], pictures.matters[row]))
    left = LEFT + SIDE + APART
    for shown, width in zip(pictures.shown, wide, strict=True):
        budget = wrap(shown.budget, width, 7)
        above = 0.2 + 0.13 * len(budget.splitlines())
        sheet.text(left + width / 2, TOP - 0.2, budget, 7, va="bottom")
        sheet.text(left + width / 2, TOP - above, wrap(shown.label, width, 8), 8, va="bottom", weight="bold")
        if shown.why:
            why = textwrap.shorten(f"no result: {shown.why}", 40 * n, placeholder=" ...")
            sheet.text(left + width / 2, TOP, wrap(why, width, 7), 7, va="top", color=WRONG)
        else:
            _strategy(sheet, pictures, shown, left)
        left += width + APART
    legend = LEGEND + (SHARED if any(_shares(stage) for shown in pictures.shown for stage in shown.stages) else "")
    sheet.text(0.15, _top(n) + 0.15, legend, 7, ha="left")
    return sheet.figure


def _strategy(sheet: Sheet, pictures: Pictures, shown: Shown, left: float) -> None:
    """Draw one strategy's pictures, stage by stage, with what the network says in the end below the last."""
    N = pictures.grid[0] * pictures.grid[1]
    stages = [(f"{s.place}: {s.count} of {N}", s.token) for s in shown.stages] or [(f"all {N}", None)]
    for number, (caption, token) in enumerate(stages):
        x = left + number * (SIDE + BETWEEN)
        mixed = bool(shown.stages) and token is None
        sheet.text(x + SIDE / 2, TOP - 0.06, caption + (", mixed" if mixed else ""), 7, va="bottom")
        for row, (picture, matters) in enumerate(zip(pictures.pictures, pictures.matters, strict=True)):
            tokens = None if token is None else token[row]
            sheet.picture(x, _top(row), paint(picture, matters, tokens, pictures.grid))
    for row, (said, label) in enumerate(zip(shown.predicted, pictures.labels, strict=True)):
        word, colour = ("right", RIGHT) if said == label else ("wrong", WRONG)
        text = textwrap.shorten(f"{word}: {pictures.classes[said]}", int(SIDE / (POINT * 8)), placeholder="...")
        sheet.text(x + SIDE / 2, _top(row) + SIDE + 0.03, text, 8, va="top", color=colour)


def _shares(stage: Stage) -> bool:
    """Say whether some token stands for several patches."""
    return stage.token is not None and any(np.bincount(row[row >= 0]).max(initial=0) > 1 for row in stage.token)


def _top(row: int) -> float:
    return TOP + row * (SIDE + BELOW)


def _width(stages: int) -> float:
    return stages * SIDE + (stages - 1) * BETWEEN
