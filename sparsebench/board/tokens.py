"""A picture of what strategies keep: test pictures below each other, strategies and their stages side by side."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparsebench.sweep.show_tokens import Pictures, Shown, Stage

SIDE, BETWEEN, APART = 1.35, 0.07, 0.3
LEFT, TOP, BELOW, BOTTOM = 1.0, 1.05, 0.26, 0.45
"""Inches: of a picture, between stages, between strategies; and of the margins, BELOW each picture."""
LEGEND = "yellow outline: what matters to the label    grey: removed"
SHARED = "    tinted and outlined together: patches that share a token"
POINT = 0.6 / 72
"""Inches that a letter takes for each point of its size, at most."""
PIXELS = 256
GONE = np.array([203, 208, 216])
MATTERS = np.array([250, 204, 21])
TOKENS = np.array([
    [37, 99, 235], [220, 38, 38], [5, 150, 105], [217, 119, 6], [124, 58, 237], [8, 145, 178], [219, 39, 119],
    [101, 163, 13], [17, 24, 39], [255, 255, 255],
])  # fmt: skip
RIGHT, WRONG = "#15803d", "#b91c1c"


def painted(
    picture: np.ndarray, matters: np.ndarray, token: np.ndarray | None = None, grid: tuple[int, int] = (1, 1)
) -> np.ndarray:
    """Return a picture, enlarged, with what matters outlined and with what became of its patches.

    Patches that are in no token are greyed; those that share one are tinted and outlined together.

    Args:
        picture: (height, width, 3) uint8.
        matters: (height, width) booleans.
        token: (N,) which token each patch is in, -1 for none; None for all as they were.
        grid: (rows, columns) of the patches.
    """
    height, width = matters.shape
    scale = max(1, -(-PIXELS // height))
    large = _enlarged(picture, scale, scale)
    line = max(1, large.shape[0] // 64)
    if token is not None:
        tokens = _enlarged(token.reshape(grid), scale * height // grid[0], scale * width // grid[1])
        large[tokens < 0] = (large[tokens < 0] + 7.0 * GONE) / 8
        shared = np.bincount(token[token >= 0], minlength=1) > 1
        several = (tokens >= 0) & shared[tokens]
        colours = TOKENS[(np.cumsum(shared) - 1)[tokens] % len(TOKENS)]
        large[several] = (3.0 * large[several] + colours[several]) / 4
        outlined = several & _edges(tokens, line)
        large[outlined] = colours[outlined]
    large[_edges(_enlarged(matters, scale, scale).astype(int), line) & _enlarged(matters, scale, scale)] = MATTERS
    return large


def _enlarged(values: np.ndarray, down: int, across: int) -> np.ndarray:
    return values.repeat(down, axis=0).repeat(across, axis=1)


def _edges(areas: np.ndarray, line: int) -> np.ndarray:
    """Return which pixels of (height, width) numbered areas are within `line` pixels of another area or the rim."""
    wide = np.pad(areas, line, constant_values=-2)
    height, width = areas.shape
    ends = ((0, line), (2 * line, line), (line, 0), (line, 2 * line))
    return np.logical_or.reduce([wide[y : y + height, x : x + width] != areas for y, x in ends])


def draw(pictures: Pictures) -> bytes:
    """Return the picture as PNG; the same pictures give the same bytes."""
    out = io.BytesIO()
    figure(pictures).savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def figure(pictures: Pictures) -> Figure:
    """Return the figure: a column for the pictures, then each strategy with its stages."""
    wide = [_width(max(1, len(shown.stages))) for shown in pictures.shown]
    n = len(pictures.pictures)
    sheet = _Sheet(LEFT + SIDE + sum(APART + width for width in wide) + 0.2, _top(n) + BOTTOM)
    sheet.text(0.15, 0.22, pictures.title, 10, ha="left", weight="bold")
    sheet.text(LEFT + SIDE / 2, TOP - 0.06, "the picture", 7, va="bottom")
    for row, name in enumerate(pictures.names):
        sheet.text(LEFT - 0.1, _top(row) + SIDE / 2, _wrapped(name, LEFT - 0.2, 8), 8, ha="right")
        sheet.picture(LEFT, _top(row), painted(pictures.pictures[row], pictures.matters[row]))
    left = LEFT + SIDE + APART
    for shown, width in zip(pictures.shown, wide, strict=True):
        budget = _wrapped(shown.budget, width, 7)
        above = 0.2 + 0.13 * len(budget.splitlines())
        sheet.text(left + width / 2, TOP - 0.2, budget, 7, va="bottom")
        sheet.text(left + width / 2, TOP - above, _wrapped(shown.label, width, 8), 8, va="bottom", weight="bold")
        if shown.why:
            why = textwrap.shorten(f"no result: {shown.why}", 40 * n, placeholder=" ...")
            sheet.text(left + width / 2, TOP, _wrapped(why, width, 7), 7, va="top", color=WRONG)
        else:
            _strategy(sheet, pictures, shown, left)
        left += width + APART
    legend = LEGEND + (SHARED if any(_shares(stage) for shown in pictures.shown for stage in shown.stages) else "")
    sheet.text(0.15, _top(n) + 0.15, legend, 7, ha="left")
    return sheet.figure


def _strategy(sheet: _Sheet, pictures: Pictures, shown: Shown, left: float) -> None:
    """Draw one strategy's pictures, stage by stage, with what the network says in the end below the last."""
    N = pictures.grid[0] * pictures.grid[1]
    stages = [(f"{s.place}: {s.count} of {N}", s.token) for s in shown.stages] or [(f"all {N}", None)]
    for number, (caption, token) in enumerate(stages):
        x = left + number * (SIDE + BETWEEN)
        mixed = bool(shown.stages) and token is None
        sheet.text(x + SIDE / 2, TOP - 0.06, caption + (", mixed" if mixed else ""), 7, va="bottom")
        for row, (picture, matters) in enumerate(zip(pictures.pictures, pictures.matters, strict=True)):
            own = None if token is None else token[row]
            sheet.picture(x, _top(row), painted(picture, matters, own, pictures.grid))
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


def _wrapped(text: str, width: float, size: int) -> str:
    """Return the text on as many lines as `width` inches make it need."""
    return textwrap.fill(text, max(4, int(width / (POINT * size))))


class _Sheet:
    """A figure on which things have places in inches from its top left corner."""

    def __init__(self, width: float, height: float):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height))
        FigureCanvasAgg(self.figure)

    def text(self, x: float, y: float, text: str, size: int, **how: Any) -> None:
        """Write a text, centred there unless told otherwise."""
        aligned = {"ha": "center", "va": "center", **how}
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, parse_math=False, **aligned)

    def picture(self, x: float, y: float, pixels: np.ndarray) -> None:
        """Put a picture there with its top left corner."""
        place = (x / self.width, 1 - (y + SIDE) / self.height, SIDE / self.width, SIDE / self.height)
        axis = self.figure.add_axes(place)
        axis.imshow(pixels)
        axis.set_axis_off()
