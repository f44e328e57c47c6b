"""What a run would do, in a table."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsebench.planning.expected import Expected
    from sparsebench.planning.job import Job
    from sparsebench.planning.planner import Plan


def forecast(plan: Plan) -> None:
    """Print the cells to run by task and strategy, and what is expected of them.

    Leaves with 1 where a plugin does not load: its cells would have failed.
    """
    from tabulate import tabulate

    from sparsebench.planning.planner import apart

    todo = [job for job in plan.todo if job.failure is None]
    groups: defaultdict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in todo:
        groups[job.cell.task.name, job.label].append(job)
    rows = [
        {"task": task, "strategy": label, "cells": len(jobs), **_totals(jobs, plan.expected)}
        for (task, label), jobs in sorted(groups.items())
    ]
    total = [{"task": "all", "strategy": "", "cells": len(todo), **_totals(todo, plan.expected)}]
    table = tabulate(rows + total, headers="keys", tablefmt="simple", disable_numparse=True)
    split = apart(len(todo), sum(bool(job.network) for job in todo))
    click.echo(f"{len(todo)} of {len(plan.jobs)} cells to run{split}\n{table}")
    broken = sorted({(job.label, job.failure) for job in plan.todo if job.failure is not None})
    for label, reason in broken:
        click.echo(f"{label} does not load, and its cells would fail: {reason}", err=True)
    if broken:
        sys.exit(1)


def _totals(jobs: Sequence[Job], expected: Expected) -> dict[str, str]:
    """Return the hours of one worker and the memory that cells need, as far as like cells have been run."""
    from sparsebench.planning.remaining import Remaining

    seconds, over = Remaining(jobs, expected).estimate(workers=1)
    sizes = [size for job in jobs if (size := expected.memory(job)) is not None]
    return {
        "hours": "unknown" if seconds is None else f"{'over ' if over else ''}{seconds / 3600:.2g}",
        "GiB": f"{max(sizes) / 2**30:.2f}" if sizes else "unknown",
    }
