from pathlib import Path

import pytest

from sparsebench.planning import planner
from sparsebench.planning.expand import expand
from sparsebench.planning.expected import Expected
from sparsebench.planning.job import Job
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record

TASK = "theory:steps=40,test=20,tokens={tokens}"
PRETRAINED = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"


def jobs_of(tokens: str = "20,30", n_train: tuple[int, ...] = (4, 8), seeds: int = 2) -> list[Job]:
    request = Request(suite="quick-scratch", tasks=(TASK.format(tokens=tokens),), n_train=n_train, seeds=seeds)
    return [job for job in expand(request, Registry()) if job.label in ("dense", "random")]


def took(job: Job, seconds: float, memory: int = 0, status: str = "ok") -> Record:
    record = job.record_of_failure("crashed", Failure(reason="none"), seconds=seconds)
    return record.model_copy(update={"status": status, "memory": memory})


def shape(job: Job) -> tuple[object, int]:
    return job.cell.task.params["tokens"], job.cell.n_train


def test_like_cells_are_asked_whatever_their_strategy_and_seed() -> None:
    jobs = jobs_of("20", (4,))
    history = Expected([took(job, seconds) for job, seconds in zip(jobs[:3], (1, 2, 9), strict=True)])
    assert [history.seconds(job) for job in jobs] == [2, 2, 2, 2]


def test_cells_with_other_training_samples_count_in_proportion() -> None:
    four, eight = (job for job in jobs_of("20", (4, 8), 1) if job.label == "dense")
    assert Expected([took(four, 2.0)]).seconds(eight) == 4.0
    assert Expected([took(four, 2.0), took(eight, 3.0)]).seconds(eight) == 3.0


def test_the_nearest_number_of_training_samples_is_asked_first() -> None:
    four, eight, sixty = (job for job in jobs_of("20", (4, 8, 64), 1) if job.label == "dense")
    assert Expected([took(four, 2.0), took(eight, 3.0)]).seconds(sixty) == 24.0


def test_records_that_come_later_count() -> None:
    jobs = jobs_of("20", (4,))
    history = Expected()
    assert history.seconds(jobs[0]) is None
    for seconds, median in ((8.0, 8.0), (2.0, 5.0), (3.0, 3.0)):
        history.add(took(jobs[1], seconds))
        assert history.seconds(jobs[0]) == median


def test_the_prior_counts_where_nothing_is_known_of_the_kind() -> None:
    small, large = (job for job in jobs_of("20,30", (4,), 1) if job.label == "dense")
    history = Expected([took(small, 2.0)], prior=lambda job: float(job.cell.n_train))
    assert (history.seconds(small), history.seconds(large)) == (2.0, 4.0)


def test_tests_of_trained_networks_are_a_kind_of_their_own_whatever_the_training() -> None:
    small, large = jobs_of("20", (4, 8), 1)[:2]
    cells = [job.cell.model_copy(update={"where": "test"}) for job in (small, large)]
    tests = [small.model_copy(update={"cell": cell, "network": "f" * 16}) for cell in cells]
    tested = took(tests[0], 0.5).model_copy(update={"notes": {"tested_weights": "f" * 64}})
    history = Expected([took(small, 60.0), tested])
    assert [history.seconds(job) for job in (small, *tests)] == [60.0, 0.5, 0.5]


def test_nothing_is_known_of_another_task_or_of_cells_that_failed() -> None:
    small, large = (job for job in jobs_of("20,30", (4,), 1) if job.label == "dense")
    assert Expected([took(small, 2.0)]).seconds(large) is None
    assert Expected([took(small, 2.0, status="timeout")]).seconds(small) is None
    assert Expected([]).seconds(small) is None


def test_what_is_unknown_comes_first_and_then_the_longest() -> None:
    jobs = jobs_of("20,30", (4, 8))
    known = {(20, 4): 1.0, (20, 8): 5.0}
    history = Expected([took(job, known[shape(job)]) for job in jobs if shape(job) in known])
    ordered = history.longest_first(jobs)
    assert {shape(job) for job in ordered[:8]} == {(30, 4), (30, 8)}
    assert [shape(job) for job in ordered[8:]] == [(20, 8)] * 4 + [(20, 4)] * 4
    assert [job for job in jobs if shape(job) == (20, 4)] == ordered[12:], "as they were among themselves"


def test_of_what_is_unknown_one_of_each_comes_first() -> None:
    ordered = Expected().longest_first(jobs_of("20,30", (4, 8)))
    assert {shape(job) for job in ordered[:4]} == {(20, 4), (20, 8), (30, 4), (30, 8)}


def test_what_others_start_from_stays_first() -> None:
    jobs = expand(
        Request(suite="quick-scratch", tasks=(PRETRAINED,), model="vit:dim=16,depth=2,heads=2", n_train=(20,), seeds=1),
        Registry(),
    )
    ordered = Expected([took(job, 1.0 if job.keep_weights else 100.0) for job in jobs]).longest_first(jobs)
    assert ordered[0].keep_weights and len(ordered) == len(jobs) > 1


def test_the_memory_is_the_most_of_like_cells() -> None:
    (job,) = (job for job in jobs_of("20", (4,), 1) if job.label == "dense")
    assert Expected([took(job, 1.0, 5), took(job, 1.0, 7)]).memory(job) == 7
    assert Expected([took(job, 1.0)]).memory(job) is None


@pytest.mark.parametrize("rerun", ["missing", "always"])
def test_a_plan_has_the_longest_first_by_what_the_folder_has(tmp_path: Path, rerun: planner.Rerun) -> None:
    request = Request(suite="quick-scratch", tasks=(TASK.format(tokens="20,30"),), n_train=(4,), seeds=2)
    first = expand(request, Registry())
    writer = store.Writer(tmp_path)
    for tokens, seconds in ((20, 1.0), (30, 5.0)):
        job = next(job for job in first if job.cell.task.params["tokens"] == tokens)
        writer.append(took(job, seconds))
    writer.close()
    todo = planner.plan(request, planner.Files(), Registry(), tmp_path, rerun).todo
    sizes = [job.cell.task.params["tokens"] for job in todo]
    assert sizes == sorted(sizes, key=lambda size: size != 30) and set(sizes) == {20, 30}
