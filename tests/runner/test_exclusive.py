"""With --exclusive no cell runs beside another, whoever runs it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from running import inline, local

from sparsebench.cli import main
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Job, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.devices import turn

TIMED = "composite:epochs=1,test=20,pretrain_epochs=0"
SMALL = "vit:dim=16,depth=2,heads=2"
OPTIONS = ("--task", TIMED, "--model", SMALL, "--n-train", "20", "--seeds", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep these runs apart from others of this machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def jobs_of(task: str = TIMED) -> list[Job]:
    model = SMALL if task == TIMED else None
    return expand(Request(suite="quick-scratch", tasks=(task,), model=model, n_train=(20,), seeds=1), Registry())


def gaps(records: Iterable[Record]) -> list[float]:
    """Return the seconds from the end of each cell to the beginning of the next."""
    spans = sorted((datetime.fromisoformat(r.started).timestamp(), r.seconds) for r in records)
    return [after - (begun + took) for (begun, took), (after, _) in pairwise(spans)]


def run(out: Path, *options: str) -> "subprocess.Popen[str]":
    words = ["-m", "sparsebench", "run", "--suite", "quick-scratch", *OPTIONS, "--out", str(out), *options]
    return subprocess.Popen([sys.executable, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_runs_on_one_machine_take_turns(tmp_path: Path) -> None:
    runs = {out: run(tmp_path / out, "--exclusive") for out in ("a", "b")}
    for started in runs.values():
        said, _ = started.communicate(timeout=300)
        assert started.returncode == 0 and "on 1 worker processes" in said, said
    records = [record for out in runs for record in store.read(tmp_path / out).values()]
    assert len(records) == 8 and min(gaps(records)) > -0.002  # seconds are rounded
    assert {record.notes["timed"] for record in records} == {"alone on its machine"}


@pytest.mark.slow
@pytest.mark.parametrize(("waits", "timeout"), [(5.0, 600.0), (35.0, 30.0)])
def test_waiting_is_none_of_a_cells_seconds(tmp_path: Path, waits: float, timeout: float) -> None:
    jobs = jobs_of("composite:epochs=1,test=10,pretrain_epochs=0")
    records: list[Record] = []
    with turn("cpu"):
        thread = threading.Thread(
            target=lambda: records.extend(local(jobs, 1, tmp_path, timeout=timeout, exclusive=True))
        )
        thread.start()
        log = tmp_path / "logs" / "worker-0.log"
        while not log.exists():
            time.sleep(0.05)
        time.sleep(waits)
        assert records == []
        released = time.monotonic()
    thread.join(300)
    assert sum(record.seconds for record in records) <= time.monotonic() - released + 0.01
    assert [record.status for record in records] == ["ok"] * len(jobs)


def test_this_process_waits_for_its_turn_too(tmp_path: Path) -> None:
    jobs, records = jobs_of("composite:epochs=1,test=10,pretrain_epochs=0"), list[Record]()
    thread = threading.Thread(target=lambda: records.extend(inline(jobs, Registry(), tmp_path, exclusive=True)))
    with turn("cpu"):
        thread.start()
        thread.join(1.0)
        assert thread.is_alive() and records == []
    thread.join(300)
    assert len(records) == len(jobs)


def test_several_workers_at_a_time_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["run", "--suite", "quick-scratch", *OPTIONS, "--out", str(tmp_path / "x"), "--exclusive", "--jobs", "2"]
    )
    assert done.exit_code == 2
    assert "--exclusive runs one cell at a time; got --jobs 2; allowed: 0 to 1" in done.stderr
