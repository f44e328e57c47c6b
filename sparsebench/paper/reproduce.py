"""Reproduction of a paper's figures: run missing cells, then draw and judge from the records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from sparsebench.errors import unknown
from sparsebench.files import write_whole
from sparsebench.paper import Paper, Trial, Verdict, as_csv, markdown
from sparsebench.plan.expand import expand
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import run as runs
from sparsebench.runner.progress import SILENT, Callbacks

USUAL = Execution()


def request_of(paper: Paper, figures: Sequence[str], preset: str) -> Request:
    """Return the request for some figures of a paper, or for all if none is named.

    Raises:
        UserError: an unknown figure or preset.
    """
    if preset not in paper.presets:
        raise unknown("preset", preset, paper.presets)
    for figure in figures:
        if figure not in paper.figures:
            raise unknown("figure", figure, paper.figures)
    return Request(suite=paper.suites[preset], figures=tuple(figures))


def plan_of(paper: Paper, figures: Sequence[str], preset: str, out: Path, execution: Execution, files: Files) -> Plan:
    """Return the cells that `reproduce` would run, without running or writing anything."""
    return runs.plan_of(request_of(paper, figures, preset), files, execution, Registry(), out, prior=paper.seconds)


def reproduce(
    paper: Paper,
    figures: Sequence[str],
    preset: str,
    out: Path,
    execution: Execution = USUAL,
    files: Files | None = None,
    callbacks: Callbacks = SILENT,
) -> tuple[list[Verdict], int]:
    """Reproduce figures of a paper in a folder; return the verdicts and the number of trials without a result.

    Other figures of the preset are made as well if all their trials are in the folder, so that the table of verdicts is
    complete.

    Args:
        paper: the paper.
        figures: some of its figures, or none for all.
        preset: one of its presets.
        out: the folder for records and figures.
        execution: how the trials are run.
        files: pictures that replace those of the suite, for figures of images.
        callbacks: receive the progress.

    Raises:
        UserError: an unknown figure or preset, missing pictures, or a folder that cannot be written.
    """
    files, registry = files or Files(), Registry()
    request = request_of(paper, figures, preset)
    plan = runs.run_missing(request, files, execution, registry, out, callbacks, prior=paper.seconds)
    answers = store.read(out)
    records: dict[str, list[Record]] = {}
    for figure in paper.figures:
        jobs = expand(replace(request, figures=(figure,)), registry, plan.located)
        if all(job.cell.id in answers for job in jobs):
            records[figure] = [answers[job.cell.id] for job in jobs if job.requested]
    lost = sum(has_no_answer(answers[job.cell.id]) for job in plan.jobs)
    return publish(paper, records, out), lost


def publish(paper: Paper, records: Mapping[str, Sequence[Record]], out: Path) -> list[Verdict]:
    """Write pictures and data of each figure, and the table of verdicts; return the verdicts.

    Args:
        paper: the paper.
        records: the records of each figure.
        out: the folder, which gets figNAME.png, .svg, .pdf, .csv and verdicts.md, .csv, .json.
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
    summary = {"verdicts": [asdict(verdict) for verdict in verdicts], "notes": notes}
    write_whole(out / "verdicts.json", f"{json.dumps(summary, indent=1)}\n".encode())
    write_whole(out / "verdicts.csv", as_csv([vars(verdict) for verdict in verdicts]).encode())
    return verdicts


def _notes(name: str, records: Sequence[Record]) -> list[str]:
    """Return notes on the trials of a figure: their number, and how many failed, diverged or did not fit."""
    lost = Counter(_why(record) for record in records if record.status != "ok")
    lines = [f"figure {name}: {n} of {len(records)} trials {reason}" for reason, n in sorted(lost.items())]
    if trials := trials_of(records):
        times = Counter((t.task, t.model, t.strategy, t.removed, t.where, t.n) for t in trials).values()
        least, most = min(times), max(times)
        number = f"{least} to {most} trials" if least < most else f"{most} trial{'s' * (most > 1)}"
        lines.insert(0, f"figure {name}: {number} of each setting")
    unfitted = sum(r.metrics["fitted"].value == 0 for r in records if "fitted" in r.metrics)
    if unfitted:
        text = "trials reached the step limit before they fitted their training samples"
        lines.append(f"figure {name}: {unfitted} of {len(records)} {text}")
    return lines


def _why(record: Record) -> str:
    if not has_no_answer(record):
        return "diverged: they have not succeeded, and have no loss"
    return f"have no answer and are left out; {record.status}: {record.failure.reason if record.failure else ''}"


def has_no_answer(record: Record) -> bool:
    """Return whether a record has no result. A diverged training is a result, too."""
    return record.status != "ok" and (record.failure is None or record.failure.kind != "DivergedError")


def trials_of(records: Iterable[Record]) -> list[Trial]:
    """Return the trials of the records with a result."""
    registry, trials = Registry(), []
    for record in records:
        cell = record.cell
        if not has_no_answer(record):
            trials.append(
                Trial(
                    task=registry.task(cell.task.name)(**cell.task.params),
                    model=registry.model(cell.model.name)(**cell.model.params),
                    strategy=record.label,
                    removed=round(1 - (cell.budget.keep_rate or 1.0), 6),
                    where=cell.where,
                    n=cell.n_train,
                    repetition=cell.repetition,
                    values={name: metric.value for name, metric in record.metrics.items()},
                    curves=cast(Mapping[str, tuple[float, ...]], record.samples),  # curves have no missing values
                    diverged=record.status != "ok",
                )
            )
    return trials
