"""From a request for figures to figures: run what is missing, then draw and judge from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sparsebench.errors import unknown
from sparsebench.plugin.registry import Registry
from sparsebench.reproduce import theory
from sparsebench.reproduce.trials import has_no_answer
from sparsebench.reproduce.verdicts import Verdict
from sparsebench.sweep import run as runs
from sparsebench.sweep import store
from sparsebench.sweep.expand import Request, expand
from sparsebench.sweep.job import Job
from sparsebench.sweep.record import Record
from sparsebench.tasks.theory import Theory

RATE = 40e9
"""Floating-point operations a second of one core in the closed form, see benchmarks/theory.py."""
START = 8.0
"""Seconds until the first worker has loaded."""


def reproduce(
    figures: Sequence[str],
    preset: str,
    out: Path,
    device: str,
    jobs: int | None,
    rerun: runs.Rerun = "missing",
    on_plan: Callable[[runs.Plan, int, float], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> tuple[list[Verdict], int]:
    """Make the figures of Li et al. (ICLR 2023) in a folder; return the verdicts and how many trials have no answer.

    Other figures of the preset whose trials are all in the folder are made again with them, so that the table of
    verdicts holds all there is.

    Args:
        figures: keys of `theory.FIGURES`; none means all.
        preset: one of `theory.PRESETS`.
        out: the folder, with records and figures.
        device, jobs, rerun: as for a run.
        on_plan: called with the plan, the number of workers and the seconds expected, before the first trial.
        on_record: called with each record.

    Raises:
        UserError: an unknown figure or preset, or a folder that cannot be written.
    """
    if preset not in theory.PRESETS:
        raise unknown("preset", preset, theory.PRESETS)
    for figure in figures:
        if figure not in theory.FIGURES:
            raise unknown("figure", figure, theory.FIGURES)
    registry, request = Registry(), Request(suite=theory.suite(preset), figures=tuple(figures))
    device = runs.resolve_device(device)
    plan = runs.plan(request, runs.Images(), registry, out, rerun)
    store.check_writable(out)
    workers = runs.workers_for(plan, device, jobs)
    if on_plan is not None:
        on_plan(plan, workers, START + sum(map(seconds, plan.todo)) / max(1, workers))
    runs.execute(plan, registry, out, device, workers, on_record)
    known = store.read(out)
    found: dict[str, list[Record]] = {}
    for figure in theory.FIGURES:
        mine = expand(Request(suite=request.suite, figures=(figure,)), registry)
        if all(job.cell.id in known for job in mine):
            found[figure] = [known[job.cell.id] for job in mine]
    lost = sum(has_no_answer(known[job.cell.id]) for job in plan.jobs)
    return theory.publish(found, out), lost


def seconds(job: Job) -> float:
    """Return how long a trial is expected to take on one core.

    Steps as Figure 2 measures them, three quarters of the samples with a loss, and what goes around them.
    """
    task = Theory(**job.cell.task.params)
    relevant, confusing, _ = task.realised()
    steps = min(task.steps, 30 + 25 / (relevant - confusing))
    per_sample = 6 * task.tokens * job.cell.model.params["m"] * task.d + 8 * task.tokens**2 * task.d  # type: ignore
    looks = steps / task.watch * task.test * per_sample / 3 if task.watch else 0.0
    return float(steps * min(task.batch, job.cell.n_train) * per_sample * 0.75 + looks) / RATE + 0.05
