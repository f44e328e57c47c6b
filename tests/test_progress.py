from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import soon

from sparsebench.cli import main
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner.progress import Progress, Underway, beat

SUITE = """
name = "unequal"
version = 1
title = "two parameters"
baselines = ["dense"]
seeds = 1

[budget]
keep_rate = 0.8

[[task]]
name = "composite"
model_params = {dim = 16, depth = 1, heads = 1}
params = {canvas = 16, foreground = 8, pretrain_epochs = 0, epochs = 1, test = 20}
n_train = [4]
seeds = 10

[[task]]
name = "composite"
model_params = {dim = 16, depth = 1, heads = 1}
params = {canvas = 16, foreground = 12, pretrain_epochs = 0, epochs = 1, test = 20}
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
        if job.cell.task.params["foreground"] == 8:
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
    with terminal(out) as bar:
        bar.begin(plan, workers)
        assert f"10 of 25 cells to run, on {workers} worker processes, about {left}\n" in capsys.readouterr().err
        told: list[Underway] = []
        with beat(out, plan.expected, workers, told.append):
            assert soon(lambda: bool(told))
            status = CliRunner().invoke(main, ["status", str(out)]).stdout
        bar.beat(told[0])
        assert f"0/10 cells, 00:00 gone, {left} left" in capsys.readouterr().err
    assert f"10 cells without a record, about {left};" in status


def terminal(out: Path) -> Progress:
    """Return the bar as in a terminal."""
    bar = Progress(out)
    bar.live = True
    return bar
