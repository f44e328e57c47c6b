"""Many writers of one folder, some of which are killed, and full disks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsebench.records import store
from sparsebench.records.record import Record

WRITE = """
import os, sys
from pathlib import Path
from sparsebench.records import store
template, out, first, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
record, writer = store.parse(template.read_bytes()), store.Writer(out)
for k in range(first, first + number):
    cell = record.cell.model_copy(update={"repetition": k})
    writer.append(record.model_copy(update={"cell": cell, "cell_id": cell.id}))
    os.write(1, cell.id.encode() + b"\\n")
"""


def test_what_writers_that_were_killed_acknowledged_is_there(
    tmp_path: Path, make_record: Callable[..., Record]
) -> None:
    writers, victims, number, endless = 8, 3, 200, 10**6
    (tmp_path / "one.json").write_text(make_record().model_dump_json())
    logs = [tmp_path / f"{k}.log" for k in range(writers)]
    processes = []
    for k, log in enumerate(logs):
        # A victim never ends by itself: a test that is slow to kill it must find it at work.
        words = [tmp_path / "one.json", tmp_path, k * endless, endless if k < victims else number]
        with log.open("wb") as file:
            processes.append(subprocess.Popen([sys.executable, "-c", WRITE, *map(str, words)], stdout=file))
    for victim in range(victims):
        while logs[victim].stat().st_size < 17 * 40 * (victim + 1) and processes[victim].poll() is None:
            time.sleep(0.005)
        processes[victim].send_signal(signal.SIGKILL)
    ends = [process.wait(300) for process in processes]
    assert ends == [-signal.SIGKILL] * victims + [0] * (writers - victims)
    acknowledged = {line for log in logs for line in log.read_text().split("\n")[:-1]}
    assert len(acknowledged) >= (writers - victims) * number + victims * 40
    there = set(store.read(tmp_path))
    assert acknowledged <= there and len(there - acknowledged) <= victims
    assert len(store.segments(tmp_path)) == writers


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of its own, of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("file systems may not be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a tmpfs")
def test_a_disk_that_is_full_loses_nothing_and_what_failed_goes_on_when_there_is_room(
    small_disk: Path, make_record: Callable[..., Record]
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(30_000))
    writer, acknowledged, refused = store.Writer(small_disk), [], None
    for k in range(100):
        try:
            writer.append(make_record(repetition=k))
        except store.UserError as error:
            refused = str(error)
            break
        acknowledged.append(make_record(repetition=k).cell_id)
    assert refused is not None and acknowledged
    assert list(store.read(small_disk)) == acknowledged
    ballast.unlink()
    writer.append(make_record(repetition=1000))
    writer.close()
    assert set(store.read(small_disk)) == {*acknowledged, make_record(repetition=1000).cell_id}
    assert "torn" not in refused and os.fspath(small_disk) in refused
