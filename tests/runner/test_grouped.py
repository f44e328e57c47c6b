"""Cells with the same data run where these were drawn, and nothing else of them is another's."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured import TINY
from plugin_files import write_strategy
from running import inline
from test_engine import by_cell

from sparsebench.plan.expand import expand
from sparsebench.plan.request import Job, Request
from sparsebench.plugin.registry import Registry
from sparsebench.runner import prepare
from sparsebench.runner.engines import Queue
from sparsebench.runner.prepare import Drawn
from sparsebench.tasks.base import Data
from sparsebench.tasks.images import Composite

LARGER = "composite:foreground=12"


def jobs_of(
    *tasks: str, suite: str = TINY, plugins: tuple[str, ...] = (), seeds: int = 2, n_train: tuple[int, ...] = (4, 8)
) -> list[Job]:
    return expand(
        Request(suite=suite, plugins=plugins, tasks=tasks, n_train=n_train, seeds=seeds),
        Registry(),
    )


def taken(queue: Queue, *takers: str) -> Iterator[Job]:
    """Yield what those who ask in turns are given."""
    while True:
        for who in takers:
            batch = queue.take(who, wait=False)
            if batch is None:
                return
            yield batch[0]
            queue.done(batch[0])


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return jobs_of("composite", LARGER)


def test_all_strategies_of_a_task_size_and_repetition_have_one_draw() -> None:
    jobs = jobs_of(seeds=2)
    by_strategy = {label: [j.cell.draw for j in jobs if j.label == label] for label in ("dense", "random", "oracle")}
    assert by_strategy["dense"] == by_strategy["random"] == by_strategy["oracle"]
    assert len(set(by_strategy["dense"])) == 4
    changed = jobs[0].cell.model_copy(update={"repetition": 9})
    assert changed.draw not in by_strategy["dense"]


def test_one_taker_has_the_cells_of_a_draw_one_after_the_other(jobs: list[Job]) -> None:
    draws = [job.cell.draw for job in taken(Queue(jobs, 1), "a")]
    assert len(draws) == len(jobs)
    assert sum(one != other for one, other in pairwise(draws)) == len(set(draws)) - 1


def test_two_takers_do_not_share_a_draw_until_there_is_nothing_else(jobs: list[Job]) -> None:
    order = list(taken(Queue(jobs, 1), "a", "b"))
    first, second = ([job.cell.draw for job in order[start::2]] for start in (0, 1))
    shared = set(first) & set(second)
    assert sorted(job.cell.id for job in order) == sorted(job.cell.id for job in jobs)
    assert len(shared) <= 1 and shared <= set(first[-4:])


@pytest.mark.parametrize("takers", [("a",), ("a", "b"), ("a", "b", "c", "d", "e")])
def test_no_longer_job_comes_later_for_it(takers: tuple[str, ...]) -> None:
    jobs = jobs_of(seeds=5, n_train=(2, 4, 8))
    took = {job.cell.id: float(10 * job.cell.n_train + random.Random(job.cell.id).randrange(2)) for job in jobs}
    ordered = sorted(jobs, key=lambda job: -took[job.cell.id])
    queue = Queue(ordered, 1, lambda job: took[job.cell.id])
    handed = [took[job.cell.id] for job in taken(queue, *takers)]
    assert handed == sorted(handed, reverse=True) and len(handed) == len(jobs)


def test_what_a_strategy_does_to_its_data_stays_with_it(tmp_path: Path) -> None:
    file = write_strategy(tmp_path / "spoils.py", "view.tokens.mul_(2.0)")
    jobs = jobs_of(plugins=(str(file),), seeds=1, n_train=(4,))
    assert jobs[0].label == "spoils"
    together = by_cell(inline(jobs, Registry(), tmp_path / "together"))
    for job in jobs:
        assert by_cell(inline([job], Registry(), tmp_path / "alone")).items() <= together.items()


class Counted(Composite):
    """A task that counts its draws, and draws a little from torch's own generator."""

    def draw(self, n_train: int, repetition: int, locations: Any) -> Data:
        import torch

        draws.append(repetition)
        data = super().draw(n_train, repetition, locations)
        data.train.inputs[0, 0, 0, 0] = int(255 * torch.rand(()))
        return data


draws: list[int] = []


@pytest.mark.parametrize(("most", "times"), [(prepare.MOST, 1), (100, 4)])
def test_data_are_drawn_once_unless_they_are_large(monkeypatch: pytest.MonkeyPatch, most: int, times: int) -> None:
    monkeypatch.setattr(prepare, "MOST", most)
    draws.clear()
    kept, task = Drawn(), Counted(canvas=16, foreground=8, test=20)
    cells = [job.cell for job in jobs_of(seeds=1, n_train=(4,))]
    found = [kept.of(task, cell, {}) for cell in cells]
    assert len(draws) == times and len(found) == 4
    assert all(np.array_equal(found[0].train.inputs, other.train.inputs) for other in found)
    assert found[0].train.inputs is not found[1].train.inputs
