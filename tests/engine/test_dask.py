"""Cells on the workers of real Dask schedulers on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from processes import processes_of
from sparsebench_dask import cluster as clusters
from waiting import soon

from sparsebench import engine
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.planning.expand import expand
from sparsebench.planning.job import Job
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record

distributed = pytest.importorskip("distributed")

THEORY = "theory:steps=40,test=20,tokens=20"
LONG = "theory:steps=2000,test=20,tokens=20,lr=1e-9"
QUIET = {"processes": True, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50, "host": "127.0.0.1"}


def theory_jobs(*plugins: str, task: str = THEORY, **options: Any) -> list[Job]:
    return expand(
        Request(plugins=plugins, tasks=(task,), **{"n_train": (4, 8), "seeds": 1, "suite": "quick-scratch"} | options),
        Registry(),
    )


def records_of(
    cluster: clusters.Cluster,
    jobs: list[Job],
    out: Path,
    limits: engine.Limits | None = None,
    stop: engine.Stop | None = None,
    on_begin: Any = lambda cells: None,
) -> Iterator[Record]:
    setting = engine.Setting(out=out, device="cpu", limits=limits or engine.Limits())
    return cluster.records(jobs, setting, stop or engine.Stop(), on_begin)


def what_was_measured(records: Iterator[Record]) -> dict[str, dict[str, Any]]:
    return {record.cell_id: record.model_dump(exclude={"started", "seconds", "memory"}) for record in records}


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a scheduler and two workers, each a process with a nanny that starts it again."""
    folder = tmp_path_factory.mktemp("dask")
    with distributed.LocalCluster(n_workers=2, local_directory=str(folder), **QUIET) as started:
        yield started


@pytest.fixture
def cluster(dask: Any) -> Iterator[clusters.Cluster]:
    dask.sync(dask._correct_state)
    with clusters.connect(dask.scheduler_address, None, None, "cpu") as connection:
        connection.client.wait_for_workers(2, timeout=300)
        yield connection


@pytest.mark.slow
def test_the_workers_give_what_this_process_gives(tmp_path: Path, samples: Path, cluster: clusters.Cluster) -> None:
    jobs = theory_jobs(str(samples / "good.py"), n_train=(4,))
    here = what_was_measured(engine.inline(jobs, Registry(), tmp_path / "here", "cpu", {}))
    begun: list[str] = []
    there = what_was_measured(records_of(cluster, jobs, tmp_path / "there", on_begin=begun.extend))
    assert there == here and {record["status"] for record in here.values()} == {"ok"}
    assert soon(lambda: set(begun) <= here.keys() and len(begun) > 0)
    assert [path.name for path in (tmp_path / "there" / "environments").iterdir()] == [
        f"{next(iter(here.values()))['environment']}.json"
    ]
    assert not list((tmp_path / "there").glob(".run-*"))


