import heapq
import random

import pytest

from sparsebench.engine.queue import Queue
from sparsebench.planning.expand import expand
from sparsebench.planning.expected import Expected
from sparsebench.planning.job import Job
from sparsebench.planning.remaining import Estimate, Remaining
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Failure, Record

TASK = "theory:steps=40,test=20,tokens={tokens}"


def jobs_of(tokens: str = "20", n_train: tuple[int, ...] = (4,), seeds: int = 2) -> list[Job]:
    request = Request(suite="quick-scratch", tasks=(TASK.format(tokens=tokens),), n_train=n_train, seeds=seeds)
    return expand(request, Registry())


def took(job: Job, seconds: float) -> Record:
    record = job.record_of_failure("crashed", Failure(reason="none"), seconds=seconds)
    return record.model_copy(update={"status": "ok", "notes": {"tested_weights": "f"} if job.network else {}})


def known(jobs: list[Job], seconds: float = 10.0) -> Remaining:
    return Remaining(jobs, Expected([took(jobs[0], seconds)]))


def test_the_workers_share_what_is_left() -> None:
    jobs = jobs_of()
    assert len(jobs) == 8
    estimates = [known(jobs).estimate(workers).seconds for workers in (0, 1, 2, 8, 20)]
    assert estimates == [80.0, 80.0, 40.0, 10.0, 10.0]


def test_what_a_cell_under_way_has_done_is_not_left() -> None:
    remaining = known(jobs_of()[:2])
    remaining.begin(remaining.jobs.copy().popitem()[0], 100.0)
    assert [remaining.estimate(1, now).seconds for now in (100.0, 104.0)] == [20.0, 16.0]
    assert remaining.estimate(2, 104.0).seconds == 10.0, "the other takes as long, whoever helps"


def test_a_cell_that_is_longer_at_work_than_expected_still_takes_a_share_of_its_time() -> None:
    (job,) = jobs_of(seeds=1)[:1]
    remaining = known([job])
    remaining.begin(job.cell.id, 100.0)
    left = [remaining.estimate(1, 100.0 + gone).seconds for gone in (0, 6, 8, 10, 100, 1000)]
    assert left == [10.0, 4.0, 2.0, 2.5, 25.0, 250.0]


def test_begun_again_a_cell_is_under_way_since_it_began_first() -> None:
    (job,) = jobs_of(seeds=1)[:1]
    remaining = known([job])
    for now in (100.0, 103.0):
        remaining.begin(job.cell.id, now)
    assert remaining.estimate(1, 104.0).seconds == 6.0
    remaining.begin("another run's", 104.0)
    assert remaining.estimate(1, 104.0).seconds == 6.0


def test_cells_that_one_worker_trains_together_share_its_time() -> None:
    jobs = jobs_of()
    remaining = known(jobs)
    for job in jobs:
        remaining.begin(job.cell.id, 0.0)
    assert remaining.estimate(1, 40.0).seconds == 40.0


def test_cells_of_which_nothing_is_known_are_left_out_and_said() -> None:
    small, large = jobs_of("20", seeds=1), jobs_of("30", seeds=1)
    expected = Expected([took(small[0], 10.0)])
    assert Remaining(large, expected).estimate(1) == (None, True)
    assert Remaining(small[:2] + large, expected).estimate(1) == (20.0, True)
    assert Remaining(small[:2], expected).estimate(1) == (20.0, False)
    assert Remaining([], Expected()).estimate(1) == (0.0, False)


def test_cells_of_which_nothing_is_known_take_as_long_as_one_of_them_is_at_work() -> None:
    small, large = jobs_of("20", seeds=1)[:1], jobs_of("30", seeds=1)[:3]
    remaining = Remaining(small + large, Expected([took(small[0], 10.0)]))
    remaining.begin(large[0].cell.id, 0.0)
    assert remaining.estimate(1, 40.0) == (10.0 + 40.0 / 4 + 2 * 40.0, True)


def test_a_record_is_learned_from_and_its_cell_no_longer_left() -> None:
    jobs = jobs_of(seeds=1)[:3]
    remaining = Remaining(jobs, Expected())
    remaining.begin(jobs[0].cell.id, 0.0)
    for job, seconds in zip(jobs, (8.0, 4.0, 0.0), strict=True):
        remaining.done(took(job, 6.0))
        assert remaining.estimate(1).seconds == (12.0 if seconds == 8.0 else 6.0 if seconds else 0.0)
    remaining.done(took(jobs[0], 6.0))
    assert remaining.estimate(1) == (0.0, False)


def test_a_training_that_says_how_far_it_is_is_known_and_so_are_those_like_it() -> None:
    jobs = jobs_of("30", seeds=1)[:3]
    remaining = Remaining(jobs, Expected())
    remaining.begin(jobs[0].cell.id, 0.0)
    assert remaining.estimate(1, 5.0) == (None, True) and remaining.share(1, 5.0) == 0.0
    remaining.begin(jobs[0].cell.id, 10.0, 0.1)
    remaining.begin(jobs[0].cell.id, 20.0, 0.3)
    assert remaining.estimate(1, 20.0) == (pytest.approx(35.0 + 2 * 55.0), False)
    assert remaining.estimate(1, 25.0).seconds == pytest.approx(30.0 + 2 * 55.0)
    assert remaining.share(1, 20.0) == pytest.approx(20 / 55)
    remaining.begin(jobs[0].cell.id, 30.0, 0.1)  # begun again: from there on
    remaining.begin(jobs[0].cell.id, 40.0, 0.2)
    assert remaining.estimate(3, 40.0).seconds == pytest.approx(40.0 + 80.0)
    remaining.done(took(jobs[0], 50.0))
    assert remaining.estimate(1, 50.0) == (100.0, False) and remaining.share(1, 50.0) == 0.0


