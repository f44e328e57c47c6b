"""The cells that a run computes, depending on the records of its folder, and what it stores."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import running
import torch
from measured import TINY
from running import execute

import sparsebench
from sparsebench.plan import coverage
from sparsebench.plan import plan as planner
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request, values_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import devices
from sparsebench.runner import run as runs


def planned(out: Path, *plugins: str, rerun: Any = "missing", **options: Any) -> Plan:
    return running.planned(out, rerun, plugins=plugins, **{"n_train": (4, 8)} | options)


def run(out: Path, *plugins: str, registry: Registry | None = None, **options: Any) -> list[Record]:
    """Run the missing cells in this process; return the new records."""
    new: list[Record] = []
    execute(planned(out, *plugins, **options), registry or Registry(), out, 0, new.append)
    return new


@pytest.fixture(scope="module")
def done(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a good, a failing and an unsupported strategy. Tests only read it."""
    out = tmp_path_factory.mktemp("done")
    run(out, str(samples / "good.py"), str(samples / "raises.py"), str(samples / "unsupported.py"))
    return out


@pytest.fixture
def again(samples: Path, done: Path) -> Callable[..., Plan]:
    """Return the plan of the same request."""

    def plan(rerun: str = "missing", **options: Any) -> Plan:
        names = ("good", "raises", "unsupported")
        return planned(done, *(str(samples / f"{name}.py") for name in names), rerun=rerun, **options)

    return plan


def test_only_what_is_new_is_to_do(again: Callable[..., Plan]) -> None:
    plan = again(seeds=2, n_train=(8, 16))
    assert {(job.cell.repetition, job.cell.n_train) for job in plan.todo} == {(0, 16), (1, 8), (1, 16)}
    assert len(plan.todo) == 21


def test_a_resumed_run_expands_its_suite_once_and_decides_the_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Execution("cpu", jobs=0, shard="0/9999")
    runs.run_missing(Request(suite=TINY), Files(), few, Registry(), tmp_path)
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return real(*args, **keywords)

        monkeypatch.setattr(owner, name, counted)

    count(planner, "variants_of")
    count(coverage, "variants_of_task")
    count(devices, "resolve_device")
    runs.run_missing(Request(suite=TINY), Files(), few, Registry(), tmp_path)
    assert calls == {"variants_of": 1, "resolve_device": 1}


def test_a_resumed_run_opens_each_sealed_file_twice_at_most_and_its_suite_once(
    tmp_path: Path, open_counts: Counter[str]
) -> None:
    out, suite = tmp_path / "out", shutil.copy(TINY, tmp_path / "tiny.toml")
    options: dict[str, Any] = {"suite": str(suite), "seeds": 1, "n_train": 4, "device": "cpu", "jobs": 0}
    runs.run_missing(*values_of({**options, "shard": "0/2"}), Registry(), out)
    for _ in range(2):  # first the other shard is run, then nothing
        open_counts.clear()
        sparsebench.run((), out=out, **options)
        sealed = store.sealed_files(out)
        assert len(sealed) == 2 and open_counts[str(suite)] == 1
        assert {open_counts[str(path)] for path in sealed} <= {1, 2}


def test_failures_or_all_are_run_again_when_asked_for(again: Callable[..., Plan]) -> None:
    failed, every = again("failed"), again("always")
    assert {job.label for job in failed.todo} == {"raises"}, "what is unsupported has its answer"
    assert sorted(job.cell.id for job in every.todo) == sorted(job.cell.id for job in every.jobs)


