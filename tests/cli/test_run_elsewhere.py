"""sparsebench run: shards, engines, and what a run would do."""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest
from click.testing import CliRunner, Result
from measured import TINY

from sparsebench.cli import main
from sparsebench.records import store

SMALL = ("--suite", TINY, "--n-train", "4", "--seeds", "1")


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, (*SMALL, *words))])


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(tmp_path: Path) -> None:
    result = run("--dry-run", "--out", tmp_path / "out", "--shard", "0/1")
    assert result.exit_code == 0 and "4 of 4 cells to run" in result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["composite", "anti_oracle", "1", "unknown", "unknown"] in rows
    assert ["all", "4", "unknown", "unknown"] in rows
    assert not list(tmp_path.iterdir())


def test_a_dry_run_reckons_from_what_the_folder_has(tmp_path: Path) -> None:
    assert run("--jobs", "0", "--out", tmp_path).exit_code == 0
    files = sorted(tmp_path.rglob("*"))
    seconds = sum(record.seconds for record in store.read(tmp_path).values())
    result = run("--dry-run", "--rerun", "always", "--out", tmp_path)
    (total,) = (line.split() for line in result.output.splitlines() if line.startswith("all"))
    assert total[1] == "4" and float(total[2]) == pytest.approx(seconds / 3600, rel=0.06)
    assert sorted(tmp_path.rglob("*")) == files
    assert "0 of 4 cells to run" in run("--dry-run", "--out", tmp_path).output


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = run("--dask", "tcp://127.0.0.1:9", "--out", tmp_path)
    assert done.exit_code == 2
    assert done.stderr == "Error: Dask is not installed; pip install 'sparsebench[cluster]'\n"


def test_a_run_loads_its_suite_reads_its_records_and_judges_them_once(tmp_path: Path) -> None:
    from sparsebench.board.judge import judge
    from sparsebench.board.settings import read
    from sparsebench.plan import request
    from sparsebench.records import store

    calls: Counter[CodeType] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code] if event == "call" else []))
    try:
        result = run("--jobs", "0", "--out", tmp_path)
    finally:
        sys.setprofile(None)
    assert result.exit_code == 0, result.output
    once = {"suite": request.load, "the plan's records": store.heads, "the board's records": read}
    assert {name: calls[function.__code__] for name, function in once.items()} == dict.fromkeys(once, 1)
    assert calls[judge.__code__] == 2, "over all tasks, and task by task"