def test_how_far_a_training_is_counts_more_than_what_others_took() -> None:
    (job,) = jobs_of(seeds=1)[:1]
    remaining = known([job], seconds=10.0)
    remaining.begin(job.cell.id, 0.0)
    assert remaining.share(1, 5.0) == 0.5
    for now, share in ((1.0, 0.01), (5.0, 0.05), (6.0, -1.0), (7.0, 2.0)):
        remaining.begin(job.cell.id, now, share)
    assert remaining.estimate(1, 5.0).seconds == pytest.approx(95.0)


def chain() -> tuple[Job, Job, list[Job]]:
    """Return a job, one that starts from it, and tests of what that one trains."""
    first, second, *others = (job for job in jobs_of("20,30", (4, 8), 2) if job.label == "dense")
    second = second.model_copy(update={"after": first.cell.id})
    return (
        first,
        second,
        [job.model_copy(update={"after": second.cell.id, "network": second.cell.id}) for job in others],
    )


def test_trainings_that_others_wait_for_come_one_after_the_other() -> None:
    first, second, tests = chain()
    jobs = [first, second, *tests]
    expected = Expected([took(job, seconds) for job, seconds in ((first, 100.0), (second, 40.0), (tests[0], 1.0))])
    assert len({expected.like(job).kind for job in jobs}) > 2
    remaining = Remaining(jobs, expected)
    each = [expected.seconds(job) or 0.0 for job in jobs]
    longest = each[0] + each[1] + max(each[2:])
    assert remaining.estimate(1).seconds == pytest.approx(sum(each)) and sum(each) > longest
    assert remaining.estimate(16).seconds == pytest.approx(longest)
    remaining.begin(first.cell.id, 0.0)
    assert remaining.estimate(16, 30.0).seconds == pytest.approx(longest - 30)
    remaining.done(took(first, each[0]))
    assert remaining.estimate(16, 100.0).seconds == pytest.approx(longest - each[0])


@pytest.mark.parametrize("seconds", [None, 0.001, 3.0])
def test_an_estimate_is_never_0_while_cells_are_left(seconds: float | None) -> None:
    jobs = jobs_of("20,30", (4, 8), 1)
    remaining = Remaining(jobs, Expected([took(jobs[0], seconds)] if seconds else []))
    now = 0.0
    for job in jobs:
        remaining.begin(job.cell.id, now)
        for gone in (0.0, 0.001, 3.0, 1000.0):
            estimate = remaining.estimate(2, now + gone)
            assert estimate.seconds is None or estimate.seconds > 0
        now += 1000
        remaining.done(took(job, 0.0 if seconds is None else seconds))
    assert remaining.estimate(2) == (0.0, False)


def simulated(jobs: list[Job], seconds: dict[str, float], workers: int) -> tuple[float, list[tuple[float, Estimate]]]:
    """Return when a run that begins at 0 is over, and when it estimated what; `seconds` is what each cell takes."""
    expected = Expected()
    jobs = expected.longest_first(jobs)
    queue, remaining = Queue(jobs, 1, expected.seconds), Remaining(jobs, expected)
    now, under_way, idle, estimates = 0.0, list[tuple[float, int, Job]](), set(range(workers)), []
    while True:
        for worker in sorted(idle):
            for job in queue.take(worker, wait=False) or ():
                idle.remove(worker)
                remaining.begin(job.cell.id, now)
                heapq.heappush(under_way, (now + seconds[job.cell.id], worker, job))
        if not under_way:
            return now, estimates
        now, worker, job = heapq.heappop(under_way)
        estimates.append((now, remaining.estimate(workers, now)))
        remaining.done(took(job, seconds[job.cell.id]))
        queue.done(job)
        idle.add(worker)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_from_a_fifth_on_the_estimate_is_near_what_is_left_of_a_run_of_unequal_cells(workers: int, seed: int) -> None:
    jobs, draw = jobs_of("20,30", (4, 16, 64), 5), random.Random(seed)
    base = {20: 0.5, 30: 10.0}
    seconds = {
        job.cell.id: base[job.cell.task.params["tokens"]] * (0.3 + 0.02 * job.cell.n_train) * draw.uniform(0.6, 1.6)  # type: ignore[index]
        for job in jobs
    }
    end, estimates = simulated(jobs, seconds, workers)
    longest, later = max(seconds.values()), [(end - now, estimate) for now, estimate in estimates if now > 0.2 * end]
    assert len(later) > 20
    for left, estimate in later:
        assert not estimate.over and estimate.seconds is not None
        # Near the end differences between like cells decide, of which nobody knows before.
        near = abs(estimate.seconds - left) < longest
        assert near or left / 1.5 < estimate.seconds < left * 1.5
