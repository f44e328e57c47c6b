"""What a paper is that is reproduced: its figures, each with data, pictures and verdicts on what was claimed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsebench.stats import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sparsebench.plan.request import Job

Panel = Callable[["Axes"], None]
Word = Literal["reproduced", "partly", "not reproduced", "undecided"]
COLOURS = (*(style.COLOURS[place] for place in (0, 1, 2, 3, 5)), style.GREY)
"""Of series; the last is of predictions."""
WIDTH, HEIGHT = 4.2, 3.3
"""Inches of a panel."""


@dataclass(frozen=True)
class Trial:
    """One record: its data and model, and what came out.

    Attributes:
        task, model: as the registry knows them; which they are depends on the figure.
        strategy: its label; `removed` the share of tokens it removes.
        where: whether it acts in training, in the test, or in both.
        values: metrics by name; None where there was nothing to measure.
        curves: what was watched while training, by name.
        diverged: training reached NaN or infinity, which is no success.
    """

    task: Any
    model: Any
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


@dataclass(frozen=True)
class Verdict:
    """One claim of one figure.

    Attributes:
        figure: its number.
        claim: what the paper says.
        published: its value.
        measured: ours, with its interval.
        fits: what else explains the measured values, and how well.
        verdict: one of four words; undecided is what too few trials leave.
        rule: what decided between them.
    """

    figure: str
    claim: str
    published: str
    measured: str
    fits: str
    verdict: Word
    rule: str


def judge(holds: Sequence[bool], against: Sequence[bool]) -> Word:
    """Return the word for the parts of a claim.

    All hold: reproduced; some: partly. None: not reproduced if the measurement speaks against any, else undecided.
    """
    if holds and all(holds):
        return "reproduced"
    return "partly" if any(holds) else "not reproduced" if any(against) else "undecided"


@dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
        title: what it shows.
        tables: the data by the name of the CSV file, rows with the same keys.
        panels: what draws each panel.
        verdicts: what became of its claims.
    """

    title: str
    tables: dict[str, list[dict[str, Any]]]
    panels: list[Panel]
    verdicts: list[Verdict]

    def pictures(self) -> dict[str, bytes]:
        """Return the figure as PNG, SVG and PDF; the same data give the same bytes."""
        columns = 2 if len(self.panels) == 4 else min(3, len(self.panels))
        rows = -(-len(self.panels) // columns)
        with style.sheet():
            figure = style.new(WIDTH * columns, HEIGHT * rows + 0.4, layout="constrained")
            axes = figure.subplots(rows, columns, squeeze=False).ravel()
            for panel, axis in zip(self.panels, axes, strict=False):
                panel(axis)
            for axis in axes[len(self.panels) :]:
                axis.set_visible(False)
            style.wrap(figure.suptitle(self.title), figure.bbox.width - figure.dpi * 0.2)
            figure.draw_without_rendering()
            for axis in axes:
                _dash(axis)
                style.wrap(axis.title, axis.get_tightbbox().width)
            return {form: style.content(figure, form) for form in style.FORMS}


def _dash(axis: Axes) -> None:
    """Let the lines of several series differ in their dashes too, for print and for those who see few colours."""
    lines = {str(line.get_label()): line for line in axis.lines if line.get_color() in COLOURS[:-1]}
    solid = {label: line for label, line in lines.items() if label[0] != "_" and line.get_linestyle() == "-"}
    dashes = {
        label: style.DASHES[COLOURS.index(str(line.get_color())) % len(style.DASHES)] for label, line in solid.items()
    }
    legend = axis.get_legend()
    handles = [] if legend is None else zip(legend.get_texts(), legend.get_lines(), strict=False)
    for label, line in (*solid.items(), *((text.get_text(), handle) for text, handle in handles)):
        if len(solid) > 1 and label in dashes:
            line.set_linestyle(dashes[label])


@dataclass(frozen=True)
class Paper:
    """A paper whose figures are made again.

    Attributes:
        name: what users type.
        title: what it is.
        suites: the suite of each preset, from the smallest to the largest.
        figures: how each is made of its trials, by its number in the paper, or by a name if it is not in it.
        seconds: how long a trial is expected to take on one core, where no trial like it has been run.
    """

    name: str
    title: str
    suites: Mapping[str, str]
    figures: Mapping[str, Callable[[Sequence[Trial]], Result]]
    seconds: Callable[[Job], float]

    @property
    def presets(self) -> tuple[str, ...]:
        """From the smallest to the largest."""
        return tuple(self.suites)


def interval(value: float, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return "value [low, high]", without ends that are not known; an infinite number is "not reached"."""

    def text(number: float) -> str:
        if math.isnan(number):
            return "no number"
        return "not reached" if number == float("inf") else f"{number:.{digits}g}"

    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return text(value)
    return f"{text(value)} [{text(low)}, {text(high)}]"


def markdown(verdicts: Iterable[Verdict], notes: Sequence[str]) -> str:
    """Return the table with its notes."""
    from tabulate import tabulate

    cells = [{key: _literal(value) for key, value in asdict(v).items()} for v in verdicts]
    rows = [{**row, "verdict": f"**{row['verdict']}**"} for row in cells]
    table = tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)
    return "\n".join([table, "", "[ ] are 95 % intervals.", *(f"- {_literal(note)}" for note in notes), ""])


def _literal(text: str) -> str:
    """Return text as Markdown that says the same in one line: alpha_* is no emphasis, and a bar no cell."""
    return re.sub(r"([\\|*`<])", r"\\\1", " ".join(text.split()))


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as CSV; what is NaN or None is left empty, and so is a file without rows."""
    import pandas as pd

    # Of objects, so that whole numbers stay such beside None.
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n") if rows else ""
