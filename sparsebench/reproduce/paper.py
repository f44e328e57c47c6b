"""What a paper is to `reproduce`, and what becomes of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebench.planning.job import Job
from sparsebench.records.files import write_whole
from sparsebench.records.record import Record
from sparsebench.reproduce.result import Result
from sparsebench.reproduce.trials import Trial, has_no_answer, trials_of
from sparsebench.reproduce.verdicts import Verdict, as_csv, as_json, markdown


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


def publish(paper: Paper, records: Mapping[str, Sequence[Record]], out: Path) -> list[Verdict]:
    """Write each figure's pictures and data and the table of verdicts, and return the verdicts.

    Args:
        paper: says what is drawn.
        records: those of each figure.
        out: the folder; figNAME.png, .svg, .csv and verdicts.md, .csv, .json are written to it.
    """
    verdicts, notes = [], []
    for name, part in records.items():
        notes += _notes(name, part)
        if not (trials := trials_of(part)):
            continue
        result = paper.figures[name](trials)
        stem = f"fig{name}" if name[0].isdigit() else name
        for form, content in result.pictures().items():
            write_whole(out / f"{stem}.{form}", content)
        for table, rows in result.tables.items():
            write_whole(out / f"{table}.csv", as_csv(rows).encode())
        verdicts += result.verdicts
    write_whole(out / "verdicts.md", markdown(verdicts, notes).encode())
    write_whole(out / "verdicts.json", as_json(verdicts, notes).encode())
    write_whole(out / "verdicts.csv", as_csv([vars(verdict) for verdict in verdicts]).encode())
    return verdicts


def _notes(name: str, records: Sequence[Record]) -> list[str]:
    """Return what a reader must know of the trials: how many, without an answer, diverged, or never fitted."""
    lost = Counter(_why(record) for record in records if record.status != "ok")
    lines = [f"figure {name}: {n} of {len(records)} trials {reason}" for reason, n in sorted(lost.items())]
    if trials := trials_of(records):
        times = Counter((t.task, t.model, t.strategy, t.removed, t.where, t.n) for t in trials).values()
        least, most = min(times), max(times)
        number = f"{least} to {most} trials" if least < most else f"{most} trial{'s' * (most > 1)}"
        lines.insert(0, f"figure {name}: {number} of each setting")
    unfitted = sum(r.metrics["fitted"].value == 0 for r in records if "fitted" in r.metrics)
    if unfitted:
        said = "trials reached the step limit before they fitted their training samples"
        lines.append(f"figure {name}: {unfitted} of {len(records)} {said}")
    return lines


def _why(record: Record) -> str:
    if not has_no_answer(record):
        return "diverged: they have not succeeded, and have no loss"
    return f"have no answer and are left out; {record.status}: {record.failure.reason if record.failure else ''}"
