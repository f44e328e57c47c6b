"""What cells are expected to take, from what like cells took."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from sparsebench.planning.job import Job
from sparsebench.records.cell import Cell, canonical
from sparsebench.records.record import Past, Setting


class Expected:
    """The history of a folder.

    Cells of the same task and model, with all their parameters, are alike, whatever the strategy; among them those with
    as many training samples are asked first, and else all of them in proportion to their training samples.

    Args:
        records: what was run so far.
    """

    def __init__(self, records: Iterable[Past] = ()):
        took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        rates: defaultdict[str, list[float]] = defaultdict(list)
        self._memory: defaultdict[str, int] = defaultdict(int)
        for record in records:
            if record.status == "ok" and record.seconds > 0:
                kind = _kind(record.cell)
                self._memory[kind] = max(self._memory[kind], record.memory)
                took[kind, record.cell.n_train].append(record.seconds)
                rates[kind].append(record.seconds / max(1, record.cell.n_train))
        self._seconds = {key: statistics.median(each) for key, each in took.items()}
        self._rates = {kind: statistics.median(each) for kind, each in rates.items()}

    def seconds(self, job: Job) -> float | None:
        """Return the seconds that a cell is expected to take on one worker, or None if nothing is known."""
        if not self._rates:
            return None
        kind, n_train = _kind(job.cell), job.cell.n_train
        known = self._seconds.get((kind, n_train))
        if known is None and kind in self._rates:
            return self._rates[kind] * max(1, n_train)
        return known

    def memory(self, job: Job) -> int | None:
        """Return the bytes that a cell's worker is expected to need, or None if nothing is known."""
        return self._memory.get(_kind(job.cell)) or None

    def longest_first(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that others start from, then those of which nothing is known, then the longest.

        Jobs that are expected to take as long stay in their order.
        """
        expected = {job.cell.id: self.seconds(job) for job in jobs}

        def place(job: Job) -> tuple[tuple[bool, int], float]:
            seconds = expected[job.cell.id]
            return job.order, float("-inf") if seconds is None else -seconds

        return sorted(jobs, key=place)


def _kind(cell: Cell | Setting) -> str:
    """Return what like cells have in common."""
    return canonical([cell.task.model_dump(mode="json"), cell.model.model_dump(mode="json"), cell.where == "test"])
