"""The style sheet of all pictures: colours, dashes, sizes, and how a picture becomes a file. Needs matplotlib alone."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsebench.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
"""The palette of Okabe and Ito (2008), which the colour-blind tell apart, without black and the yellow that is pale on
white; lighter and darker ones take turns, for print without colours."""
BLACK, DARK, GREY, PALE = "#000000", "#5f6670", "#8a919c", "#c9cdd3"
"""Of oracles and dense; of baselines; of predictions and notes; of what is there but not named."""
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.2)), (0, (6, 1.2, 1.2, 1.2)), (0, (1.2, 1)))
FIRST = (0, 1, 2, 3, 1, 3)
"""Which dash the first line of each colour has: those of the two blues differ, and so on for the colour-blind."""
MARKERS = "osD^vP"
COLUMNS = {"one": 3.25, "two": 6.75}
"""Inches of one column and of two columns of a paper."""
HEIGHTS = {"one": 2.4, "two": 3.375}
"""Inches of axes with lines over the MACs, at least."""
LETTERS, SIZES = {"one": 20, "two": 34}, {"one": 7, "two": 9}
"""Of a name at most, and of all letters of a board's pictures in points, by the width."""
THIN = 0.7
"""Width in points of axes and of lines that are not named."""
DPI = 190
"""Of PNG files: two columns are 1,282 pixels."""
FORMS: dict[str, dict[str, Any]] = {
    "png": {"metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}
"""What files can be, by their ending; without dates the same picture is the same bytes."""
SHEET: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DARK,
    "axes.linewidth": THIN,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "sparsebench",
    "pdf.fonttype": 42,
}


class Series(NamedTuple):
    """How one line is drawn; the first 24 differ in colour or dash."""

    color: str
    linestyle: Any
    marker: str


def series(place: int) -> Series:
    """Return how the line number `place` is drawn."""
    return Series(
        COLOURS[place % len(COLOURS)],
        DASHES[(FIRST[place % len(FIRST)] + place // len(COLOURS)) % len(DASHES)],
        MARKERS[place % len(MARKERS)],
    )


@contextmanager
def sheet(**more: Any) -> Iterator[None]:
    """Draw in the style of all pictures, with more of matplotlib's settings."""
    import matplotlib

    settings: Any = SHEET | more
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)  # a name in letters of another font
        yield


def new(width: float, height: float, dpi: int = DPI, **options: Any) -> Figure:
    """Return an empty figure of so many inches, which no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, **options)
    FigureCanvasAgg(figure)
    return figure


def wrap(text: Text, most: float) -> None:
    """Break a text of a figure into lines of at most so many pixels; formulas stay whole, and words where they can."""
    lines = [""]
    for word in re.findall(r"(?:\$[^$\s][^$]*\$|\S)+", text.get_text()):
        for piece in [word] if "$" in word else [word[i : i + 40] for i in range(0, len(word), 40)]:
            text.set_text(f"{lines[-1]} {piece}".strip())
            if lines[-1] and text.get_window_extent().width > most:
                lines.append(piece)
            else:
                lines[-1] = text.get_text()
    text.set_text("\n".join(lines))


def content(figure: Figure, form: str = "png") -> bytes:
    """Return a figure as a file of one of FORMS; the same figure gives the same bytes."""
    out = io.BytesIO()
    with sheet():
        figure.savefig(out, format=form, dpi="figure", **FORMS[form])
    return out.getvalue()


def form_of(option: str, path: Path) -> str:
    """Return what a file of a picture is, by its ending.

    Raises:
        UserError: none of FORMS.
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UserError(option, got=str(path), allowed=f"a name that ends with {', '.join(f'.{end}' for end in FORMS)}")
    return form
