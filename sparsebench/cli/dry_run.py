"""What a run would do, in a table."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sparsebench.text import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsebench.planning.expected import Expected
    from sparsebench.planning.job import Job
    from sparsebench.planning.planner import Plan


def forecast(plan: Plan) -> str:
    """Return the cells to run by task and strategy, what is expected of them, and how class folders are numbered."""
    from tabulate import tabulate

    from sparsebench.sources.labels import described

    groups: defaultdict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in plan.todo:
        groups[job.cell.task.name, job.label].append(job)
    rows = [
        {"task": task, "strategy": label, "cells": len(jobs), **_totals(jobs, plan.expected)}
        for (task, label), jobs in sorted(groups.items())
    ]
    total = [{"task": "all", "strategy": "", "cells": len(plan.todo), **_totals(plan.todo, plan.expected)}]
    table = tabulate(rows + total, headers="keys", tablefmt="simple", disable_numparse=True)
    said = {(job.cell.task.name, line) for job in plan.jobs if (line := described(job.cell.task.params))}
    orders = "".join(f"\n{task}: class folders are numbered {line}" for task, line in sorted(said))
    return f"{len(plan.todo)} of {len(plan.jobs)} cells to run{plan.apart}\n{_networks(plan)}{table}{orders}"


def _networks(plan: Plan) -> str:
    """Return the line that says which files of trained weights the cells test, or begin with; "" for none."""
    from sparsebench.planning.weights import file_names

    used = {job.cell.model.params.get("weights") for job in plan.jobs}
    names = sorted(plain(file) for name, file in file_names(plan.locations).items() if name in used)
    return f"{len(names)} network{'s' * (len(names) > 1)}: {', '.join(names)}\n" if names else ""


def _totals(jobs: Sequence[Job], expected: Expected) -> dict[str, str]:
    """Return the hours of one worker and the memory that cells need, as far as like cells have been run."""
    from sparsebench.planning.remaining import Remaining

    seconds, over = Remaining(jobs, expected).estimate(workers=1)
    sizes = [size for job in jobs if (size := expected.memory(job)) is not None]
    return {
        "hours": "unknown" if seconds is None else f"{'over ' if over else ''}{seconds / 3600:.2g}",
        "GiB": f"{max(sizes) / 2**30:.2f}" if sizes else "unknown",
    }
