"""The queue and the engines of a run: results of cells do not depend on the engine or on other cells."""

import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured import what_was_measured
from plugin_files import write_strategy
from processes import workers_of
from running import execute, inline, jobs_of, local, planned
from waiting import soon

from sparsebench.errors import UserError
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Cell, Origin, Part, Record
from sparsebench.runner import prepare, process
from sparsebench.runner.engines import Queue, in_process, in_workers
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context
from sparsebench.strategy.budget import FULL
from sparsebench.tasks.base import Data
from sparsebench.tasks.images import Composite

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def a_job(repetition: int, after: str = "") -> Job:
    cell = Cell(
        task=Part(name="composite"), model=Part(name="vit"), strategy=Part(name="dense"), budget=FULL, n_train=4,
        repetition=repetition,
    )  # fmt: skip
    return Job(cell=cell, origin=Origin(plugin="dense"), kind="baseline", label="dense", after=after)


def by_cell(records: Iterator[Record]) -> dict[str, dict[str, Any]]:
    return {record.cell_id: what_was_measured(record) for record in records}


def test_jobs_that_can_be_trained_together_are_handed_out_together() -> None:
    jobs = [a_job(k).model_copy(update={"together": k not in (2, 3)}) for k in range(8)]
    queue = Queue(jobs, 3)
    first = [jobs[0], jobs[1], jobs[4]]
    assert [queue.take() for _ in range(5)] == [first, [jobs[2]], [jobs[3]], jobs[5:], None]


def test_a_job_waits_for_the_one_it_starts_from_and_lets_others_pass() -> None:
    first, other = a_job(0), a_job(2)
    waiting = a_job(1, after=first.cell.id)
    queue = Queue([waiting, first, other])
    assert [queue.take(), queue.take()] == [[first], [other]]
    queue.done(other)
    assert queue.take(wait=False) is None
    threading.Timer(0.2, queue.done, [first]).start()
    assert queue.take() == [waiting]


def test_closing_the_queue_releases_those_who_wait() -> None:
    queue = Queue([a_job(0), a_job(1, after=a_job(0).cell.id)])
    queue.take()
    threading.Timer(0.2, queue.close).start()
    assert queue.take() is None


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return jobs_of("attn_topk")


