"""The progress of a run, as shown by `status`, the bar and a dry run."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from measured import TINY
from running import execute, planned, run_without_board
from waiting import soon

from sparsebench import files
from sparsebench.cli import main
from sparsebench.plan import plan as planner
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner import progress
from sparsebench.runner.progress import Progress, Underway, beat, underway

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def status(out: Path) -> Result:
    return CliRunner().invoke(main, ["status", str(out)])


def row(result: Result, label: str) -> list[str]:
    """Return the counts of a strategy's cells: done, failed, running, left."""
    (line,) = (line for line in result.output.splitlines() if line.split()[:1] == [label])
    return line.split()[1:]


@pytest.fixture
def plan(tmp_path: Path) -> planner.Plan:
    return planned(tmp_path, n_train=(4, 8))


def test_what_is_done_and_failed_is_counted_by_strategy(tmp_path: Path, plan: planner.Plan) -> None:
    writer = store.Writer(tmp_path)
    for job in plan.jobs:
        kind = "ok" if job.label == "dense" else "timeout" if job.label == "random" else "unsupported"
        writer.append(job.record_of_failure(kind, Failure(reason="as it came")))  # type: ignore[arg-type]
    writer.close()
    result = status(tmp_path)
    assert result.exit_code == 0 and "no run is under way" in result.output
    assert row(result, "dense") == ["2", "0", "0", "0"]
    assert row(result, "random") == ["0", "2", "0", "0"]
    assert row(result, "oracle") == ["2", "0", "0", "0"]


def test_a_run_under_way_says_what_it_is_at_and_what_is_left(tmp_path: Path, plan: planner.Plan) -> None:
    results: list[Result] = []

    def look(record: Record) -> None:
        if not results:
            assert soon(lambda: sum(n for run in underway(tmp_path).values() for n in run.left.values()) == 7)
            results.append(status(tmp_path))

    execute(plan, Registry(), tmp_path, 0, look)
    first = plan.jobs[0].label
    assert row(results[0], first) == ["1", "0", "0", "1"]
    assert re.search(rf"process {os.getpid()}\): 7 cells without a record, (about \d+:|unknown)", results[0].output)
    assert "no run is under way" in status(tmp_path).output
    assert not (tmp_path / "underway").exists()


def test_what_is_run_is_counted_as_running(tmp_path: Path, plan: planner.Plan) -> None:
    with beat(tmp_path, plan.forecast, 2):
        plan.forecast.on_progress([plan.jobs[0].cell.id], 0.0, time.time() - 100)
        assert soon(lambda: any(run.running for run in underway(tmp_path).values()))
        result = status(tmp_path)
    assert row(result, plan.jobs[0].label) == ["0", "0", "1", "1"]
    assert "8 cells without a record, unknown time; the longest running cell: 1:4" in result.output


def test_a_killed_run_is_distinguished_from_a_running_one(tmp_path: Path, plan: planner.Plan) -> None:
    left, ago = {"dense": 5}, time.time() - 300
    file = Underway(host="there", pid=7, updated=ago, since=ago, left=left, running=left)
    files.write_whole(tmp_path / "underway" / "there-7.json", file.model_dump_json().encode())
    (tmp_path / "underway" / "torn.json").write_text("{")
    result = status(tmp_path)
    assert (
        "on there (process 7) was stopped with 5 cells left" in result.output
        and "run the same command again" in result.output
    )
    assert "dense" not in result.output
    with beat(tmp_path, plan.forecast, 2):
        assert not (tmp_path / "underway" / "there-7.json").exists()


