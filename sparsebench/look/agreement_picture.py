"""A picture of where two strategies keep the same patches: test pictures below each other, block after block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsebench import style
from sparsebench.look.canvas import APART, BETWEEN, GONE, MATTERS, SIDE, Ink, Sheet, rgb, tint, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparsebench.look.compare import Agreement, Comparison
    from sparsebench.look.pictures import Scene

LEFT, BELOW, BOTTOM, PAIR = 1.0, 0.26, 0.5, 2 * SIDE + BETWEEN
"""Inches: of the margins, BELOW each picture, and the width of a PAIR of them."""
BOTH = 2
INKS = {0: Ink(rgb(style.COLOURS[0]), 0.4), 1: Ink(rgb(style.COLOURS[3]), 0.4), BOTH: Ink(rgb(style.BLACK), 0)}
"""Of patches that A keeps alone, that B does, and that both do: blue, vermilion and black, which the colour-blind tell
apart from each other, from grey and from yellow."""


def draw(comparison: Comparison, form: str = "png") -> bytes:
    """Return the picture as one of `style.FORMS`; the same comparison gives the same bytes."""
    return style.content(figure(comparison), form)


def figure(comparison: Comparison) -> Figure:
    """Return the figure: a column for the pictures, then for each block what A and B keep, side by side."""
    shown, stages = comparison.scene, comparison.stages
    assert shown is not None
    width, n = LEFT + SIDE + len(stages) * (APART + PAIR) + 0.2, len(shown.pictures)
    names = [f"{side}: {of.label}, {of.budget}" for side, of in zip("AB", comparison.sides, strict=True)]
    about = [line for name in names for line in wrap(name, width - 0.3, 8).splitlines()]
    top = 0.85 + 0.15 * len(about)
    sheet = Sheet(shown.title, width, top + n * (SIDE + BELOW) + BOTTOM)
    for number, line in enumerate(about):
        sheet.text(0.15, 0.43 + 0.15 * number, line, 8, ha="left")
    sheet.text(LEFT + SIDE / 2, top - 0.06, "the picture", 7, va="bottom")
    for row, name in enumerate(shown.names):
        y = top + row * (SIDE + BELOW)
        sheet.text(LEFT - 0.1, y + SIDE / 2, wrap(name, LEFT - 0.2, 8), 8, ha="right")
        sheet.picture(LEFT, y, tint(shown.pictures[row], shown.matters[row]))
    for number, stage in enumerate(stages):
        _stage(sheet, stage, comparison.rows, shown, LEFT + SIDE + APART + number * (PAIR + APART), top)
    _legend(sheet)
    return sheet.figure


def _stage(sheet: Sheet, stage: Agreement, rows: np.ndarray, shown: Scene, left: float, top: float) -> None:
    """Draw what A and B keep after one block, with their IoU below each pair."""
    sheet.text(left + PAIR / 2, top - 0.22, f"after block {stage.block}", 8, va="bottom", weight="bold")
    kept = [kept[rows] for kept in stage.kept]
    for side, tokens in enumerate(kept):
        x = left + side * (SIDE + BETWEEN)
        sheet.text(x + SIDE / 2, top - 0.06, f"{'AB'[side]}: {_count(tokens)} of {tokens.shape[1]}", 7, va="bottom")
        area = np.where(tokens, np.where(kept[1 - side], BOTH, side), -1)
        for row, (picture, matters) in enumerate(zip(shown.pictures, shown.matters, strict=True)):
            sheet.picture(x, top + row * (SIDE + BELOW), tint(picture, matters, area[row], shown.grid, INKS))
    for row, iou in enumerate(stage.iou[rows]):
        says = "neither names a patch" if np.isnan(iou) else f"IoU {iou:.2f}"
        sheet.text(left + PAIR / 2, top + row * (SIDE + BELOW) + SIDE + 0.03, says, 8, va="top")


def _count(kept: np.ndarray) -> str:
    """Return how many patches are kept, of one picture or as a range."""
    few, many = kept.sum(axis=1).min(), kept.sum(axis=1).max()
    return str(few) if few == many else f"{few}-{many}"


def _legend(sheet: Sheet) -> None:
    """Say at the bottom what the colours mean."""
    from matplotlib.patches import Patch

    names = {BOTH: "kept by both", 0: "kept by A only", 1: "kept by B only"}
    handles = [
        Patch(facecolor=_pale(INKS[number]), edgecolor=INKS[number].line, linewidth=1.5, label=name)
        for number, name in names.items()
    ]
    handles.append(Patch(facecolor=Ink(GONE).line, label="removed"))
    handles.append(
        Patch(facecolor="none", edgecolor=Ink(MATTERS).line, linewidth=1.5, label="what matters to the label")
    )
    place = (0.15 / sheet.width, 0.08 / sheet.height)
    sheet.figure.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=3, fontsize=7, frameon=False)


def _pale(ink: Ink) -> tuple[float, float, float]:
    """Return what white becomes inside an area."""
    return Ink(255 * (1 - ink.strength) + ink.strength * ink.colour).line
