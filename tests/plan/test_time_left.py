import heapq
import random
from pathlib import Path

import pytest
from measured import TINY

from sparsebench.plan import plan as planner
from sparsebench.plan.expand import expand
from sparsebench.plan.forecast import Forecast
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner.engines import Queue

TASK = "composite:test={test}"


def jobs_of(test: str = "20", n_train: tuple[int, ...] = (4,), seeds: int = 2) -> list[Job]:
    request = Request(suite=TINY, tasks=(TASK.format(test=test),), n_train=n_train, seeds=seeds)
    return expand(request, Registry())


def took(job: Job, seconds: float, memory: int = 0, status: str = "ok") -> Record:
    record = job.record_of_failure("crashed", Failure(reason="none"), seconds=seconds)
    return record.model_copy(update={"status": status, "memory": memory})


def test_a_longer_training_costs_more() -> None:
    """A longer training costs more and a test of a trained network costs no training."""
    few, many = jobs_of(n_train=(4, 8), seeds=1)[:2]
    assert few.cell.n_train == 4 and many.cell.n_train == 8 and 0 < few.cost < many.cost
    tests = [job for job in expand(Request(suite="quick", tasks=("composite",), seeds=1), Registry()) if job.requested]
    macs_of_a_test = {job.cost for job in tests}
    (training,) = {job.cost for job in expand(Request(suite="networks", tasks=("composite",), seeds=1), Registry())}
    assert len(macs_of_a_test) == 1 and training > 50 * macs_of_a_test.pop()


def test_cells_of_a_kind_cost_alike() -> None:
    """Cells of a kind take as long for what they cost whatever strategy and seed."""
    jobs = [job.model_copy(update={"cost": float(job.cell.n_train)}) for job in jobs_of("20", (4, 8, 16), 2)]
    four, eight = ([job for job in jobs if job.cell.n_train == n] for n in (4, 8))
    expected = Forecast(jobs, [took(job, seconds) for job, seconds in zip(four, (1, 2, 3), strict=False)])
    assert [expected.seconds(job) for job in jobs] == [pytest.approx(job.cost / 2) for job in jobs]
    expected.done(took(eight[0], 2.0))
    assert {expected.seconds(job) for job in four} == {2.0} and {expected.seconds(job) for job in eight} == {2.0}
    assert expected.seconds(jobs[-1]) == pytest.approx(16 * 8 / 20), "by what all of the other sizes took"


def test_of_a_kind_of_which_nothing_is_known_all_that_is_known_counts() -> None:
    jobs = jobs_of("20,30", (4,), 1)
    small, large = (next(job for job in jobs if job.cell.task.params["test"] == n) for n in (20, 30))
    assert Forecast(jobs).seconds(large) is None
    assert Forecast(jobs, [took(small, 2.0, status="timeout")]).seconds(small) is None
    assert Forecast(jobs, [took(small, 2.0)]).seconds(large) == pytest.approx(2.0 * large.cost / small.cost)
    assert Forecast(jobs, [took(small, 2.0), took(large, 9.0)]).seconds(small) == pytest.approx(2.0)
    expected = Forecast(jobs, [took(small, 2.0)], prior=lambda job: 7.0)
    assert (expected.seconds(small), expected.seconds(large)) == (pytest.approx(2.0), pytest.approx(7.0))
    seconds = {job.cell.id: float(n) for n, job in enumerate(jobs)}
    expected = Forecast(jobs, prior=lambda job: seconds[job.cell.id])
    assert [expected.seconds(job) for job in jobs] == list(seconds.values()), "each job has its own"


def test_tests_of_trained_networks_are_their_own_kind() -> None:
    """Tests of trained networks are a kind of their own and memory is the most of a kind."""
    job = jobs_of(seeds=1)[0]
    cell = job.cell.model_copy(update={"where": "test"})
    test = job.model_copy(update={"cell": cell, "network": "f" * 16})
    expected = Forecast([job, test], [took(job, 60.0, 5), took(job, 60.0, 7), took(test, 0.5)])
    assert [expected.seconds(each) for each in (job, test)] == [60.0, 0.5]
    assert [expected.memory(each) for each in (job, test)] == [7, None]


def test_one_of_each_kind_comes_first_and_then_the_longest() -> None:
    jobs = jobs_of("20,30", (4, 8))
    kinds = [(job.cell.task.params["test"], job.cell.n_train, job.cost) for job in Forecast(jobs).longest_first()]
    assert {kind[:2] for kind in kinds[:4]} == {(20, 4), (20, 8), (30, 4), (30, 8)}
    assert [kind[2] for kind in kinds[4:]] == sorted((kind[2] for kind in kinds[4:]), reverse=True)
    known = Forecast(jobs, [took(jobs[0], 1.0)]).longest_first()
    first = jobs[0].cell.task.params["test"], jobs[0].cell.n_train
    assert first not in {(job.cell.task.params["test"], job.cell.n_train) for job in known[:3]}, "one of it is done"


