import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import what_was_measured
from running import execute, inline
from safetensors.torch import load_file, save_file

from sparsebench import files
from sparsebench.plan import plan as planner
from sparsebench.plan.forecast import Forecast
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Execution, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner import run as runs
from sparsebench.runner.engines import Queue
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.progress import Callbacks
from sparsebench.training.loop import Checkpoint

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

TASK = "composite:epochs=4,test=40,pretrain_epochs=0,flip=True,shift=2,validation=0.25,patience=3,batch=10"
VIT = "vit:dim=16,depth=2,heads=2"
OFTEN = 1e-9


class Killed(KeyboardInterrupt):
    """Stands for a signal: no cell that runs in this process handles it."""


@pytest.fixture
def job(job_of: Any) -> Job:
    (job,) = job_of("random", TASK, n_train=40, model=VIT)
    return job


def run(job: Job, out: Path, every: float = OFTEN) -> Record:
    new: list[Record] = []
    plan = planner.Plan([job], [job], {}, [job], store.summaries(out), Forecast([job]), request=None)
    execution = Execution("cpu", "failed", jobs=0, checkpoint=every)
    runs.carry_out(plan, execution, Registry(), out, Callbacks(on_record=new.append))
    return new[0]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, job: Job) -> Callable[..., Path]:
    """Return a function that runs a job until a checkpoint was written `times` times, and returns its path."""

    def kill(out: Path, times: int, job: Job = job) -> Path:
        written = 0

        def write(self: Checkpoint) -> None:
            nonlocal written
            whole(self)
            written += 1
            if written == times:
                raise Killed

        whole = Checkpoint.write
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Checkpoint, "write", write)
            run(job, out)
        return store.checkpoint_path(out, job.cell.id)

    return kill


def measured(record: Record) -> dict[str, Any]:
    """Return the results that must not depend on interruptions."""
    values = what_was_measured(record)
    return {name: values[name] for name in ("metrics", "outcomes", "trajectory", "status")}


@pytest.fixture(scope="module")
def whole(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Record:
    (job,) = job_of("random", TASK, n_train=40, model=VIT)
    return run(job, tmp_path_factory.mktemp("whole"), 0)


@pytest.mark.parametrize(("plugin", "times"), [("random", 1), ("random", 7), ("dynamic_vit:keep_rate=0.5", 4)])
def test_a_cell_goes_on_from_its_checkpoint(
    tmp_path: Path, job_of: Any, killed: Callable[..., Path], plugin: str, times: int
) -> None:
    *starts, job = job_of(plugin, TASK, n_train=40, model=VIT)
    *_, whole = inline([*starts, job], Registry(), tmp_path, 0)  # stores no records
    path = killed(tmp_path, times, job)
    assert path.exists()
    record = run(job, tmp_path)
    assert record.notes["resumed"] == "1" and "resumed" not in whole.notes
    assert measured(record) == measured(whole) and not path.exists()


@pytest.mark.parametrize("what", ["revision of the strategy", "torch", "first bytes", "all but the last byte"])
def test_a_checkpoint_that_is_torn_or_made_by_something_else_is_not_used(
    tmp_path: Path, job: Job, whole: Record, killed: Callable[..., Path], caplog: Any, what: str
) -> None:
    path = killed(tmp_path, 2)
    if "byte" in what:
        path.write_bytes(path.read_bytes()[: 5 if what == "first bytes" else -1])
    else:
        written = torch.load(path, weights_only=True)
        written["made_by"][what] = "other"
        torch.save(written, path)
    record = run(job, tmp_path, 60)
    assert "resumed" not in record.notes and measured(record) == measured(whole)
    assert ("is not used" if "byte" in what else f"it was made with another {what}") in caplog.text


@pytest.mark.parametrize("every", [0, 60])
def test_none_is_written_when_none_is_due(tmp_path: Path, job: Job, every: float) -> None:
    assert run(job, tmp_path, every).status == "ok"
    assert not (tmp_path / "checkpoints").exists()


def test_cells_that_are_watched_have_none(tmp_path: Path, job_of: Any) -> None:
    watched = job_of("random", "composite:epochs=1,test=20,pretrain_epochs=0,watch=2", n_train=20,
                     model=VIT + ",attention=positional")  # fmt: skip
    assert {run(job, tmp_path).status for job in watched} == {"ok"} and not (tmp_path / "checkpoints").exists()


def test_a_disk_that_is_full_is_said_once_and_does_not_end_the_cell(
    tmp_path: Path, job: Job, whole: Record, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        record = run(job, tmp_path)
    assert measured(record) == measured(whole)
    assert len([m for m in caplog.messages if "no checkpoint" in m]) == 1


@pytest.mark.parametrize(
    ("rerun", "recorded", "goes"),
    [("missing", None, False), ("failed", None, False), ("always", None, True), ("missing", "ok", True),
     ("missing", "failed", True), ("missing", "crashed", False), ("failed", "crashed", False),
     ("missing", "timeout", False), ("missing", "oom", False), ("always", "ok", True)],
)  # fmt: skip
def test_a_run_removes_checkpoints_of_what_is_finished_or_starts_anew(
    tmp_path: Path, rerun: Any, recorded: Any, goes: bool
) -> None:
    request, registry = Request(suite="quick-scratch", tasks=(TASK,), model=VIT, n_train=(40,), seeds=1), Registry()
    job = planner.plan(request, planner.Files(), registry, tmp_path, "missing").todo[0]
    path = store.checkpoint_path(tmp_path, job.cell.id)
    other = path.with_name("other.pt")
    for file in (path, path.with_name(f".{path.name}.123.part"), other):
        files.write_whole(file, b"")
    if recorded:
        failure = None if recorded == "ok" else Failure(reason="it broke")
        record = job.record_of_failure("failed", Failure(reason="it broke"))
        store.Writer(tmp_path).append(record.model_copy(update={"status": recorded, "failure": failure}))
    there = []

    def looks(queue: Queue, _: RunEnvironment) -> Generator[Record, None, None]:
        there.append(sorted(path.parent.iterdir()))
        while jobs := queue.take():
            for job in jobs:
                yield job.record_of_failure("failed", Failure(reason="it was looked at"))
                queue.done(job)

    plan = planner.plan(request, planner.Files(), registry, tmp_path, rerun)
    execute(plan, registry, tmp_path, engine=looks, rerun=rerun)
    assert there == [[other] if goes else sorted([path, path.with_name(f".{path.name}.123.part"), other])]


def test_another_start_is_not_continued(tmp_path: Path, job_of: Any, killed: Callable[..., Path], caplog: Any) -> None:
    """A training that began from other initial weights is not gone on with."""
    start, job = job_of("random", TASK.replace("pretrain_epochs=0", "pretrain_epochs=1,pretrain_samples=40"),
                        n_train=40, model=VIT)  # fmt: skip
    assert run(start, tmp_path).status == "ok"
    killed(tmp_path, 2, job)
    weights = store.weights_path(tmp_path, start.cell.id)
    save_file({name: value + 0.5 for name, value in load_file(weights).items()}, weights)
    other = run(job, tmp_path, 60)
    assert "resumed" not in other.notes and "it was made with another start" in caplog.text
    assert other.notes["initial_weights"] == files.content_hash(weights)
    assert measured(other) == measured(run(job, tmp_path, 0))
