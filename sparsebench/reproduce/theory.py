"""Every synthetic figure of the shallow-ViT paper (Li et al., ICLR 2023): what is run, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparsebench.reproduce import dynamics, removal, samples
from sparsebench.reproduce.result import Result
from sparsebench.reproduce.trials import Trial, has_no_answer, trials_of
from sparsebench.reproduce.verdicts import Verdict, as_csv, as_json, markdown
from sparsebench.sweep.record import Record
from sparsebench.sweep.store import write_whole

PRESETS = ("quick", "default", "full")
FIGURES: dict[str, Callable[[Sequence[Trial]], Result]] = {
    "1a": samples.figure_1a,
    "1b": samples.figure_1b,
    "2": dynamics.figure_2,
    "3": samples.figure_3,
    "4": dynamics.figure_4,
    "5": removal.figure_5,
    "7": dynamics.figure_7,
    "8": removal.figure_8,
    "spurious": removal.spurious,
    "strategies": samples.strategies,
}
"""By their number in the paper; the last two are not in it."""


def suite(preset: str) -> str:
    """Return the name of the suite that a preset runs."""
    return f"theory-{preset}"


def publish(records: Mapping[str, Sequence[Record]], out: Path) -> list[Verdict]:
    """Write each figure's pictures and data and the table of verdicts, and return the verdicts.

    Args:
        records: those of each figure.
        out: the folder; figNAME.png, .svg, .csv and verdicts.md, .csv, .json are written to it.
    """
    verdicts, notes = [], []
    for name, some in records.items():
        notes += _notes(name, some)
        if not (trials := trials_of(some)):
            continue
        result = FIGURES[name](trials)
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
        lines.insert(0, f"figure {name}: {f'{least} to {most}' if least < most else most} trials of each setting")
    unfitted = sum((r.metrics["train_loss"].value or 0) > 0 for r in records if r.status == "ok")
    if unfitted:
        lines.append(f"figure {name}: {unfitted} of {len(records)} trials reached the step limit before zero loss")
    return lines


def _why(record: Record) -> str:
    if not has_no_answer(record):
        return "diverged: they have not succeeded, and have no loss"
    return f"have no answer and are left out; {record.status}: {record.failure.reason if record.failure else ''}"
