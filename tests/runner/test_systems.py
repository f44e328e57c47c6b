"""Systems that lack something: no pidfd_open, no fork, no file locks, and folders that PYTHONPATH cannot name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from measured import TINY
from running import jobs_of, local, run_without_board
from waiting import soon

from sparsebench import api
from sparsebench.errors import UserError
from sparsebench.runner import process
from sparsebench.runner.devices import search_path, variables
from sparsebench.runner.process import Server

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_picture", "timed_once")]

NO_PIDFD = "import os\ndel os.pidfd_open\n"
NO_FORK = """
import os

def fork():
    raise PermissionError(1, "Operation not permitted")

os.fork = fork
"""
NO_UNIX = """
import os, signal, socket, sys, threading
import timm, torch, torchvision  # real Windows has other files of these libraries

sys.modules["fcntl"] = sys.modules["resource"] = None
for module, names in {
    os: "fork setsid killpg pidfd_open waitid pwrite getuid geteuid sched_getaffinity",
    signal: "SIGKILL SIGHUP SIGCHLD set_wakeup_fd",
    socket: "send_fds recv_fds",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs code at the start of every Python process that this process starts."""
    monkeypatch.setattr(process, "_server", lru_cache(1)(process._server.__wrapped__))  # keeps that of other tests

    def start_with(code: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))

    return start_with


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """Return a list of servers that are closed at the end; they load no modules in advance."""
    monkeypatch.setattr(process, "PRELOADED", ())
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()


def started(tmp_path: Path, servers: list[Server], name: str, then: str) -> process.Worker:
    """Start a worker that prints "begun" and runs a line of code."""
    (tmp_path / f"{name}.py").write_text(f"import os, sys, time\ndef main(line):\n    print('begun')\n    {then}\n")
    server = servers[0] if servers else Server(variables(), path=[str(tmp_path), *search_path()])
    servers[:] = [server]
    worker = server.start(name, {}, tmp_path / f"{name}.log")
    assert soon(lambda: "begun" in (tmp_path / f"{name}.log").read_text())
    return worker


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_workers_run_without_pidfd_open(tmp_path: Path, without: Any, light: list[Server]) -> None:
    without(NO_PIDFD)
    waits = started(tmp_path, light, "waits", "time.sleep(600)")
    ends = started(tmp_path, light, "ends", "sys.exit(5)")
    forks = started(tmp_path, light, "forks", "os.fork() or time.sleep(600); os.kill(os.getpid(), 9)")
    assert (ends.end(300), forks.end(300), waits.end()) == (5, -9, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_reason_why_no_worker_starts_is_named_with_the_way_out(
    tmp_path: Path, without: Any, light: list[Server]
) -> None:
    without(NO_FORK)
    with pytest.raises(UserError, match=r"Operation not permitted.*--jobs 0"):
        list(local(jobs_of("noise", n_train=(4,)), 1, tmp_path))
    assert "Operation not permitted" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_workers_find_modules_in_a_folder_with_the_separator_of_paths(tmp_path: Path, light: list[Server]) -> None:
    folder = tmp_path / f"a{os.pathsep}b"
    folder.mkdir()
    worker = started(folder, light, "here", "sys.exit(6)")
    assert worker.end(300) == 6


def test_a_run_from_python_says_which_cells_have_no_result(
    samples: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.run(str(samples / "leaves.py"), suite=TINY, n_train=[4], seeds=1, jobs=0, out=tmp_path)
    assert "without a result: 1 (1 failed)" in caplog.text and 'rerun="failed"' in caplog.text


def test_without_unix_a_run_says_one_line(tmp_path: Path) -> None:
    """Without Unix networks get strategies and folders are read and a run says one line."""
    out = tmp_path / "out"
    run_without_board("attn_topk", suite=TINY, n_train=[4], seeds=1, out=out)
    code = NO_UNIX + (
        "import sparsebench\n"
        "model = timm.create_model('vit_tiny_patch16_224', img_size=32, num_classes=2, depth=2)\n"
        "sparse = sparsebench.apply(model, 'attn_topk', macs=0.6)\n"
        "assert sparse(torch.zeros(1, 3, 32, 32)).shape == (1, 2)\n"
        f"assert len(sparsebench.load_records({str(out)!r})) == 5\n"
        f"assert len(sparsebench.leaderboard({str(out)!r})) == 5\n"
        "from sparsebench.cli import main\n"
        f"assert main(['leaderboard', {str(out)!r}], standalone_mode=False) is None\n"
        f"main(['run', 'noise', '--suite', {TINY!r}, '--out', {str(tmp_path / 'new')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=variables(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: worker processes need Linux or macOS") and "--jobs 0" in line


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_cells_run_where_each_worker_is_a_new_process(
    tmp_path: Path, without: Any, light: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, which has no safe fork."""
    without("from sparsebench.runner import process\nprocess.FORKS = False\n")
    monkeypatch.setattr(process, "FORKS", False)
    jobs = jobs_of("noise", n_train=(4,))[:2]
    records = list(local(jobs, 1, tmp_path))
    assert [record.status for record in records] == ["ok"] * 2
    codes = []
    for number, line in enumerate(("sys.exit(5)", "os.kill(os.getpid(), 15)", "time.sleep(600)")):
        light.clear()
        codes.append(started(tmp_path, light, f"worker{number}", line).end(300 if number < 2 else 0))
    assert codes == [5, -15, 0]