def test_a_moved_plugin_file_is_not_run_again(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = shutil.copy(samples / "good.py", tmp_path / "mine.py")
    moved = shutil.copy(samples / "good.py", tmp_path / "elsewhere" / "other.py")
    run(tmp_path / "out", str(path))
    assert planned(tmp_path / "out", str(moved)).todo == []


def test_lost_teachers_are_trained_again(tmp_path: Path) -> None:
    """Of what a taught strategy starts from what lacks weights is made again."""
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    options = {"tasks": (task,), "model": "vit:dim=16,depth=2,heads=2", "n_train": (20,)}
    run(tmp_path, **options)
    todo = planned(tmp_path, "dynamic_vit", **options).todo
    assert [job.label for job in todo] == ["dense", "dynamic_vit"], "the dense network has a record and no weights"
    records = run(tmp_path, "dynamic_vit", **options)
    assert [(record.label, record.status) for record in records] == [("dense", "ok"), ("dynamic_vit", "ok")]
    plan = planned(tmp_path, "dynamic_vit", **options)
    assert plan.todo == []
    first, dense, *_ = plan.jobs
    assert records[1].notes["initial_weights"] == records[0].notes["weights"]
    known = store.read(tmp_path)
    shutil.rmtree(tmp_path / "records")
    writer = store.Writer(tmp_path)
    for job in (first, dense):
        writer.append(known[job.cell.id])
    writer.close()
    assert [job.label for job in planned(tmp_path, "dynamic_vit", alone=True, **options).todo] == ["dynamic_vit"]
    store.weights_path(tmp_path, first.cell.id).unlink()
    assert [job.label for job in planned(tmp_path, "dynamic_vit", alone=True, **options).todo] == ["dynamic_vit"]
    store.weights_path(tmp_path, dense.cell.id).unlink()
    again = planned(tmp_path, "dynamic_vit", alone=True, **options).todo
    assert [job.cell.id for job in again] == [first.cell.id, dense.cell.id, records[1].cell_id]


@pytest.mark.parametrize("flaw", ["lost", "torn", "changed"])
def test_initial_weights_that_are_not_as_they_were_written_are_made_again(tmp_path: Path, flaw: str) -> None:
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    options = {"tasks": (task,), "model": "vit:dim=16,depth=2,heads=2", "n_train": (20,)}
    assert {record.status for record in run(tmp_path, **options)} == {"ok"}
    whole = [job.keep_weights for job in planned(tmp_path, **options | {"seeds": 2}).todo]
    (path,) = (tmp_path / "weights").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-4] + (b"\0\0\0\0" if flaw == "changed" else b""))
    if flaw == "lost":
        path.unlink()
    assert planned(tmp_path, **options).todo == []
    more = planned(tmp_path, **options | {"seeds": 2})
    assert (whole, [job.keep_weights for job in more.todo]) == ([False] * 4, [True] + [False] * 4)
    assert {record.status for record in run(tmp_path, **options, seeds=2)} == {"ok"}
    assert path.read_bytes() == content


def test_records_are_stored_before_they_are_shown(tmp_path: Path) -> None:
    stored: list[bool] = []
    plan = planned(tmp_path)
    show = lambda record: stored.append(record.cell_id in store.read(tmp_path))  # noqa: E731
    execute(plan, Registry(), tmp_path, 0, show)
    assert stored == [True] * 8


def test_the_environment_lies_beside_the_records_that_name_it(done: Path) -> None:
    ((name, text),) = store.sidecars(done, "environments").items()
    named = {record.environment for record in store.read(done).values() if record.status == "ok"}
    assert named == {Path(name).stem}
    assert json.loads(text)["torch"] in torch.__version__


def test_there_are_as_many_workers_as_asked_for_and_no_more_than_cells(again: Callable[..., Plan]) -> None:
    plan = again("always")
    assert devices.workers_for(plan, "cpu", 0) == 0
    assert devices.workers_for(plan, "cpu", 3) == 3
    assert devices.workers_for(plan, "cpu", 100) == len(plan.todo) == 14
    assert 1 <= devices.workers_for(plan, "cpu", None) <= 14
    assert devices.workers_for(plan, "cuda:0", None) == devices.workers_for(plan, "cpu", None, exclusive=True) == 1
