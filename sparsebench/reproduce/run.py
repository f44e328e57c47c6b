"""From a request for figures to figures: run what is missing, then draw and judge from the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparsebench.engine import run as runs
from sparsebench.errors import unknown
from sparsebench.planning.expand import expand
from sparsebench.planning.files import locate
from sparsebench.planning.planner import Plan
from sparsebench.planning.request import Files, How, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.reproduce.paper import Paper, publish
from sparsebench.reproduce.trials import has_no_answer
from sparsebench.reproduce.verdicts import Verdict

USUAL = How()


def request_of(paper: Paper, figures: Sequence[str], preset: str, files: Files) -> Request:
    """Return what is asked for with some figures of a paper, or with all of them if none is named.

    Raises:
        UserError: an unknown figure or preset, or no such pictures.
    """
    if preset not in paper.presets:
        raise unknown("preset", preset, paper.presets)
    for figure in figures:
        if figure not in paper.figures:
            raise unknown("figure", figure, paper.figures)
    return Request(suite=paper.suites[preset], figures=tuple(figures), **locate(files)[0])


def plan_of(paper: Paper, figures: Sequence[str], preset: str, out: Path, how: How, files: Files) -> Plan:
    """Return what `reproduce` would run; nothing is run and nothing written."""
    return runs.plan_of(request_of(paper, figures, preset, files), files, how, Registry(), out, prior=paper.seconds)


def reproduce(
    paper: Paper,
    figures: Sequence[str],
    preset: str,
    out: Path,
    how: How = USUAL,
    files: Files | None = None,
    callbacks: runs.Callbacks = runs.SILENT,
) -> tuple[list[Verdict], int]:
    """Make a paper's figures in a folder; return the verdicts and how many trials have no answer.

    Other figures of the preset whose trials are all in the folder are made again with them, so that the table of
    verdicts holds all there is.

    Args:
        paper: whose.
        figures: some of its figures; none means all.
        preset: one of its presets.
        out: the folder, with records and figures.
        how: how the trials are run.
        files: where pictures come from, in place of the suite's, for figures of images.
        callbacks: who is told.

    Raises:
        UserError: an unknown figure or preset, no such pictures, or a folder that cannot be written.
    """
    files, registry = files or Files(), Registry()
    request = request_of(paper, figures, preset, files)
    plan = runs.run(request, files, how, registry, out, callbacks, prior=paper.seconds)
    known = store.read(out)
    records: dict[str, list[Record]] = {}
    for figure in paper.figures:
        jobs = expand(replace(request, figures=(figure,)), registry)
        if all(job.cell.id in known for job in jobs):
            records[figure] = [known[job.cell.id] for job in jobs if job.asked]
    lost = sum(has_no_answer(known[job.cell.id]) for job in plan.jobs)
    return publish(paper, records, out), lost
