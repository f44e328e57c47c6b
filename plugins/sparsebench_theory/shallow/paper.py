"""The figures of Li et al. (ICLR 2023) on synthetic data."""

from __future__ import annotations

from sparsebench.paper import Paper
from sparsebench.plan.jobs import Job
from sparsebench_theory.shallow import dynamics, removal, samples
from sparsebench_theory.shallow.task import Theory

RATE = 40e9
"""Floating-point operations per second of one core in the closed form, see benchmarks/theory.py."""


def seconds(job: Job) -> float:
    """Return the expected seconds of a trial on one core.

    The steps are those of Figure 2, three quarters of the samples have a loss, and 0.05 s are added.
    """
    task = Theory(**job.cell.task.params)
    relevant, confusing, _ = task.realised_shares()
    steps = min(task.steps, 30 + 25 / (relevant - confusing))
    per_sample = 6 * task.tokens * job.cell.model.params["m"] * task.d + 8 * task.tokens**2 * task.d  # type: ignore
    looks = steps / task.watch * task.test * per_sample / 3 if task.watch else 0.0
    return float(steps * min(task.batch, job.cell.n_train) * per_sample * 0.75 + looks) / RATE + 0.05


PAPER = Paper(
    "theory",
    "the synthetic figures of the shallow-ViT paper (Li et al., ICLR 2023)",
    {"quick": "theory-quick", "default": "theory-default", "full": "theory-full"},
    {
        "1a": samples.figure_1a,
        "1b": samples.figure_1b,
        "2": dynamics.figure_2,
        "3": samples.figure_3,
        "4": dynamics.figure_4,
        "5": removal.figure_5,
        "7": dynamics.figure_7,
        "8": removal.figure_8,
        "rank": dynamics.rank,
        "neurons": dynamics.neurons,
        "spurious": removal.spurious,
        "strategies": samples.strategies,
    },
    seconds,
)