@pytest.mark.slow
def test_a_strategy_that_ends_its_process_costs_its_cell_and_no_dask_worker(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    before = cluster.client.run(os.getpid)
    found = list(records_of(cluster, theory_jobs(str(samples / "segfaults.py"), n_train=(4,)), tmp_path))
    status = {record.label: record.status for record in found}
    assert status.pop("segfaults") == "crashed" and set(status.values()) == {"ok"}
    assert cluster.client.run(os.getpid) == before


@pytest.mark.slow
def test_limits_hold_on_the_workers(tmp_path: Path, samples: Path, cluster: clusters.Cluster) -> None:
    (job,) = (j for j in theory_jobs(str(samples / "sleeps.py"), n_train=(4,)) if j.label == "sleeps")
    (record,) = records_of(cluster, [job], tmp_path, limits=engine.Limits(timeout=3.0))
    assert record.status == "timeout"


@pytest.mark.slow
def test_a_killed_worker_costs_no_record(tmp_path: Path, cluster: clusters.Cluster) -> None:
    jobs = theory_jobs(task=LONG, seeds=6)
    pids = list(cluster.client.run(os.getpid).values())
    found = []
    for record in records_of(cluster, jobs, tmp_path):
        found.append(record)
        if len(found) == 10:
            os.kill(pids[0], signal.SIGKILL)
    assert sorted(record.cell_id for record in found) == sorted(job.cell.id for job in jobs)
    assert {record.status for record in found} == {"ok"}


@pytest.mark.slow
def test_a_cell_with_which_workers_are_lost_is_tried_three_times(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    noted = tmp_path / "noted"
    plugin = f"{samples / 'ends_its_machine.py'}:noted={noted}"
    found = {record.label.partition("(")[0]: record for record in records_of(
        cluster, theory_jobs(plugin, n_train=(4,)), tmp_path / "out"
    )}  # fmt: skip
    bad = found.pop("ends_its_machine")
    assert bad.status == "crashed" and bad.failure is not None and "3 workers" in bad.failure.reason
    assert {record.status for record in found.values()} == {"ok"}
    assert 3 <= noted.read_text().count("begun") <= 4, "this scheduler gives it to a fourth, where it is ended"


@pytest.mark.slow
def test_what_the_workers_run_ends_when_nobody_waits_for_it(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    jobs = [job for job in theory_jobs(str(samples / "sleeps.py"), n_train=(4,)) if job.label == "sleeps"]
    begun = threading.Event()
    running = records_of(cluster, jobs, tmp_path, on_begin=lambda ids: begun.set())

    def wait() -> None:  # whether a client that is closed tells who waits for it is no matter here
        with suppress(UserError):
            next(running)

    threading.Thread(target=wait, daemon=True).start()
    assert begun.wait(300)
    assert processes_of(tmp_path, b"sparsebench.engine.worker")
    cluster.client.close()
    assert soon(lambda: not processes_of(tmp_path, b"sparsebench.engine.worker"))


@pytest.mark.slow
def test_cells_that_start_from_others_find_their_weights(tmp_path: Path, cluster: clusters.Cluster) -> None:
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    jobs = expand(
        Request(suite="quick-scratch", tasks=(task,), model="vit:dim=16,depth=2,heads=2", n_train=(20,), seeds=1),
        Registry(),
    )
    assert {record.status for record in records_of(cluster, jobs[::-1], tmp_path)} == {"ok"}


@pytest.mark.slow
def test_the_first_interrupt_finishes_what_is_under_way(tmp_path: Path, cluster: clusters.Cluster) -> None:
    stop, jobs, found = engine.Stop(), theory_jobs(task=LONG, seeds=10), []
    for record in records_of(cluster, jobs, tmp_path, stop=stop):
        found.append(record)
        assert len(cluster.client.futures) <= clusters.LEAST < len(jobs)
        stop.ask()
    assert 0 < len(found) < 6, "each worker was at one, and may have begun the next"
    assert {record.status for record in found} == {"ok"}


@pytest.mark.slow
def test_the_command_makes_a_board_on_a_cluster(tmp_path: Path, dask: Any, samples: Path) -> None:
    words = [
        "run", "--suite", "quick-scratch", "--engine", "dask", "--address", dask.scheduler_address, "--task", THEORY,
        "--n-train", "4", "--seeds", "1", "--plugin", str(samples / "raises.py"), "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1, "one of the strategies fails"
    assert "5 of 5 cells to run" in result.output and (tmp_path / "leaderboard.md").exists()
    assert Counter(r.status for r in store.read(tmp_path).values()) == {"ok": 4, "failed": 1}


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGKILL,)], ids=["interrupts", "kill"])
def test_what_the_workers_run_ends_with_a_command_that_is_ended(
    tmp_path: Path, dask: Any, samples: Path, signals: tuple[signal.Signals, ...]
) -> None:
    command = [
        sys.executable, "-m", "sparsebench", "run", "--suite", "quick-scratch", "--engine", "dask", "--address",
        dask.scheduler_address, "--task", THEORY, "--n-train", "4", "--seeds", "1", "--plugin",
        str(samples / "sleeps.py"), "--out", str(tmp_path),
    ]  # fmt: skip
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert soon(lambda: any(b"asleep" in log.read_bytes() for log in tmp_path.glob("logs/*")))
    for number in signals:
        run.send_signal(number)
        time.sleep(0.5)
    _, said = run.communicate(timeout=300)
    assert run.returncode == (130 if len(signals) == 2 else -9)
    assert len(signals) == 1 or ("the same command goes on" in said and "Traceback" not in said)
    assert soon(lambda: not processes_of(tmp_path, b"sparsebench.engine.worker"))


def test_a_worker_of_another_version_is_refused_by_name(
    tmp_path: Path, cluster: clusters.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "__version__", "99.0")
    with pytest.raises(UserError, match=r"worker tcp://127.0.0.1:\d+ on .*: another sparsebench; got .* allowed: 99.0"):
        list(records_of(cluster, theory_jobs(), tmp_path))


@pytest.mark.slow
def test_a_scheduler_that_goes_away_is_told_in_one_line(tmp_path: Path) -> None:
    with (
        distributed.LocalCluster(n_workers=1, local_directory=str(tmp_path / "dask"), **QUIET) as started,
        clusters.connect(started.scheduler_address, None, None, "cpu") as connection,
    ):
        records = records_of(connection, theory_jobs(seeds=20), tmp_path)
        next(records)
        started.close()
        with pytest.raises(UserError, match="the scheduler is lost"):
            list(records)


def test_a_scheduler_that_is_not_there_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask itself waits for half a minute."""
    assert clusters.CONNECT <= 5
    monkeypatch.setattr(clusters, "CONNECT", 0.5)
    start = time.monotonic()
    with (
        pytest.raises(UserError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"),
        clusters.connect("tcp://127.0.0.1:9", None, None, "cpu"),
    ):
        pass
    assert time.monotonic() - start < 25


def test_a_clock_that_is_set_back_makes_no_cell_last_less_than_nothing() -> None:
    (job, *_) = theory_jobs(n_train=(4,))
    run = object.__new__(clusters._Run)
    run.lost = Counter({job.cell.id: clusters.TRIES - 1})
    begun = datetime.now(UTC) + timedelta(hours=1), time.monotonic() - 2
    (record,) = run._after_a_loss([job], [begun])
    assert record.status == "crashed" and 2 <= record.seconds < 60
