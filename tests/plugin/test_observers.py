"""Observers: the records that they receive, and observers that raise, hang or are invalid."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import call
from measured import TINY
from plugin_files import write_distribution
from samples import SAMPLES

import sparsebench
from sparsebench.errors import UserError
from sparsebench.plugin import observer
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.run import show_folder

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

Make = Callable[..., Record]
OWN = """
from typing import ClassVar
import sparsebench

class Own(sparsebench.Observer):
    name: ClassVar[str] = "own"
    file: str = "seen"
    poison: str = ""

    def open(self, out):
        def see(record):
            print("an observer's own words")
            with (out / self.file).open("a") as file:
                file.write(record.cell_id + "\\n")
            if self.poison:
                raise {"exit": SystemExit, "error": RuntimeError}[self.poison]("no more")
        return see

@sparsebench.hookimpl
def sparsebench_observers():
    return [Own]
"""
BARE = """
from pathlib import Path
import sparsebench

@sparsebench.hookimpl
def sparsebench_record_finished(record):
    with Path(__file__).with_name("bare_seen").open("a") as file:
        file.write(record.cell_id + "\\n")
"""
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
IMPATIENT = """
import sys
from sparsebench.plugin import observer
from sparsebench.cli import run_cli
observer.PATIENCE = 1.5
run_cli()
"""
RUN = ["--suite", TINY, "--n-train", "4", "--seeds", "1", "--device", "cpu"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    (tmp_path / "hangs.py").write_text(HANGS)
    return tmp_path / "hangs.py"


@pytest.fixture
def stored(make_record: Make, tmp_path: Path) -> Path:
    """Return a folder with three records."""
    writer = store.Writer(tmp_path / "stored")
    for repetition in range(3):
        writer.append(make_record(repetition=repetition))
    writer.close()
    return tmp_path / "stored"


@pytest.mark.parametrize("jobs", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_tells_each_record_once_in_the_process_that_stores_it(own: Path, tmp_path: Path, jobs: int) -> None:
    out = tmp_path / "out"
    done = call("run", *RUN, "--jobs", jobs, "--out", out, "--observe", own, "--observe", own, "--format", "csv")
    assert done.exit_code == 0 and "an observer's own words" not in done.stdout, done.output
    seen = (out / "seen").read_text().split()
    assert sorted(seen) == sorted(store.read(out)) and len(seen) == 4
    assert call("run", *RUN, "--jobs", jobs, "--out", out, "--observe", own).exit_code == 0
    assert (out / "seen").read_text().split() == seen


def test_an_observer_of_a_plugin_file_is_turned_on_by_its_name_only(own: Path, tmp_path: Path) -> None:
    request: dict[str, Any] = {"suite": TINY, "n_train": [4], "seeds": 1, "jobs": 0, "device": "cpu"}
    sparsebench.run([str(own)], out=tmp_path / "a", **request)
    assert not (tmp_path / "a" / "seen").exists()
    sparsebench.run([str(own)], out=tmp_path / "b", observe="own", **request)
    assert len((tmp_path / "b" / "seen").read_text().split()) == 4


@pytest.mark.parametrize("poison", ["exit", "error"])
def test_an_observer_that_raises_is_named_once_and_the_others_go_on(
    own: Path, stored: Path, poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert show_folder([f"{own}:poison={poison},file=bad", f"{own}:file=good"], stored) == (3, ["observe:own"])
    assert len((stored / "bad").read_text().split()) == 1 and len((stored / "good").read_text().split()) == 3
    (message,) = caplog.messages
    assert message.startswith("observer 'observe:own' failed and is turned off:") and "no more" in message


def test_what_a_folder_has_is_told_by_a_command(own: Path, stored: Path) -> None:
    done = call("observe", stored, own)
    assert done.exit_code == 0 and done.stdout == "" and done.stderr.endswith("\n3 records\n")
    assert (stored / "seen").read_text().split() == sorted(store.read(stored))
    assert call("observe", stored, f"{own}:poison=error").exit_code == 1
    assert "no records" in call("observe", stored / "nowhere", own).stderr


def test_a_file_with_the_hook_alone_is_an_observer(tmp_path: Path, stored: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    assert show_folder([str(tmp_path / "bare.py")], stored) == (3, [])
    assert len((tmp_path / "bare_seen").read_text().split()) == 3
    with pytest.raises(UserError, match="has no parameters"):
        show_folder([f"{tmp_path}/bare.py:a=1"], stored)


def test_an_installed_observer_has_two_names(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed observer is found by the name of its entry point and by its own."""
    entries = {"bundle": "stranger_own", "bare": "stranger_bare", "broken": "stranger_broken"}
    site = write_distribution(
        tmp_path / "site", entries, stranger_own=OWN, stranger_bare=BARE, stranger_broken="1 / 0\n"
    )
    monkeypatch.syspath_prepend(site)
    assert show_folder(["own", "bare"], stored) == (3, [])
    assert len((stored / "seen").read_text().split()) == len((site / "bare_seen").read_text().split()) == 3
    with pytest.raises(UserError, match="does not load: ZeroDivisionError"):
        show_folder(["broken"], stored)
    for name in ("own", "bare"):
        sys.modules.pop(f"stranger_{name}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensorbord", "did you mean 'tensorboard'"), ("attn_topk", "unknown observer"), ("", "a name is missing"),
        ("nowhere.py", "does not exist"), ("tensorboard:dri=x", "did you mean 'dir'"), ("own.py:file=a,b", "one value"),
        ("x" * 10_000, "unknown observer"), ("fails.py", "py: ZeroDivisionError"), ("opens.py", "RuntimeError: shut"),
        ("returns.py", "must return a function"), (str(SAMPLES / "good.py"), "good.py brings no observer; write spar"),
        ("tensorboard:dir=FILE/x", "cannot write to"),
        ("mlflow:uri=FILE/x", "cannot write to"), ("tensorboard:dir=" + "y" * 10_000, "cannot write to"),
        ("tensorboard:dir=a\0b", "cannot write to"), ("mlflow:uri=nonsense://x", "cannot be opened"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_anything_is_run(
    own: Path, tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for library in ("tensorboard", "mlflow"):
        if text.startswith(f"{library}:"):
            pytest.importorskip(library, reason=f"needs the extra: pip install 'sparsebench[{library}]'")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    (tmp_path / "opens.py").write_text(
        OWN.replace("        def see", "        raise RuntimeError('shut')\n        def see")
    )
    (tmp_path / "returns.py").write_text(OWN.replace("return see", "return None"))
    (tmp_path / "FILE").write_text("")
    done = call("run", *RUN, "--jobs", 0, "--out", "out", "--observe", text)
    assert done.exit_code == 2 and says in done.stderr and done.stdout == "", done.output
    assert len(done.stderr.splitlines()) == 1 and not list(Path("out").rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("name", "modules"), [("tensorboard", ("tensorboard", "torch.utils.tensorboard")), ("mlflow", ("mlflow",))]
)
def test_an_observer_without_its_library_says_what_to_install(
    name: str, modules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # so that its import fails
    done = call("run", *RUN, "--out", tmp_path, "--observe", name)
    says = f"Error: observer '{name}' is not installed; pip install 'sparsebench[{name}]'\n"
    assert (done.exit_code, done.stderr) == (2, says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "says"), [("record", "is turned off"), ("exit", "cut off"), ("thread", "cut off")]
)  # fmt: skip
def test_a_run_ends_and_stores_all_records_whatever_hangs(hangs: Path, tmp_path: Path, at: str, says: str) -> None:
    out = tmp_path / "out"
    words = ["run", *RUN, "--jobs", "1", "--out", str(out), "--observe", f"{hangs}:at={at}", "--format", "csv"]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", IMPATIENT, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 100
    assert [record.status for record in store.read(out).values()] == ["ok"] * 4
    assert "oracle" in done.stdout and (out / "leaderboard.csv").exists()
    assert len((out / at).read_text().splitlines()) == (1 if at == "record" else 4)
    assert done.stderr.count("WARNING") == 1 and says in done.stderr


def test_the_observer_that_hangs_is_named_and_the_others_go_on(
    hangs: Path, stored: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "PATIENCE", 0.3)
    with caplog.at_level(logging.WARNING):
        assert show_folder([f"{hangs}:at=record", f"{hangs}:at=good"], stored) == (3, ["observe:hangs"])
    seen = [line.split() for line in (stored / "good").read_text().splitlines()]
    assert [cell for cell, _ in seen] == sorted(store.read(stored))
    assert len({thread for _, thread in seen}) == 1 and seen[0][1] != str(threading.get_ident())
    (message,) = caplog.messages
    assert message.startswith("observer 'observe:hangs' failed and is turned off: TimeoutError: no answer in 0.3 s")


def test_one_that_does_not_open_stops_the_run_before_it_begins(
    hangs: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "PATIENCE", 0.3)
    with pytest.raises(UserError, match=r"observer 'hangs' cannot be opened: TimeoutError: no answer in 0.3 s"):
        show_folder([f"{hangs}:at=open"], stored)


def test_one_that_leaves_the_process_as_it_opens_is_named(hangs: Path, stored: Path, tmp_path: Path) -> None:
    leaves = tmp_path / "leaves.py"
    leaves.write_text(
        hangs.read_text().replace("def open(self, out):", "def open(self, out):\n        raise SystemExit(4)")
    )
    with pytest.raises(UserError, match=r"observer 'hangs' cannot be opened: SystemExit: 4"):
        show_folder([f"{leaves}:at=open"], stored)
