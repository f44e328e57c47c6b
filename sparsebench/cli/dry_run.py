"""What a run would do, in a table."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsebench.planning.expected import Expected
    from sparsebench.planning.job import Job
    from sparsebench.planning.planner import Plan


def forecast(plan: Plan) -> str:
    """Return the cells to run by task and strategy, what is expected of them, and what is to be decoded before."""
    from tabulate import tabulate

    from sparsebench.planning.files import pictures_of
    from sparsebench.plugin.registry import Registry

    groups: defaultdict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in plan.todo:
        groups[job.cell.task.name, job.label].append(job)
    rows = [
        {"task": task, "strategy": label, "cells": len(jobs), **_totals(jobs, plan.expected)}
        for (task, label), jobs in sorted(groups.items())
    ]
    total = [{"task": "all", "strategy": "", "cells": len(plan.todo), **_totals(plan.todo, plan.expected)}]
    table = tabulate(rows + total, headers="keys", tablefmt="simple", disable_numparse=True)
    pictures = pictures_of(plan.todo, Registry(), plan.locations)
    n, size = sum(one.shape[0] for one in pictures), sum(one.size for one in pictures)
    first = f"\n{n:,} pictures to decode first, {size / 1e9:.2f} GB; nothing is decoded now" if n else ""
    return f"{len(plan.todo)} of {len(plan.jobs)} cells to run{plan.apart}{first}\n{table}"


def _totals(jobs: Sequence[Job], expected: Expected) -> dict[str, str]:
    """Return the hours of one worker and the memory that cells need, as far as like cells have been run."""
    from sparsebench.planning.remaining import Remaining

    seconds, over = Remaining(jobs, expected).estimate(workers=1)
    sizes = [size for job in jobs if (size := expected.memory(job)) is not None]
    return {
        "hours": "unknown" if seconds is None else f"{'over ' if over else ''}{seconds / 3600:.2g}",
        "GiB": f"{max(sizes) / 2**30:.2f}" if sizes else "unknown",
    }
