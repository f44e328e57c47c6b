import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsebench import progress
from sparsebench.cli import main
from sparsebench.engine import underway
from sparsebench.planning import planner
from sparsebench.planning.remaining import Estimate
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.progress import Progress, time_of
from sparsebench.records import files, store
from sparsebench.records.record import Failure, Record

SUITE = """
name = "unequal"
version = 1
title = "two parameters"
baselines = ["dense"]
seeds = 1

[budget]
keep_rate = 0.8

[[task]]
name = "theory"
params = {steps = 40, test = 20, tokens = 20}
n_train = [4]
seeds = 10

[[task]]
name = "theory"
params = {steps = 40, test = 20, tokens = 30}
n_train = [4]
seeds = 15
"""


@pytest.fixture
def suite(tmp_path: Path) -> str:
    (path := tmp_path / "unequal.toml").write_text(SUITE)
    return str(path)


def plan_of(suite: str, out: Path) -> planner.Plan:
    return planner.plan(Request(suite=suite), planner.Files(), Registry(), out, "missing")


def done(plan: planner.Plan, at: int, seconds: float) -> Record:
    record = plan.jobs[at].record_of_failure("crashed", Failure(reason="none"), seconds=seconds)
    return record.model_copy(update={"status": "ok"})


@pytest.fixture
def out(tmp_path: Path, suite: str) -> Path:
    """Return a folder in which 10 cells took half a second, and 5 of 15 with another parameter 10 seconds."""
    plan, out = plan_of(suite, tmp_path / "out"), tmp_path / "out"
    writer, short, long = store.Writer(out), 0, 0
    for at, job in enumerate(plan.jobs):
        if job.cell.task.params["tokens"] == 20:
            writer.append(done(plan, at, 0.5))
            short += 1
        elif long < 5:
            writer.append(done(plan, at, 10.0))
            long += 1
    writer.close()
    assert (short, long) == (10, 5)
    return out


@pytest.mark.parametrize(("workers", "left"), [(1, "1:40"), (2, "0:50")])
def test_dry_run_bar_and_status_say_the_same(
    out: Path, suite: str, workers: int, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = CliRunner().invoke(main, ["run", "--suite", suite, "--out", str(out), "--dry-run"]).stdout
    assert dry.splitlines()[-1].split() == ["all", "10", f"{100 / 3600:.2g}", "unknown"]
    plan = plan_of(suite, out)
    with terminal(out) as bar, underway.Beat(out, plan.todo, workers, plan.expected):
        bar.begin(plan, workers)
        assert f"10 of 25 cells to run, on {workers} worker processes, about {left}\n" in capsys.readouterr().err
        wait_for(underway.path_of(out))
        bar.tick()
        assert f"0/10 cells, 00:00 gone, {left} left" in capsys.readouterr().err
        status = CliRunner().invoke(main, ["status", str(out)]).stdout
    assert f"10 cells without a record, about {left};" in status


def terminal(out: Path) -> Progress:
    """Return the bar as in a terminal."""
    bar = Progress(out)
    bar.live = True
    return bar


def wait_for(path: Path) -> None:
    end = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_bar_follows_what_the_run_says_of_itself(out: Path, suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(suite, out)
    with terminal(out) as bar:
        bar.begin(plan, 1)
        for seconds, over, text in (
            (90.0, False, "1:30 left"),
            (89.2, True, "over 1:30 left"),
            (None, True, "unknown"),
        ):
            write(out, Estimate(seconds, over))
            bar.tick()
            assert text in capsys.readouterr().err
        write(out, Estimate(7.0, over=False))
        for at in range(10):
            bar.tick()
            bar.step(done(plan, at, 1.0))
        assert bar.bar.postfix == "0:00 left, dense on theory done"
        bar.tick()
        assert bar.bar.postfix == "0:00 left, dense on theory done"


def write(out: Path, estimate: Estimate, done: float = 0.0) -> None:
    path = underway.path_of(out)
    run = underway.Underway(host="h", pid=1, workers=1, updated=0.0, left=(), running=(), done=done, estimate=estimate)
    files.write_whole(path, run.model_dump_json().encode())


def test_the_bar_moves_between_records(
    out: Path, suite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.TICK <= 2 and underway.EVERY <= 2
    monkeypatch.setattr(progress, "TICK", 0.01)
    with terminal(out) as bar:
        bar.begin(plan_of(suite, out), 1)
        assert bar.thread is not None
        write(out, Estimate(61.0, over=False), done=4.5)
        end, seen = time.monotonic() + 300, ""
        while "1:01 left" not in seen or " 45%|" not in seen:
            assert time.monotonic() < end
            seen += capsys.readouterr().err
            time.sleep(0.01)
    assert not bar.thread.is_alive()


def test_in_a_file_the_bar_is_a_line_now_and_then(
    out: Path, suite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress.LINE >= 60
    plan = plan_of(suite, out)
    with Progress(out) as bar:
        assert not bar.live
        bar.begin(plan, 1)
        for at in range(len(plan.todo)):
            bar.step(done(plan, at, 1.0))
    said = capsys.readouterr().err
    assert said.splitlines()[1:] == ["10/10 cells, 0:00 left, dense on theory done"] and "\r" not in said
    monkeypatch.setattr(progress, "LINE", 0.01)
    with Progress(out) as bar:
        bar.begin(plan, 1)
        write(out, Estimate(61.0, over=False))
        end, said = time.monotonic() + 300, ""
        while "0/10 cells, 1:01 left\n" not in said:
            assert time.monotonic() < end
            said += capsys.readouterr().err
            time.sleep(0.01)


def test_a_folder_without_records_has_no_estimate_yet(
    tmp_path: Path, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(suite, tmp_path / "new")
    with terminal(tmp_path / "new") as bar:
        bar.begin(plan, 2)
        bar.tick()
    said = capsys.readouterr().err
    assert "25 of 25 cells to run, on 2 worker processes\n" in said and "unknown time left" in said


def test_no_time_that_is_left_is_shown_as_none() -> None:
    assert time_of(Estimate(0.001, over=False), "about ") == "about 0:01"
    assert time_of(Estimate(59.5, over=True), "about ") == "over 1:00"
    assert time_of(Estimate(None, over=True), "about ") == "unknown time"
