"""What a run asks of an engine: the protocol, and a record of each cell."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from measured import what_was_measured
from plugin_files import write_strategy
from running import execute, planned

from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.engines import Engine, InProcess, Processes, Queue
from sparsebench.runner.prepare import Context
from sparsebench.runner.run_cell import one_thread, run_cells


class Sequential:
    """Runs one cell after the other, but for some."""

    def __init__(self, lost: Sequence[str] = ()):
        self.lost = lost

    def records(self, queue: Queue, setting: Setting) -> Iterator[Record]:
        context = Context(setting)
        with one_thread():
            while batch := queue.take():
                if batch[0].label not in self.lost:
                    queue.begin([batch[0].cell.id], 0.0)
                    yield from run_cells(batch, Registry(), context)
                queue.done(batch[0])


def collect(out: Path, made: Engine, **callbacks: Any) -> None:
    execute(planned(out), Registry(), out, engine=made, **callbacks)


def measured(out: Path) -> dict[str, Any]:
    return {id_: what_was_measured(record) for id_, record in store.read(out).items()}


PICTURES = "composite:pretrain_epochs=0,epochs=6,test=4"


def test_any_engine_can_run_cells(tmp_path: Path) -> None:
    new: list[Record] = []
    collect(tmp_path / "own", Sequential(), on_record=new.append)
    collect(tmp_path / "here", InProcess(Registry()))
    assert len(new) == 4 and measured(tmp_path / "own") == measured(tmp_path / "here")
    assert planned(tmp_path / "own").todo == []


def test_an_engine_that_loses_cells_is_noticed_and_what_is_recorded_kept(tmp_path: Path) -> None:
    (lost,) = (job.cell.id for job in planned(tmp_path).todo if job.label == "random")
    with pytest.raises(UserError) as error:
        collect(tmp_path, Sequential(lost=["random"]))
    line = f"the engine gave no record of 1 of 4 cells, {lost} among them; the records of the others are stored; "
    assert str(error.value) == line + "the same command goes on"
    assert len(store.read(tmp_path)) == 3 and [job.cell.id for job in planned(tmp_path).todo] == [lost]
    collect(tmp_path, Sequential())
    assert len(store.read(tmp_path)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_engine_says_which_share_of_a_training_is_done(workers: int, tmp_path: Path) -> None:
    file = write_strategy(tmp_path / "slow.py", "time.sleep(0.7)", "import time")
    request = Request(suite="quick-scratch", plugins=(str(file),), tasks=(PICTURES,), n_train=(2,), seeds=1)
    plan = planner.plan(request, planner.Files(), registry := Registry(), tmp_path / "out", "missing")
    jobs = [job for job in plan.jobs if job.label == "slow"]
    said: list[tuple[Sequence[str], float]] = []

    made = Processes(1) if workers else InProcess(registry)
    setting = Setting(out=tmp_path / "out", device="cpu")
    (record,) = made.records(Queue(jobs, 1, begin=lambda cells, share: said.append((cells, share))), setting)
    assert record.status == "ok", record.failure
    shares = [share for cells, share in said if list(cells) == [record.cell_id]]
    assert shares[0] == 0.0 and len(shares) > 2 and shares[-1] <= 1
    assert sorted(shares) == shares and len(set(shares)) == len(shares)
