"""What became of a published claim, by a rule that is stated."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Word = Literal["reproduced", "partly", "not reproduced", "undecided"]


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
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows({key: "" if value != value else value for key, value in row.items()} for row in rows)
    return out.getvalue()


def as_json(verdicts: Iterable[Verdict], notes: Sequence[str]) -> str:
    """Return the verdicts and notes as JSON."""
    return json.dumps({"verdicts": [asdict(v) for v in verdicts], "notes": list(notes)}, indent=1) + "\n"
