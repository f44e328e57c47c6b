"""A plugin that harms the process which loads it, or raises what nobody expects, costs only itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebench.contain import rehearse
from sparsebench.contain.rehearse import harm
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.testing import process

PLUGIN = """
import ctypes, os, signal, sys, threading, time
from typing import ClassVar
import sparsebench

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("not me")

{first}

class Named(sparsebench.Strategy):
    name: ClassVar[str] = "{name}"

    def scores(self, view):
        {then}
        return view.tokens.sum(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Named]
"""
AT_IMPORT = {
    "leaves": ("os._exit(0)", "while it was loaded it left the process with 0"),
    "faults": ("ctypes.string_at(0)", "while it was loaded it was ended by SIGSEGV"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "while it was loaded it was ended by SIGKILL"),
    "closes_output": ("os.close(1)", "while it was loaded it closed the standard streams"),
    "closes_errors": ("sys.stderr.close()", "while it was loaded it closed the standard streams"),
    "interrupts": ("raise KeyboardInterrupt", "while it was loaded it raised KeyboardInterrupt"),
    "base": ("raise BaseException('of all')", "BaseException: of all"),
    "generator": ("raise GeneratorExit('out')", "GeneratorExit: out"),
    "silent": ("raise Odd", "Odd: (its text raises RuntimeError)"),
    "surrogate": ("raise OSError('caf\\udce9.png')", "OSError: caf\\udce9.png"),
}
IN_CELL = {
    "cell_base": ("raise BaseException('of all')", "BaseException: of all"),
    "cell_silent": ("raise Odd", "Odd: (its text raises RuntimeError)"),
    "cell_surrogate": ("raise OSError('caf\\udce9.png')", "OSError: caf\\udce9.png"),
}
FINE = {"moves": "os.chdir('/')", "alarms": "signal.alarm(1)", "fine": ""}


def write(folder: Path, name: str, first: str = "", then: str = "pass") -> str:
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name, first=first, then=then))
    return f"{name}.py"


@pytest.mark.slow
def test_plugins_that_harm_who_loads_them_cost_only_their_own_cells(tmp_path: Path) -> None:
    names = [write(tmp_path, name, first) for name, first in FINE.items()]
    names += [write(tmp_path, name, first) for name, (first, _) in AT_IMPORT.items()]
    names += [write(tmp_path, name, then=then) for name, (then, _) in IN_CELL.items()]
    words = [word for name in names for word in ("--plugin", name)]
    done = subprocess.run(
        [sys.executable, "-m", "sparsebench", "run", "--suite", "quick-scratch", "--n-train", "4", "--seeds", "1",
         "--task", "theory:steps=10,test=20,tokens=20", "--jobs", "0", "--out", "out", "--format", "json", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    records = store.read(tmp_path / "out").values()
    found = {record.label: record.model_dump(mode="json") for record in records}
    assert {"dense", "random", "oracle", "anti_oracle", *FINE} == {n for n, r in found.items() if r["status"] == "ok"}
    for name, (_, reason) in (AT_IMPORT | IN_CELL).items():
        assert found[name]["status"] == "failed", name
        assert reason in found[name]["failure"]["reason"], (name, found[name]["failure"]["reason"])
    assert {"dense", *FINE} <= {row["strategy"] for row in json.loads(done.stdout)}


def test_a_plugin_that_hangs_while_it_is_loaded_costs_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse, "PATIENCE", 1.0)
    registry = Registry()
    assert registry.load_file(tmp_path / write(tmp_path, "hangs", "time.sleep(600)")) == ["hangs"]
    assert registry.broken["file:hangs.py"] == "while it was loaded it took more than 1 s"


def test_what_a_call_raises_or_returns_is_no_harm() -> None:
    assert harm(lambda: 1) is None and harm(lambda: 1 / 0) is None


def test_a_check_of_what_raises_the_unexpected_says_so(tmp_path: Path) -> None:
    path = tmp_path / write(tmp_path, "odd", then="raise GeneratorExit('caf\\udce9')")
    (report,) = process.check(str(path), groups=("required",))
    assert {outcome.status for outcome in report.outcomes} <= {"failed", "not run", "passed", "unsupported"}
    assert any("GeneratorExit: caf\\udce9" in outcome.message for outcome in report.outcomes)
