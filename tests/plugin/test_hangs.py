"""Observers that hang cost a bounded time, and no record."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from measured import TINY

from sparsebench.errors import UserError
from sparsebench.plugin import observer
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.run import show_folder

HANGS = """
import atexit
import threading
import time
from typing import ClassVar
import sparsebench

def for_ever():
    while True:
        time.sleep(1000)

class Hangs(sparsebench.Observer):
    name: ClassVar[str] = "hangs"
    at: str

    def open(self, out):
        if self.at == "open":
            for_ever()
        if self.at == "exit":
            atexit.register(for_ever)
        if self.at == "thread":
            threading.Thread(target=for_ever, daemon=False).start()

        def see(record):
            with (out / self.at).open("a") as file:
                file.write(f"{record.cell_id} {threading.get_ident()}\\n")
            if self.at == "record":
                for_ever()
        return see

@sparsebench.hookimpl
def sparsebench_observers():
    return [Hangs]
"""
RUN = ["run", "--suite", TINY, "--n-train", "4", "--seeds", "1", "--jobs", "1"]
IMPATIENT = """
import sys
from sparsebench.plugin import observer
from sparsebench.cli import run_cli
observer.PATIENCE = 1.5
run_cli()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "hangs.py").write_text(HANGS)
    return tmp_path / "hangs.py"


@pytest.fixture
def stored(make_record: Callable[..., Record], tmp_path: Path) -> Path:
    writer = store.Writer(tmp_path / "stored")
    for repetition in range(3):
        writer.append(make_record(repetition=repetition))
    writer.close()
    return tmp_path / "stored"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "says"), [("record", "is turned off"), ("exit", "cut off"), ("thread", "cut off")]
)  # fmt: skip
def test_a_run_ends_and_stores_all_records_whatever_hangs(file: Path, tmp_path: Path, at: str, says: str) -> None:
    out = tmp_path / "out"
    words = [*RUN, "--device", "cpu", "--out", str(out), "--observe", f"{file}:at={at}", "--format", "csv"]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", IMPATIENT, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 100
    assert [record.status for record in store.read(out).values()] == ["ok"] * 4
    assert "oracle" in done.stdout and (out / "leaderboard.csv").exists()
    assert len((out / at).read_text().splitlines()) == (1 if at == "record" else 4)
    assert done.stderr.count("WARNING") == 1 and says in done.stderr


def test_the_observer_that_hangs_is_named_and_the_others_go_on(
    file: Path, stored: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "PATIENCE", 0.3)
    with caplog.at_level(logging.WARNING):
        assert show_folder([f"{file}:at=record", f"{file}:at=good"], stored) == (3, ["observe:hangs"])
    seen = [line.split() for line in (stored / "good").read_text().splitlines()]
    assert [cell for cell, _ in seen] == sorted(store.read(stored))
    assert len({thread for _, thread in seen}) == 1 and seen[0][1] != str(threading.get_ident())
    (message,) = caplog.messages
    assert message.startswith("observer 'observe:hangs' failed and is turned off: TimeoutError: no answer in 0.3 s")


def test_one_that_does_not_open_stops_the_run_before_it_begins(
    file: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "PATIENCE", 0.3)
    with pytest.raises(UserError, match=r"observer 'hangs' cannot be opened: TimeoutError: no answer in 0.3 s"):
        show_folder([f"{file}:at=open"], stored)