@pytest.fixture(scope="module")
def alone(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the measurements of each job, run alone in this process."""
    out = tmp_path_factory.mktemp("alone")
    return {job.cell.id: what_was_measured(record) for job in jobs for record in inline([job], Registry(), out)}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.integration)])
def test_cells_give_what_each_gives_alone(
    tmp_path: Path, jobs: list[Job], alone: dict[str, dict[str, Any]], workers: int
) -> None:
    records = local(jobs, workers, tmp_path) if workers else inline(jobs[::-1], Registry(), tmp_path)
    assert by_cell(records) == alone
    assert len(alone) == len(jobs) == 10 and {record["status"] for record in alone.values()} == {"ok"}


@pytest.mark.slow
def test_a_cell_that_starts_from_another_gives_the_same_in_workers(tmp_path: Path) -> None:
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    jobs = expand(
        Request(suite="quick-scratch", tasks=(task,), model="vit:dim=16,depth=2,heads=2", n_train=(20,), seeds=1),
        Registry(),
    )
    assert sum(bool(job.after) for job in jobs) == 4
    here = by_cell(inline(jobs, Registry(), tmp_path / "here"))
    there = by_cell(local(jobs[::-1], 2, tmp_path / "there"))
    assert {record["status"] for record in here.values()} == {"ok"}
    assert here == there


@pytest.mark.slow
def test_a_cell_that_ends_its_process_costs_no_cell_that_went_with_it(
    alone: dict[str, dict[str, Any]], samples: Path, tmp_path: Path
) -> None:
    jobs = jobs_of(str(samples / "segfaults.py"), n_train=(4,))
    assert len(jobs) == 5
    together = {record.label: record for record in local(jobs, 1, tmp_path, most=100)}
    assert together.pop("segfaults").status == "crashed"
    assert {record.cell_id: what_was_measured(record) for record in together.values()}.items() <= alone.items()


@pytest.mark.integration
def test_leaving_a_run_in_the_middle_ends_its_workers(tmp_path: Path) -> None:
    records = local(jobs_of(seeds=50), 1, tmp_path)
    next(records)
    assert workers_of(tmp_path)
    records.close()
    assert soon(lambda: not workers_of(tmp_path))


def test_a_strategy_that_leaves_does_not_end_a_run_in_this_process(samples: Path, tmp_path: Path) -> None:
    jobs = jobs_of(str(samples / "leaves.py"), n_train=(4,))
    status = {r.label: r.status for r in inline(jobs, Registry(), tmp_path)}
    assert status["leaves"] == "failed" and len(status) == 5


@pytest.mark.slow
def test_workers_know_the_tasks_that_plugin_files_bring(samples: Path, tmp_path: Path) -> None:
    jobs = jobs_of(str(samples / "brings_task.py"), tasks=("small",), n_train=(4,))
    records = list(local(jobs, 2, tmp_path))
    assert [record.status for record in records] == ["ok"] * 4


def test_workers_that_do_not_start_end_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process, "_server", lru_cache(1)(process._server.__wrapped__)
    )  # keeps the server of other tests
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"workers in a row did not start: .*worker-0.log.*--jobs 0"):
        list(local([a_job(0)], 1, tmp_path))


def test_all_strategies_of_a_task_size_and_repetition_have_one_draw() -> None:
    jobs = jobs_of(seeds=2)
    by_strategy = {label: [j.cell.draw for j in jobs if j.label == label] for label in ("dense", "random", "oracle")}
    assert by_strategy["dense"] == by_strategy["random"] == by_strategy["oracle"]
    assert len(set(by_strategy["dense"])) == 4
    changed = jobs[0].cell.model_copy(update={"repetition": 9})
    assert changed.draw not in by_strategy["dense"]


def test_what_a_strategy_does_to_its_data_stays_with_it(tmp_path: Path) -> None:
    file = write_strategy(tmp_path / "spoils.py", "view.tokens.mul_(2.0)")
    jobs = jobs_of(str(file), n_train=(4,))
    assert jobs[0].label == "spoils"
    together = by_cell(inline(jobs, Registry(), tmp_path / "together"))
    for job in jobs:
        assert by_cell(inline([job], Registry(), tmp_path / "alone")).items() <= together.items()


class Counted(Composite):
    """A task that counts its draws, and draws a little from torch's own generator."""

    def draw(self, n_train: int, repetition: int, locations: Any) -> Data:
        COUNTED.append(repetition)
        data = super().draw(n_train, repetition, locations)
        data.train.inputs[0, 0, 0, 0] = int(255 * torch.rand(()))
        return data


COUNTED: list[int] = []


@pytest.mark.parametrize(("most", "times"), [(prepare.MOST, 1), (100, 4)])
def test_data_are_drawn_once_unless_they_are_large(monkeypatch: pytest.MonkeyPatch, most: int, times: int) -> None:
    monkeypatch.setattr(prepare, "MOST", most)
    COUNTED.clear()
    context, task = Context(RunEnvironment(out=Path(), device="cpu")), Counted(canvas=16, foreground=8, test=20)
    cells = [job.cell for job in jobs_of(n_train=(4,))]
    draws = [context.draw(task, cell) for cell in cells]
    assert len(COUNTED) == times and len(draws) == 4
    assert all(np.array_equal(draws[0].train.inputs, other.train.inputs) for other in draws)
    assert draws[0].train.inputs is not draws[1].train.inputs


def test_an_engine_that_loses_cells_is_noticed_and_what_is_recorded_kept(tmp_path: Path) -> None:
    def loses(queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
        yield from (record for record in in_process(Registry(), queue, environment) if record.label != "random")

    (lost,) = (job.cell.id for job in planned(tmp_path).todo if job.label == "random")
    with pytest.raises(UserError) as error:
        execute(planned(tmp_path), Registry(), tmp_path, engine=loses)
    line = f"the engine gave no record of 1 of 4 cells, {lost} among them; the records of the others are stored; "
    assert str(error.value) == line + "the same command continues"
    assert len(store.read(tmp_path)) == 3 and [job.cell.id for job in planned(tmp_path).todo] == [lost]
    execute(planned(tmp_path), Registry(), tmp_path)
    assert len(store.read(tmp_path)) == 4


@pytest.mark.slow
def test_an_engine_says_which_share_of_a_training_is_done(tmp_path: Path) -> None:
    file = write_strategy(tmp_path / "slow.py", "time.sleep(0.7)", "import time")
    task = "composite:pretrain_epochs=0,epochs=6,test=4"
    jobs = jobs_of(str(file), suite="quick-scratch", tasks=(task,), n_train=(2,))
    reports: list[tuple[Sequence[str], float]] = []
    queue = Queue([job for job in jobs if job.label == "slow"], on_progress=lambda *report: reports.append(report))
    (record,) = in_workers(1, queue, RunEnvironment(out=tmp_path / "out", device="cpu"))
    assert record.status == "ok", record.failure
    shares = [share for cells, share in reports if list(cells) == [record.cell_id]]
    assert shares[0] == 0.0 and len(shares) > 2 and shares[-1] <= 1
    assert sorted(shares) == shares and len(set(shares)) == len(shares)
