"""Cells on the workers of real Dask schedulers on this machine."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from measured import TINY, what_was_measured
from processes import workers_of
from running import inline, jobs_of
from sparsebench_dask import cluster as clusters
from waiting import soon

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.engines import Queue
from sparsebench.runner.environment import RunEnvironment

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_picture", "timed_once")]

distributed = pytest.importorskip("distributed")

LONG = "composite:epochs=2000"
QUIET = {"processes": True, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50, "host": "127.0.0.1"}


def records_of(
    cluster: clusters.Cluster,
    jobs: list[Job],
    out: Path,
    on_progress: Any = lambda cells, share: None,
) -> Iterator[Record]:
    return cluster.records(Queue(jobs, on_progress=on_progress), RunEnvironment(out=out, device="cpu"))


def by_cell(records: Iterator[Record]) -> dict[str, dict[str, Any]]:
    return {record.cell_id: what_was_measured(record) for record in records}


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a scheduler and two workers, each a process with a nanny that starts it again."""
    folder = tmp_path_factory.mktemp("dask")
    with distributed.LocalCluster(n_workers=2, local_directory=str(folder), **QUIET) as started:
        yield started


@pytest.fixture
def cluster(dask: Any) -> Iterator[clusters.Cluster]:
    dask.sync(dask._correct_state)
    with clusters.connect(dask.scheduler_address, "cpu") as connection:
        connection.client.wait_for_workers(2, timeout=300)
        yield connection


@pytest.mark.slow
def test_the_workers_give_what_this_process_gives(tmp_path: Path, samples: Path, cluster: clusters.Cluster) -> None:
    jobs = jobs_of(str(samples / "good.py"), n_train=(4,))
    here = by_cell(inline(jobs, Registry(), tmp_path / "here"))
    begun: list[str] = []
    there = by_cell(records_of(cluster, jobs, tmp_path / "there", on_progress=lambda cells, share: begun.extend(cells)))
    assert there == here and {record["status"] for record in here.values()} == {"ok"}
    assert set(begun) == here.keys()
    assert [path.name for path in (tmp_path / "there" / "environments").iterdir()] == [
        f"{next(iter(here.values()))['environment']}.json"
    ]


@pytest.mark.slow
def test_a_strategy_that_ends_its_process_costs_only_its_cell(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    """A strategy that ends its process costs its cell and no Dask worker."""
    before = cluster.client.run(os.getpid)
    records = list(records_of(cluster, jobs_of(str(samples / "segfaults.py"), n_train=(4,)), tmp_path))
    status = {record.label: record.status for record in records}
    assert status.pop("segfaults") == "crashed" and set(status.values()) == {"ok"}
    assert cluster.client.run(os.getpid) == before


@pytest.mark.slow
def test_a_killed_worker_costs_no_record(tmp_path: Path, cluster: clusters.Cluster) -> None:
    jobs = jobs_of(tasks=(LONG,), seeds=6)
    pids = list(cluster.client.run(os.getpid).values())
    records = []
    for record in records_of(cluster, jobs, tmp_path):
        records.append(record)
        if len(records) == 10:
            os.kill(pids[0], signal.SIGKILL)
    assert sorted(record.cell_id for record in records) == sorted(job.cell.id for job in jobs)
    assert {record.status for record in records} == {"ok"}


@pytest.mark.slow
def test_a_cell_that_loses_workers_is_tried_again_on_dask(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    """A cell with which workers are lost is tried as often as the scheduler allows."""
    noted = tmp_path / "noted"
    plugin = f"{samples / 'ends_its_machine.py'}:noted={noted}"
    records = {record.label.partition("(")[0]: record for record in records_of(
        cluster, jobs_of(plugin, n_train=(4,)), tmp_path / "out"
    )}  # fmt: skip
    bad = records.pop("ends_its_machine")
    assert bad.status == "crashed" and bad.failure is not None and "were lost" in bad.failure.reason
    assert {record.status for record in records.values()} == {"ok"}
    assert noted.read_text().count("begun") == 4, "three losses are allowed"


@pytest.mark.slow
def test_what_the_workers_run_ends_when_nobody_waits_for_it(
    tmp_path: Path, samples: Path, cluster: clusters.Cluster
) -> None:
    jobs = [job for job in jobs_of(str(samples / "sleeps.py"), n_train=(4,)) if job.label == "sleeps"]
    begun = threading.Event()
    running = records_of(cluster, jobs, tmp_path, on_progress=lambda cells, share: begun.set())

    def wait() -> None:  # a closed client may or may not raise here
        with suppress(UserError):
            next(running)

    threading.Thread(target=wait, daemon=True).start()
    assert begun.wait(300)
    assert soon(lambda: workers_of(tmp_path))
    cluster.client.close()
    assert soon(lambda: not workers_of(tmp_path))


@pytest.mark.slow
def test_the_first_interrupt_finishes_what_is_under_way(tmp_path: Path, cluster: clusters.Cluster) -> None:
    jobs, records = jobs_of(tasks=(LONG,), seeds=10), []
    queue = Queue(jobs)
    for record in cluster.records(queue, RunEnvironment(out=tmp_path, device="cpu")):
        records.append(record)
        assert len(cluster.client.futures) <= clusters.LEAST < len(jobs)
        queue.close()
    assert 0 < len(records) <= clusters.LEAST + 1, "those that the scheduler had, and no others"
    assert {record.status for record in records} == {"ok"}


@pytest.mark.slow
def test_the_command_makes_a_board_on_a_cluster(tmp_path: Path, dask: Any, samples: Path) -> None:
    words = [
        "run", "--suite", TINY, "--dask", dask.scheduler_address,
        "--n-train", "4", "--seeds", "1", "--plugin", str(samples / "raises.py"), "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1, "one of the strategies fails"
    assert "5 of 5 cells to run" in result.output and (tmp_path / "leaderboard.md").exists()
    assert Counter(r.status for r in store.read(tmp_path).values()) == {"ok": 4, "failed": 1}


def test_a_worker_of_another_version_is_refused_by_name(
    tmp_path: Path, cluster: clusters.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "__version__", "99.0")
    with pytest.raises(UserError, match=r"another version of sparsebench; got .* allowed: 99.0"):
        list(records_of(cluster, jobs_of(), tmp_path))


@pytest.mark.slow
def test_a_scheduler_that_goes_away_is_told_in_one_line(tmp_path: Path) -> None:
    with (
        distributed.LocalCluster(n_workers=1, local_directory=str(tmp_path / "dask"), **QUIET) as started,
        clusters.connect(started.scheduler_address, "cpu") as connection,
    ):
        records = records_of(connection, jobs_of(seeds=20), tmp_path)
        next(records)
        started.close()
        with pytest.raises(UserError, match="the scheduler is lost"):
            list(records)
