"""Workers are forked, end with all processes that they started, and need no main guard."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from measured import TINY
from processes import processes_in, processes_of
from waiting import soon

from sparsebench.runner import process
from sparsebench.runner.devices import variables
from sparsebench.runner.process import Server, Worker
from sparsebench.runner.process import server as shared_server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

CLINGS = """
import os, signal, sys, time

def main(line):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {"CLINGS_TO": {place!r}})
        os._exit(0)
    os.wait()
    print("begun", flush=True)
    {then}
"""
"""Starts an orphaned process in a session of its own, then prints "begun"."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with modules for workers of the server."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def server(modules: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(modules))
        patch.setattr(process, "PRELOADED", ())  # these workers compute nothing
        made = Server(variables())
        yield made
        made.close()


@pytest.fixture
def clinging(server: Server, modules: Path, tmp_path: Path) -> Callable[[str], Worker]:
    """Return a function that starts a worker, which leaves a process behind and then runs a line of code."""

    def start(name: str, then: str = "time.sleep(600)") -> Worker:
        code = CLINGS.replace("{place!r}", repr(str(tmp_path))).replace("{then}", then)
        (modules / f"{name}.py").write_text(code)
        worker = server.start(name, {}, tmp_path / f"{name}.log")
        assert soon(lambda: "begun" in (tmp_path / f"{name}.log").read_text())
        return worker

    return start


def left(tmp_path: Path) -> list[int]:
    return processes_in(f"CLINGS_TO={tmp_path}")


def test_a_worker_leaves_as_it_did_and_what_it_left_behind_is_ended(
    clinging: Callable[..., Worker], tmp_path: Path
) -> None:
    ends = {
        "sys.exit(7)": 7,
        "sys.exit()": 0,
        "os.kill(os.getpid(), 11)": -11,
        "os._exit(0)": 0,
        "signal.raise_signal(9)": -9,
    }
    for number, (then, code) in enumerate(ends.items()):
        assert clinging(f"ends{number}", then).end(300) == code
        assert left(tmp_path) == []
    staying = clinging("goes_on")
    assert soon(lambda: left(tmp_path))
    assert staying.end() == 0 and left(tmp_path) == []


WHERE = """
import os

def main(line):
    print(os.getppid(), os.getcwd(), os.environ.get("A_VARIABLE"), flush=True)
"""


def test_runs_of_a_process_share_a_server_while_their_variables_are_alike(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PRELOADED", ())
    monkeypatch.setattr(
        process, "_server", lru_cache(1)(process._server.__wrapped__)
    )  # keeps the server of other tests
    monkeypatch.syspath_prepend(str(modules))
    (modules / "where.py").write_text(WHERE)

    def run(name: str) -> list[str]:
        log = tmp_path / name
        assert shared_server().start("where", {}, log).end(300) == 0
        return log.read_text().split()

    first, folder, _ = run("first")
    assert folder == os.getcwd()
    monkeypatch.chdir(tmp_path)
    assert run("second") == [first, str(tmp_path.resolve()), "None"]
    monkeypatch.setenv("A_VARIABLE", "1")
    other, _, variable = run("third")
    assert other != first and variable == "1" and not Path("/proc", first).exists()


SCRIPT = """
import os, sparsebench
print("here", os.getpid(), flush=True)
sparsebench.run(PLUGINS, suite=TINY, n_train=[4], seeds=1, jobs=2, out=OUT)
"""


@pytest.mark.slow
def test_a_script_on_standard_input_runs_once(samples: Path, tmp_path: Path) -> None:
    """A script without a main guard on standard input runs once and leaves nothing."""
    out = tmp_path / "out"
    script = (
        SCRIPT.replace("TINY", repr(TINY))
        .replace("PLUGINS", repr([str(samples / "good.py")]))
        .replace("OUT", repr(str(out)))
    )
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("here") == 1 and processes_of(out) == []
    assert "here" not in "".join(log.read_text() for log in (out / "logs").iterdir())
