"""Papers to reproduce: their figures, with data, pictures and verdicts on the papers' claims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparsebench.stats import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sparsebench.plan.jobs import Job

Panel = Callable[["Axes"], None]
Word = Literal["reproduced", "partly", "not reproduced", "undecided"]
COLOURS = (*(style.COLOURS[place] for place in (0, 1, 2, 3, 5)), style.GREY)
"""Colours of series; the last is that of predictions."""
WIDTH, HEIGHT = 4.2, 3.3
"""Size of a panel in inches."""


@dataclass(frozen=True)
class Trial:
    """The data, model and results of one record.

    Attributes:
        task, model: the task and the model with their parameters.
        strategy: label of the strategy.
        removed: share of the tokens that the strategy removes.
        where: where the strategy acts: "train", "test" or "both".
        n: number of training samples.
        values: metrics by name; None if there was nothing to measure.
        curves: values measured during training, by name.
        diverged: whether the loss became NaN or infinite, which counts as failure.
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
        """1 for success, otherwise 0."""
        return 0.0 if self.diverged else float(self.values["success"] or 0)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim of a figure.

    Attributes:
        figure: number of the figure.
        claim: the claim of the paper.
        published: the value in the paper.
        measured: the measured value, with its interval.
        fits: competing explanations of the measured values, with the quality of their fits.
        verdict: one of four words; "undecided" if there are too few trials.
        rule: how the verdict follows from the measured value.
    """

    figure: str
    claim: str
    published: str
    measured: str
    fits: str
    verdict: Word
    rule: str


def judge(holds: Sequence[bool], against: Sequence[bool]) -> Word:
    """Return the verdict on a claim.

    If all parts hold: "reproduced"; if some hold: "partly". If none holds: "not reproduced" if the measurement
    contradicts one (`against`), otherwise "undecided".
    """
    if holds and all(holds):
        return "reproduced"
    return "partly" if any(holds) else "not reproduced" if any(against) else "undecided"


@dataclass(frozen=True)
class Result:
    """A reproduced figure.

    Attributes:
        title: the title.
        tables: the data by name of the CSV file; the rows of a table have the same keys.
        panels: functions that draw the panels.
        verdicts: the verdicts on its claims.
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
    """Give the lines of several series different dashes, for print and for colour-blind readers."""
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
    """A paper whose figures are reproduced.

    Attributes:
        name: the name on the command line.
        title: a description.
        suites: the suite of each preset, from the smallest to the largest.
        figures: functions that make a figure from its trials, by its number in the paper, or by a name if the paper
            does not have it.
        seconds: the expected time of a trial on one core, used until similar trials have been run.
    """

    name: str
    title: str
    suites: Mapping[str, str]
    figures: Mapping[str, Callable[[Sequence[Trial]], Result]]
    seconds: Callable[[Job], float]

    @property
    def presets(self) -> tuple[str, ...]:
        """The names of the presets, from the smallest to the largest."""
        return tuple(self.suites)


def interval(value: float, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return "value [low, high]", or only the value if an end is unknown. Infinity is written "not reached"."""

    def text(number: float) -> str:
        if math.isnan(number):
            return "no number"
        return "not reached" if number == float("inf") else f"{number:.{digits}g}"

    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return text(value)
    return f"{text(value)} [{text(low)}, {text(high)}]"


def markdown(verdicts: Iterable[Verdict], notes: Sequence[str]) -> str:
    """Return the verdicts as a Markdown table, followed by the notes."""
    from tabulate import tabulate

    cells = [{key: _literal(value) for key, value in asdict(v).items()} for v in verdicts]
    rows = [{**row, "verdict": f"**{row['verdict']}**"} for row in cells]
    table = tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)
    return "\n".join([table, "", "[ ] are 95 % intervals.", *(f"- {_literal(note)}" for note in notes), ""])


def _literal(text: str) -> str:
    """Return text in one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\|*`<])", r"\\\1", " ".join(text.split()))


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as CSV. NaN and None are empty fields; without rows the text is empty."""
    import pandas as pd

    # dtype object, so that a column of integers and None stays integer.
    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n") if rows else ""
