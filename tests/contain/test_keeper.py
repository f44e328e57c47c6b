import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import soon

from sparsebench.contain import keeper

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

CLINGS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
open(sys.argv[1], "w").close()
"""
"""Starts a process that is in a session of its own, has lost its parent and ignores SIGTERM; then says so."""


class Kept:
    """A command with its keeper."""

    def __init__(self, *command: str):
        lifeline, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(lifeline), *command],
            pass_fds=[lifeline], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        os.close(lifeline)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        if self.lifeline >= 0:
            os.close(self.lifeline)


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    started: list[Kept] = []
    yield started
    for one in started:
        one.close()


def start(kept: list[Kept], *command: str) -> Kept:
    kept.append(Kept(*command))
    return kept[-1]


def python(kept: list[Kept], code: str, *arguments: str) -> Kept:
    return start(kept, sys.executable, "-c", code, *arguments)


def runs(mark: str) -> bool:
    """Say whether a process runs whose command has the mark in it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", -signal.SIGSEGV), ("kill -9 $$", -9)]
)
def test_a_keeper_leaves_as_its_process_did(kept: list[Kept], command: str, code: int) -> None:
    assert start(kept, "/bin/sh", "-c", command).process.wait(300) == code


def test_a_process_has_the_input_and_the_output_of_its_keeper(kept: list[Kept]) -> None:
    output, _ = start(kept, "/bin/cat").process.communicate(b"a line\n", timeout=300)
    assert output == b"a line\n"


@LINUX
def test_what_a_process_leaves_behind_is_ended_after_it(kept: list[Kept], tmp_path: Path) -> None:
    assert python(kept, CLINGS, str(tmp_path / "begun")).process.wait(300) == 0
    assert (tmp_path / "begun").exists() and not runs(str(tmp_path))


@LINUX
def test_closing_the_lifeline_ends_everything(kept: list[Kept], tmp_path: Path) -> None:
    one = python(kept, CLINGS + "time.sleep(600)", str(tmp_path / "begun"))
    assert soon((tmp_path / "begun").exists)
    assert soon(lambda: len(keeper.descendants(one.process.pid)) == 2)
    os.close(one.lifeline)
    one.lifeline = -1
    one.process.wait(300)
    assert not runs(str(tmp_path))


@LINUX
def test_a_keeper_whose_starter_is_killed_ends_everything(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
lifeline, mine = os.pipe()
command = [sys.executable, "-c", {CLINGS + "time.sleep(600)"!r}, {str(tmp_path / "begun")!r}]
subprocess.Popen([sys.executable, "-I", "-S", {keeper.__file__!r}, str(lifeline), *command], pass_fds=[lifeline])
if os.fork() == 0:  # a copy of the starter keeps the lifeline open
    os.execl("/bin/sleep", "sleep", "0")
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code])
    assert soon((tmp_path / "begun").exists)
    starter.kill()
    starter.wait()
    assert soon(lambda: not runs(str(tmp_path)))


@LINUX
def test_a_process_that_asks_for_it_ends_with_its_keeper(kept: list[Kept], tmp_path: Path) -> None:
    code = """
import sys, time
from sparsebench.contain.keeper import end_with_parent
end_with_parent()
open(sys.argv[1], "w").close()
time.sleep(600)
"""
    one = python(kept, code, str(tmp_path / "begun"))
    assert soon((tmp_path / "begun").exists)
    one.process.kill()
    assert soon(lambda: not runs(str(tmp_path)))


@LINUX
def test_descendants_are_the_living_ones_at_any_depth() -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 600 & true & sh -c 'sleep 600; true'; true"], start_new_session=True
    )
    try:
        assert soon(lambda: len(keeper.descendants(shell.pid)) == 3)
        assert shell.pid in keeper.descendants(os.getpid())
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    assert keeper.descendants(shell.pid) == []
