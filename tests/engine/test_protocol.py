"""What a run asks of an engine: the protocol, and a record of each cell."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparsebench import engine
from sparsebench.cells.prepare import Context
from sparsebench.cells.run_cell import run_cells
from sparsebench.engine import run as runs
from sparsebench.engine.worker import one_thread
from sparsebench.errors import UserError
from sparsebench.observe.observers import Observers
from sparsebench.planning import planner
from sparsebench.planning.job import Job
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record


class Sequential:
    """Runs one cell after the other, but for some."""

    def __init__(self, lost: Sequence[str] = ()):
        self.lost = lost

    def records(
        self,
        jobs: Sequence[Job],
        setting: engine.Setting,
        stop: engine.Stop,
        on_begin: Callable[[Sequence[str]], None],
    ) -> Iterator[Record]:
        context = Context(setting.out, setting.device, setting.locations, setting.checkpoint)
        with one_thread():
            for job in jobs:
                if job.label not in self.lost and not stop.asked:
                    on_begin([job.cell.id])
                    yield from run_cells([job], Registry(), context)


def planned(out: Path) -> planner.Plan:
    request = Request(suite="quick-scratch", tasks=("theory:steps=40,test=20,tokens=20",), n_train=(4,), seeds=1)
    return planner.plan(request, planner.Files(), Registry(), out, "missing")


def collect(out: Path, made: engine.Engine, **callbacks: Any) -> None:
    setting = engine.Setting(out=out, device="cpu")
    runs.collect(planned(out), made, setting, 1, runs.Callbacks(**callbacks), Observers(Registry()))


def measured(out: Path) -> dict[str, Any]:
    told = {"started", "seconds", "memory"}
    return {id_: record.model_dump(exclude=told) for id_, record in store.read(out).items()}


PICTURES = "composite:pretrain_epochs=0,epochs=6,test=4"


def test_any_engine_can_run_cells(tmp_path: Path) -> None:
    new: list[Record] = []
    collect(tmp_path / "own", Sequential(), on_record=new.append)
    collect(tmp_path / "here", engine.InProcess(Registry()))
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


def test_an_engine_that_is_asked_to_stop_has_lost_nothing(tmp_path: Path) -> None:
    def interrupt(record: Record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, Sequential(), on_record=interrupt)
    assert len(store.read(tmp_path)) == 1


@pytest.mark.parametrize("checkpoint", [0.0, 60.0, float("inf")])
def test_a_setting_travels_as_json(tmp_path: Path, checkpoint: float) -> None:
    limits = engine.Limits(7.5, 2**30, exclusive=True)
    setting = engine.Setting(
        out=tmp_path, device="cuda:0", locations={"a": tmp_path / "b"}, checkpoint=checkpoint, limits=limits
    )  # fmt: skip
    assert engine.Setting.model_validate_json(setting.model_dump_json()) == setting


SLOW = '''
import time
from typing import ClassVar
import sparsebench

class Slow(sparsebench.Strategy):
    """Takes its time."""
    name: ClassVar = "slow"

    def scores(self, view):
        time.sleep(0.7)
        return view.tokens.sum(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Slow]
'''


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_engine_says_which_share_of_a_training_is_done(workers: int, tmp_path: Path) -> None:
    (file := tmp_path / "slow.py").write_text(SLOW)
    request = Request(suite="quick-scratch", plugins=(str(file),), tasks=(PICTURES,), n_train=(2,), seeds=1)
    plan = planner.plan(request, planner.Files(), registry := Registry(), tmp_path / "out", "missing")
    jobs = [job for job in plan.jobs if job.label == "slow"]
    said: list[tuple[Sequence[str], float]] = []

    def on_begin(cells: Sequence[str], share: float = 0.0, /) -> None:
        said.append((cells, share))

    made = engine.Processes(1) if workers else engine.InProcess(registry)
    setting = engine.Setting(out=tmp_path / "out", device="cpu")
    (record,) = made.records(jobs, setting, engine.Stop(), on_begin)
    assert record.status == "ok", record.failure
    shares = [share for cells, share in said if list(cells) == [record.cell_id]]
    assert shares[0] == 0.0 and len(shares) > 2 and shares[-1] <= 1
    assert sorted(shares) == shares and len(set(shares)) == len(shares)
