"""What a run would do, in a table."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from sparsebench.text import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparsebench.planning.expected import Expected
    from sparsebench.planning.job import Job
    from sparsebench.planning.planner import Plan


def forecast(plan: Plan) -> None:
    """Print the cells to run by task and strategy, what is expected of them, what is to be decoded before, and how
    class folders are numbered.

    Leaves with 1 where a plugin does not load: its cells would have failed.
    """
    from tabulate import tabulate

    from sparsebench.planning.files import pictures_of
    from sparsebench.planning.planner import apart
    from sparsebench.plugin.registry import Registry
    from sparsebench.sources.labels import described

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
    said = {(job.cell.task.name, line) for job in plan.jobs if (line := described(job.cell.task.params))}
    orders = "".join(f"\n{task}: class folders are numbered {line}" for task, line in sorted(said))
    split = apart(len(todo), sum(bool(job.network) for job in todo))
    pictures = pictures_of(todo, Registry(), plan.locations)
    n, size = sum(one.shape[0] for one in pictures), sum(one.size for one in pictures)
    first = f"\n{n:,} pictures to decode first, {size / 1e9:.2f} GB; nothing is decoded now" if n else ""
    again = "".join(f"{line}\n" for line in plan.changed)
    click.echo(f"{len(todo)} of {len(plan.jobs)} cells to run{split}{first}\n{again}{_networks(plan)}{table}{orders}")
    broken = sorted({(job.label, job.failure) for job in plan.todo if job.failure is not None})
    for label, reason in broken:
        click.echo(f"{label} does not load, and its cells would fail: {reason}", err=True)
    if broken:
        sys.exit(1)


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
