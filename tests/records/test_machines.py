"""Several machines write to one folder, on a file system whose locks do nothing: no stored record is lost."""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flats import filled

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.records import store, table
from sparsebench.records.record import Record

Make = Callable[..., Record]
HOSTS = ("node-1", "node2")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lock", "unlock"):
        monkeypatch.setattr(files, name, lambda file: None)


class Machines:
    """Processes on several machines, which are played one after the other in this process."""

    def __init__(self, out: Path, make: Make, patch: pytest.MonkeyPatch):
        self.out, self.make, self.patch = out, make, patch
        self.writers: dict[tuple[str, int], store.Writer] = {}
        self.stored: list[str] = []
        patch.setattr(store, "process_exists", lambda pid: (socket.gethostname(), pid) in self.writers)

    def act_as(self, host: str, pid: int) -> None:
        self.patch.setattr(socket, "gethostname", lambda: host)
        self.patch.setattr(os, "getpid", lambda: pid)

    def write(self, host: str, pid: int) -> None:
        """Let a process store a record. A process that does not exist begins."""
        self.act_as(host, pid)
        writer = self.writers.setdefault((host, pid), store.Writer(self.out))
        record = self.make(repetition=len(self.stored))
        writer.append(record)
        self.stored.append(record.cell_id)

    def kill(self, host: str, pid: int) -> None:
        """End a process without any last action of it."""
        if (writer := self.writers.pop((host, pid), None)) is not None and writer._file is not None:
            os.close(writer._file)
            writer._file = None

    def seal(self, host: str, pid: int) -> None:
        """Let a process end its writing and seal the folder, as at the end of a run."""
        self.act_as(host, pid)
        if (host, pid) in self.writers:
            self.writers.pop((host, pid)).close()
        store.seal(self.out)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_events_loses_a_stored_record(
    seed: int, tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch, no_locks: None
) -> None:
    """While a process seals, the others write: before the Parquet file is written, after, and before the removal."""
    rng, machines = random.Random(seed), Machines(tmp_path, make_record, monkeypatch)
    processes = [(host, pid) for host in HOSTS for pid in (10, 11)]

    def meanwhile(sealing: tuple[str, int]) -> None:
        if rng.random() < 0.7:
            machines.write(*rng.choice([process for process in processes if process != sealing]))
        machines.act_as(*sealing)

    def around(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            sealing = socket.gethostname(), os.getpid()
            meanwhile(sealing)
            result = function(*args, **options)
            meanwhile(sealing)
            return result

        return call

    for _ in range(25):
        process = rng.choice(processes)
        event = rng.choice(["write", "write", "write", "kill", "seal"])
        with monkeypatch.context() as patch:
            if event == "seal":
                patch.setattr(table, "write", around(table.write))
                patch.setattr(Path, "unlink", around(Path.unlink))
            getattr(machines, event)(*process)
    assert set(store.read(tmp_path)) == set(machines.stored)


@pytest.mark.parametrize("quiet", [0.0, 8 * 24 * 3600.0])
def test_a_quiet_segment_of_another_machine_is_sealed(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch, quiet: float
) -> None:
    """The segment of another machine is read by all and sealed once it was quiet for long."""
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "far-away")
        filled(tmp_path, make_record())
    (segment,) = store.segments(tmp_path)
    os.utime(segment, (time.time() - quiet,) * 2)
    filled(tmp_path, make_record(repetition=1))
    store.seal(tmp_path)
    assert len(store.read(tmp_path)) == 2 and len(store.segments(tmp_path)) == int(not quiet)
    assert store.merge([tmp_path], tmp_path / "merged") == 2


def test_a_segment_that_another_run_sealed_costs_no_record(tmp_path: Path, make_record: Make) -> None:
    writer = store.Writer(tmp_path)
    for repetition in range(3):
        writer.append(make_record(repetition=repetition))
        (segment,) = store.segments(tmp_path)
        sealed = tmp_path / "records" / segment.with_suffix(".parquet").name
        table.write(sealed, table.join(store._segment(segment)[0]), {})
        segment.unlink()
    writer.append(make_record(repetition=3))
    writer.close()
    assert len(store.read(tmp_path)) == 4
    (segment,) = store.segments(tmp_path)
    segment.unlink()
    writer.append(make_record(repetition=4))
    store.segments(tmp_path)[0].unlink()
    with pytest.raises(UserError, match=r"was removed.*run the same command again") as caught:
        writer.append(make_record(repetition=5))
    assert "safe" not in str(caught.value)


def _host(out: Path, name: str, seed: int, acknowledged: int, template: Record) -> None:
    """Be a machine: store records and seal, at random times, and tell which records are stored."""
    rng = random.Random(seed)

    def slow(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(rng.random() * 0.02)
            return function(*args, **options)

        return call

    socket.gethostname = lambda: name
    files.fcntl.flock = files.fcntl.lockf = lambda *args: None  # type: ignore[assignment]
    os.unlink, Path.unlink = slow(os.unlink), slow(Path.unlink)  # type: ignore[method-assign]
    table.write = slow(table.write)
    for run in range(4):
        store.seal(out)
        writer = store.Writer(out)
        for number in range(rng.randrange(1, 6)):
            cell = template.cell.model_copy(update={"repetition": 10_000 * seed + 100 * run + number})
            writer.append(template.model_copy(update={"cell": cell, "cell_id": cell.id}))
            os.write(acknowledged, cell.id.encode() + b"\n")
            time.sleep(rng.random() * 0.01)
        writer.close()
        store.seal(out)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_machines_whose_processes_are_killed_lose_no_stored_record(
    first: int, tmp_path: Path, make_record: Make
) -> None:
    import pyarrow.parquet  # noqa: F401  imported once, for all forks

    for interleaving in range(first, first + 20):
        rng, out = random.Random(interleaving), tmp_path / str(interleaving)
        with (tmp_path / f"{interleaving}.log").open("w+b") as log:
            running, ends = dict[str, int](), list[int]()
            for number in range(6):  # two at a time, one on each machine; a killed or ended one is followed by another
                host = HOSTS[number % 2]
                if (before := running.pop(host, None)) is not None:
                    ends.append(_kill_or_wait(before, rng))
                if (pid := os.fork()) == 0:
                    try:
                        _host(out, host, 6 * interleaving + number, os.dup(log.fileno()), make_record())
                        os._exit(0)
                    finally:
                        os._exit(1)
                running[host] = pid
            ends += [_kill_or_wait(pid, rng) for pid in running.values()]
            assert set(ends) <= {0, -signal.SIGKILL}
            log.seek(0)
            stored = {line.decode() for line in log.read().split(b"\n")[:-1]}
        assert stored <= set(store.read(out)), interleaving


def _kill_or_wait(pid: int, rng: random.Random) -> int:
    """Kill a process after a random time, or let it end; return its exit code."""
    if rng.random() < 0.6:
        time.sleep(rng.random() * 0.4)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
