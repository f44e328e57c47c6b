"""The style of all plots: colours, dashes, sizes, and file formats."""

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
"""The colour-blind safe palette of Okabe and Ito (2008), without black and without yellow, which is pale on white.
Lighter and darker colours alternate, for print in grey."""
BLACK, DARK, GREY, PALE = "#000000", "#5f6670", "#8a919c", "#c9cdd3"
"""Colours of oracles and dense; of baselines; of predictions and notes; of lines without a label."""
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.2)), (0, (6, 1.2, 1.2, 1.2)), (0, (1.2, 1)))
FIRST = (0, 1, 2, 3, 1, 3)
"""The dash of the first line of each colour. Similar colours, such as the two blues, have different dashes."""
MARKERS = "osD^vP"
COLUMNS = {"one": 3.25, "two": 6.75}
"""Widths in inches of one and two columns of a paper."""
HEIGHTS = {"one": 2.4, "two": 3.375}
"""Smallest heights in inches of axes with accuracy over MACs, by width."""
LETTERS, SIZES = {"one": 20, "two": 34}, {"one": 7, "two": 9}
"""Longest name in characters, and font size in points, by width."""
THIN = 0.7
"""Width in points of axes and of lines without a label."""
DPI = 190
"""Resolution of PNG files: two columns are 1,282 pixels wide."""
FORMS: dict[str, dict[str, Any]] = {
    "png": {"metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}
"""File formats by ending, with options of matplotlib. Without dates the same figure gives the same bytes."""
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
    """The style of one line; the first 24 lines differ in colour or dash."""

    color: str
    linestyle: Any
    marker: str


def series(place: int) -> Series:
    """Return the style of line number `place`, from 0."""
    return Series(
        COLOURS[place % len(COLOURS)],
        DASHES[(FIRST[place % len(FIRST)] + place // len(COLOURS)) % len(DASHES)],
        MARKERS[place % len(MARKERS)],
    )


@contextmanager
def sheet(**more: Any) -> Iterator[None]:
    """Use the style of all plots in this context, with more settings of matplotlib."""
    import matplotlib

    settings: Any = SHEET | more
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)  # for names in other scripts
        yield


def new(width: float, height: float, dpi: int = DPI, **options: Any) -> Figure:
    """Return an empty figure with this size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, **options)
    FigureCanvasAgg(figure)
    return figure


def wrap(text: Text, most: float) -> None:
    """Wrap a text of a figure to lines of at most `most` pixels; do not break formulas, or words up to 40 letters."""
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
    """Return the content of a figure's file in one of FORMS; the same figure gives the same bytes."""
    out = io.BytesIO()
    with sheet():
        figure.savefig(out, format=form, dpi="figure", **FORMS[form])
    return out.getvalue()


def form_of(option: str, path: Path) -> str:
    """Return the format of a plot's file from its ending; raise UserError if it is not one of FORMS."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UserError(option, got=str(path), allowed=f"a name that ends with {', '.join(f'.{end}' for end in FORMS)}")
    return form
