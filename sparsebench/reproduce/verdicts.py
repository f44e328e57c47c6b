"""What became of a published claim, by a rule that is stated."""

from __future__ import annotations

import csv
import io
import json
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
    """Return "value [low, high]"; an infinite number is "not reached"."""

    def text(number: float) -> str:
        return "not reached" if number == float("inf") else f"{number:.{digits}g}"

    return text(value) if low is None or high is None else f"{text(value)} [{text(low)}, {text(high)}]"


def markdown(verdicts: Iterable[Verdict], notes: Sequence[str]) -> str:
    """Return the table with its notes."""
    from tabulate import tabulate

    rows = [{**asdict(v), "verdict": f"**{v.verdict}**"} for v in verdicts]
    cells = [{key: value.replace("|", "\\|") for key, value in row.items()} for row in rows]
    table = tabulate(cells, headers="keys", tablefmt="pipe", disable_numparse=True)
    return "\n".join([table, "", "[ ] are 95 % intervals.", *(f"- {note}" for note in notes), ""])


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_json(verdicts: Iterable[Verdict], notes: Sequence[str]) -> str:
    """Return the verdicts and notes as JSON."""
    return json.dumps({"verdicts": [asdict(v) for v in verdicts], "notes": list(notes)}, indent=1) + "\n"
