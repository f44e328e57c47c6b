"""The programs of benchmarks/ import what exists: nothing else runs them between two measurements."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("program", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(program, monkeypatch):
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(program), run_name="benchmark")
    siblings = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in (set(sys.modules) - modules) & siblings:
        del sys.modules[name]