@pytest.mark.parametrize("whole", [False, True], ids=["the rest is run", "nothing is left to run"])
def test_the_next_run_removes_the_file_of_a_run_that_was_just_killed(
    tmp_path: Path, plan: planner.Plan, whole: bool
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    here, now = socket.gethostname(), time.time()
    file = Underway(host=here, pid=killed.pid, updated=now, since=now, left={"dense": 5})
    if whole:
        execute(plan, Registry(), tmp_path)
    path = tmp_path / "underway" / f"{here}-{killed.pid}.json"
    files.write_whole(path, file.model_dump_json().encode())
    assert not whole or "was stopped with 5 cells left" in status(tmp_path).output
    again = planned(tmp_path, n_train=(4, 8))
    assert bool(again.todo) != whole
    execute(again, Registry(), tmp_path)
    assert "no run is under way" in status(tmp_path).output and not path.parent.exists()


def test_after_a_kill_what_is_left_is_what_has_no_record(
    tmp_path: Path, plan: planner.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STATUS_INTERVAL", 1000.0)  # records are stored after the last update of the status
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with beat(tmp_path, plan.forecast, 2):
        assert soon(lambda: underway(tmp_path))
        ((path, run),) = underway(tmp_path).items()
        writer = store.Writer(tmp_path)
        for job in plan.jobs[:3]:
            writer.append(job.record_of_failure("failed", Failure(reason="it broke")))
        writer.close()
        killed = run.model_copy(update={"pid": dead.pid, "running": {plan.jobs[0].label: 1}})
        path.write_text(killed.model_dump_json())
        result = status(tmp_path)
        assert "was stopped with 5 cells left" in result.output
        counts = [row(result, label) for label in {job.label for job in plan.jobs}]
        assert [sum(int(count[place]) for count in counts) for place in range(4)] == [0, 3, 0, 5]


def test_cells_of_shards_that_have_not_run_are_left(tmp_path: Path) -> None:
    words: dict[str, Any] = {"suite": TINY, "n_train": [4, 8], "seeds": 2, "out": tmp_path}
    labels = ("dense", "random", "oracle", "anti_oracle")
    for shard, done in zip(("1/3", "0/3", "2/3"), (1, 2, 3), strict=True):
        if done == 2:  # another request in the same folder, of one shard
            run_without_board("noise", **words | {"n_train": [2], "seeds": 1})
            status(tmp_path)
        run_without_board(shard=shard, **words)
        result, records = status(tmp_path), store.read(tmp_path).values()
        stored = sum(record.cell.n_train != 2 for record in records)
        left = [int(row(result, label)[3]) for label in labels]
        assert sum(left) == 16 - stored and ("other shards" in result.output) == (done < 3)
    assert stored == 16 and not (tmp_path / "underway").exists()


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    result = status(tmp_path / "nowhere")
    assert result.exit_code == 2 and "no records in" in result.output


UNEQUAL: dict[str, Any] = {"tasks": ("composite:test=20,30",), "seeds": 3}
WORDS = ["run", "--suite", TINY, "--task", "composite:test=20,30", "--n-train", "4", "--seeds", "3", "--dry-run"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with records of 12 cells of 0.5 s, and of 4 of 12 cells with another parameter, of 10 s."""
    jobs = planned(tmp_path, **UNEQUAL).jobs
    small, large = ([job for job in jobs if job.cell.task.params["test"] == test] for test in (20, 30))
    writer = store.Writer(tmp_path)
    for job, seconds in [*((job, 0.5) for job in small), *((job, 10.0) for job in large[:4])]:
        record = job.record_of_failure("crashed", Failure(reason="none"), seconds=seconds)
        writer.append(record.model_copy(update={"status": "ok"}))
    writer.close()
    return tmp_path


@pytest.mark.parametrize(("workers", "left"), [(1, "1:20"), (2, "0:40")])
def test_dry_run_bar_and_status_say_the_same(
    out: Path, workers: int, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = CliRunner().invoke(main, [*WORDS, "--out", str(out)]).stdout
    assert dry.splitlines()[-1].split() == ["all", "8", "0:01:20", "unknown"]
    plan = planned(out, **UNEQUAL)
    with Progress(out) as bar:
        bar.live = True  # as in a terminal
        bar.begin(plan, workers)
        processes = "1 worker process" if workers == 1 else f"{workers} worker processes"
        assert f"8 of 24 cells to run, on {processes}, about {left}\n" in capsys.readouterr().err
        states: list[Underway] = []
        with beat(out, plan.forecast, workers, states.append):
            assert soon(lambda: bool(states))
            status = CliRunner().invoke(main, ["status", str(out)]).stdout
        bar.beat(states[0])
        assert f"0/8 cells, 0:00 gone, {left} left" in capsys.readouterr().err
        bar.live, bar.due = False, 0.0  # as in a file: the last line says that all cells are done
        for n in (1, 0):
            bar.beat(states[0].model_copy(update={"left": {"dense": n}, "done": float(n)}))
        assert "8/8 cells" in capsys.readouterr().err
    assert f"8 cells without a record, about {left};" in status