@pytest.mark.parametrize("rerun", ["missing", "always"])
def test_a_plan_has_the_longest_first_by_what_the_folder_has(tmp_path: Path, rerun: planner.Rerun) -> None:
    request = Request(suite=TINY, tasks=(TASK.format(test="20,30"),), n_train=(4,), seeds=2)
    first = expand(request, Registry())
    writer = store.Writer(tmp_path)
    for tokens, seconds in ((20, 5.0), (30, 1.0)):
        job = next(job for job in first if job.cell.task.params["test"] == tokens)
        writer.append(took(job, seconds))
    writer.close()
    todo = planner.plan(request, planner.Files(), Registry(), tmp_path, rerun).todo
    sizes = [job.cell.task.params["test"] for job in todo]
    assert sizes == sorted(sizes, key=lambda size: size != 20) and set(sizes) == {20, 30}


@pytest.mark.parametrize(
    ("cells", "begun", "workers", "gone", "left"),
    [
        (8, 0, [0, 1, 2, 8, 20], [0], [80.0, 80.0, 40.0, 10.0, 10.0]),
        (2, 1, [1], [0, 4], [20.0, 16.0]),
        (2, 1, [2], [4], [10.0]),  # a cell is not shared by workers
        (1, 1, [1], [0, 6, 8, 10, 100, 1000], [10.0, 4.0, 2.0, 2.5, 25.0, 250.0]),  # takes longer than expected
        (8, 8, [1], [40], [40.0]),  # cells that one worker trains together share its time
    ],
)
def test_the_workers_share_what_is_left(
    cells: int, begun: int, workers: list[int], gone: list[float], left: list[float]
) -> None:
    jobs = jobs_of()[:cells]
    remaining = Forecast(jobs, [took(jobs[0], 10.0)])
    remaining.on_progress(list(remaining.left)[:begun], 0.0, 100.0)
    assert [remaining.time_left(n, 100.0 + seconds) for n in workers for seconds in gone] == pytest.approx(left)


def test_a_training_that_reports_progress_is_estimated_by_it() -> None:
    """A training that says how far it is is known and so are those like it."""
    jobs = jobs_of(seeds=1)[:3]
    remaining = Forecast(jobs)
    remaining.on_progress([jobs[0].cell.id], 0.0, 0.0)
    remaining.on_progress(["another run's"], 0.0, 0.0)
    assert remaining.time_left(1, 5.0) is None
    remaining.on_progress([jobs[0].cell.id], 0.2, 10.0)
    assert remaining.time_left(1, 10.0) == pytest.approx(40.0 + 2 * 50.0)
    remaining.on_progress([jobs[0].cell.id], 0.1, 30.0)  # begun again
    remaining.on_progress([jobs[0].cell.id], 0.2, 40.0)
    assert remaining.time_left(3, 40.0) == pytest.approx(50.0)
    remaining.done(took(jobs[0], 60.0))
    assert remaining.time_left(1, 50.0) == pytest.approx(120.0)
    remaining.on_progress([jobs[1].cell.id], 0.0, 50.0)
    remaining.on_progress([jobs[1].cell.id], 0.05, 60.0)  # its own progress counts more than finished cells
    assert remaining.time_left(2, 60.0) == pytest.approx(190.0)


def simulated(
    jobs: list[Job], seconds: dict[str, float], workers: int
) -> tuple[float, list[tuple[float, float | None]]]:
    """Return the end of a simulated run that begins at 0, and its estimates with their times."""
    expected = Forecast(jobs)
    queue = Queue(expected.longest_first())
    now, under_way, idle, estimates = 0.0, list[tuple[float, int, Job]](), set(range(workers)), []
    while True:
        for worker in sorted(idle):
            for job in queue.take(wait=False) or ():
                idle.remove(worker)
                expected.on_progress([job.cell.id], 0.0, now)
                heapq.heappush(under_way, (now + seconds[job.cell.id], worker, job))
        if not under_way:
            return now, estimates
        now, worker, job = heapq.heappop(under_way)
        estimates.append((now, expected.time_left(workers, now)))
        expected.done(took(job, seconds[job.cell.id]))
        queue.done(job)
        idle.add(worker)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_is_near_after_a_fifth_of_a_run(workers: int, seed: int) -> None:
    """From a fifth on the estimate is near what is left of a run of unequal cells."""
    jobs, draw = jobs_of("20,30", (4, 16, 64), 5), random.Random(seed)
    base = {20: 0.5, 30: 10.0}
    seconds = {
        job.cell.id: base[job.cell.task.params["test"]] * (0.3 + 0.02 * job.cell.n_train) * draw.uniform(0.6, 1.6)  # type: ignore[index]
        for job in jobs
    }
    end, estimates = simulated(jobs, seconds, workers)
    longest, later = max(seconds.values()), [(end - now, guess) for now, guess in estimates if now > 0.2 * end]
    assert len(later) > 20
    for left, guess in later:
        assert guess is not None
        # Near the end, random differences between cells of one kind decide.
        assert abs(guess - left) < longest or left / 1.5 < guess < left * 1.5
