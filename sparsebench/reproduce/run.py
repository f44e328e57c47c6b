"""From a request for figures to figures: run what is missing, then draw and judge from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sparsebench import engine
from sparsebench.engine import devices
from sparsebench.engine import run as runs
from sparsebench.errors import unknown
from sparsebench.planning import planner
from sparsebench.planning.contenders import Request
from sparsebench.planning.expand import expand
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.reproduce.paper import Paper, publish
from sparsebench.reproduce.trials import has_no_answer
from sparsebench.reproduce.verdicts import Verdict


def reproduce(
    paper: Paper,
    figures: Sequence[str],
    preset: str,
    out: Path,
    device: str,
    jobs: int | None,
    rerun: planner.Rerun = "missing",
    on_plan: Callable[[planner.Plan, int], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
    pictures: planner.Files | None = None,
    checkpoint: float = engine.CHECKPOINT,
    timeout: str | None = None,
    memory_limit: str | None = None,
    on_stop: Callable[[], None] | None = None,
) -> tuple[list[Verdict], int]:
    """Make a paper's figures in a folder; return the verdicts and how many trials have no answer.

    Other figures of the preset whose trials are all in the folder are made again with them, so that the table of
    verdicts holds all there is.

    Args:
        paper: whose.
        figures: some of its figures; none means all.
        preset: one of its presets.
        out: the folder, with records and figures.
        device, jobs, rerun: as for a run.
        on_plan: called with the plan and the number of workers before the first trial.
        on_record: called with each record.
        pictures: where pictures come from, in place of the suite's, for figures of images.
        checkpoint, timeout, memory_limit, on_stop: as for a run.

    Raises:
        UserError: an unknown figure or preset, no such pictures, or a folder that cannot be written.
    """
    if preset not in paper.presets:
        raise unknown("preset", preset, paper.presets)
    for figure in figures:
        if figure not in paper.figures:
            raise unknown("figure", figure, paper.figures)
    pictures = pictures or planner.Files()
    registry, request = Registry(), Request(suite=paper.suites[preset], **pictures.locate()[0])
    device = devices.resolve_device(device)
    plan = planner.plan(replace(request, figures=tuple(figures)), pictures, registry, out, rerun, prior=paper.seconds)
    workers = devices.workers_for(plan, device, jobs)
    limits = engine.Limits.given(timeout, memory_limit, workers)
    store.check_writable(out)
    if on_plan is not None:
        on_plan(plan, workers)
    runs.execute(plan, registry, out, device, workers, on_record, checkpoint, limits, on_stop)
    known = store.read(out)
    found: dict[str, list[Record]] = {}
    for figure in paper.figures:
        mine = expand(replace(request, figures=(figure,)), registry)
        if all(job.cell.id in known for job in mine):
            found[figure] = [known[job.cell.id] for job in mine if job.asked]
    lost = sum(has_no_answer(known[job.cell.id]) for job in plan.jobs)
    return publish(paper, found, out), lost
