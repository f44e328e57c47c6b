"""What the same command heals: cells of killed workers, and those that have nothing to begin with."""

import logging
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from measured import TINY
from plugin_files import write_strategy
from running import execute, local, planned

from sparsebench.plan.expand import expand
from sparsebench.plan.request import Job, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner.engines import Queue, in_process

ENDS = """
with open({tries!r}, "a") as file:
    file.write("tried\\n")
if len(open({tries!r}).read().split()) <= {times}:
    os.kill(os.getpid(), signal.{how})
"""


def run(out: Path, how: str, times: int) -> tuple[Record, int]:
    """Return the record of a cell whose worker is ended so often, and how often it was tried."""
    tries = out / "tries"
    body = ENDS.format(tries=str(tries), how=how, times=times)
    path = write_strategy(out / "ends.py", body, "import os, signal")
    request = Request(suite=TINY, plugins=(str(path),), n_train=(4,), seeds=1)
    jobs = [job for job in expand(request, Registry()) if job.label in ("ends", "oracle")]
    records = {record.label: record for record in local(jobs, 1, out)}
    assert records["oracle"].status == "ok"
    ends = records["ends"]
    return ends, len(tries.read_text().split()) if ends.status == "crashed" else times + 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_cell_whose_worker_is_killed_is_tried_once_more(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        record, _ = run(tmp_path, how, times=1)
    assert record.status == "ok" and record.failure is None
    (said,) = caplog.messages
    assert "ends" in said and how in said and "it is tried once more" in said


@pytest.mark.slow
@pytest.mark.parametrize(("how", "tried"), [("SIGKILL", 2), ("SIGSEGV", 1)])
def test_one_whose_worker_is_killed_again_or_ends_by_a_fault_has_crashed(tmp_path: Path, how: str, tried: int) -> None:
    record, tries = run(tmp_path, how, times=9)
    assert record.status == "crashed" and record.failure is not None and how in record.failure.reason
    assert tries == tried


COMPOSITE: dict[str, Any] = {
    "suite": "quick-scratch", "tasks": ("composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40",),
    "model": "vit:dim=16,depth=2,heads=2", "n_train": (20,),
}  # fmt: skip


def collect(out: Path, disturb: Callable[[Job, Record], Record] = lambda job, record: record) -> dict[str, Record]:
    """Give the command, and do something to the records of cells that others begin with; return what the store has."""
    jobs = {job.cell.id: job for job in planned(out, **COMPOSITE).jobs}

    def disturbed(queue: Queue, setting: Setting) -> Generator[Record, None, None]:
        for record in in_process(Registry(), queue, setting):
            job = jobs[record.cell_id]
            yield disturb(job, record) if job.keep_weights else record

    execute(planned(out, **COMPOSITE), Registry(), out, engine=disturbed)
    return dict(store.read(out))


def crash(out: Path, job: Job, record: Record) -> Record:
    store.weights_path(out, job.cell.id).unlink()
    return job.record_of_failure("crashed", Failure(reason="the worker was ended by SIGKILL", kind="crashed"))


def tear(out: Path, job: Job, record: Record) -> Record:
    path = store.weights_path(out, job.cell.id)
    path.write_bytes(path.read_bytes()[:-4])
    return record


@pytest.mark.parametrize(("disturb", "first"), [(crash, "crashed"), (tear, "ok")])
def test_what_begins_with_weights_that_are_gone_or_torn_is_skipped_and_the_same_command_runs_it(
    tmp_path: Path, disturb: Callable[[Path, Job, Record], Record], first: str
) -> None:
    records = collect(tmp_path, partial(disturb, tmp_path))
    assert sorted(record.status for record in records.values()) == sorted([first, *["skipped"] * 4])
    reasons = {record.failure.reason for record in records.values() if record.status == "skipped" and record.failure}
    assert all("the same command" in reason for reason in reasons) and len(reasons) == 1
    assert len(planned(tmp_path, **COMPOSITE).todo) == 5
    assert {record.status for record in collect(tmp_path).values()} == {"ok"}
    assert planned(tmp_path, **COMPOSITE).todo == []
