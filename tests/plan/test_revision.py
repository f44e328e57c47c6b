"""A run computes the cells of changed revisions again, and no others."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from measured import TINY
from plugin_files import write_distribution
from running import run_without_board

from sparsebench.cli import main
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

MINE = '''"""A plugin."""
from typing import ClassVar

import sparsebench
from helper import POWER


class Mine(sparsebench.Strategy):
    """Keeps long tokens."""

    name: ClassVar[str] = "mine"
    revision: ClassVar[int] = 1

    def scores(self, view):
        """Return powers of norms."""
        return view.tokens.norm(dim=-1) ** POWER + 0.25


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Mine]
'''
TASK = '''
from typing import ClassVar

from sparsebench import hookimpl
from sparsebench.tasks.images import Composite


class Easy(Composite):
    """The composite task, made easier."""

    name: ClassVar[str] = "easy"
    revision: ClassVar[int] = 1
    scale: ClassVar[float] = 0.25


@hookimpl
def sparsebench_tasks():
    return [Easy]
'''
SIZES = "epochs=1,test=4,pretrain_epochs=0,canvas=16,foreground=8"
SMALL: dict[str, Any] = {"suite": "quick-scratch", "n_train": 4, "seeds": 1}


def to_do(out: Path, *names: str, task: str = "composite") -> str:
    """Return the output of a dry run."""
    words = [*names, "--task", f"{task}:{SIZES}", "--n-train", "4", "--seeds", "1", "--out", str(out)]
    result = CliRunner().invoke(main, ["run", *words, "--suite", "quick-scratch", "--keep", "0.5", "--dry-run"])
    assert result.exit_code == 0, result.output
    return result.stdout


def run(out: Path, *names: str, task: str = "composite") -> None:
    run_without_board(*names, tasks=f"{task}:{SIZES}", out=out, keep=0.5, **SMALL)


def changed(path: Path, old: str, new: str) -> None:
    """Change a text of a file."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    modified = path.stat().st_mtime
    path.write_text(text.replace(old, new), encoding="utf-8")
    os.utime(path, (modified + 10, modified + 10))  # Python identifies compiled code by size and second of the source
    sys.modules.pop(path.stem, None)  # as in a new process


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("POWER = 2.0\n")
    return tmp_path / "mine.py"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that installs a distribution `far` with one module, and returns the module's file."""

    def make(text: str) -> Path:
        site = write_distribution(tmp_path / "site", {"mine": "far_module"}, name="far", far_module=text)
        monkeypatch.delitem(sys.modules, "far_module", raising=False)
        monkeypatch.syspath_prepend(site)
        return site / "far_module.py"

    return make


def test_of_a_file_the_code_decides_and_of_what_it_imports(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out, str(mine))
    changed(mine, "        return view", "        # long ones\n\n        return (view")
    changed(mine, "+ 0.25", "+ 0.25)")
    changed(mine, "Return powers of norms.", "Return what is kept.")
    (tmp_path / "helper.py").write_text('"""Numbers."""\nPOWER = 2.0  # a square\n')
    assert to_do(out, str(mine)).startswith("0 of ")
    total = len(store.read(out))
    for path, old, new in ((mine, "0.25", "0.5"), (tmp_path / "helper.py", "2.0", "3.0")):
        changed(path, old, new)
        output = to_do(out, str(mine))
        run(out, str(mine))
        assert output.startswith(f"1 of {total} cells to run\nrun again: 1 cells of strategy mine: its file changed")
        assert to_do(out, str(mine)).startswith("0 of ")
    assert len(store.read(out)) == total
    mine.rename(tmp_path / "twin.py")
    changed(tmp_path / "twin.py", "0.5", "0.75")
    assert "mine: its file is twin.py, and was mine.py\n" in to_do(out, str(tmp_path / "twin.py"))


def test_an_installed_distribution_declares_its_revision(install: Callable[[str], Path], tmp_path: Path) -> None:
    path, out = install(MINE.replace("from helper import POWER", "POWER = 2.0")), tmp_path / "out"
    run(out, "mine")
    changed(path, "0.25", "0.5")
    assert to_do(out, "mine").startswith("0 of ")
    changed(path, "[int] = 1", "[int] = 2")
    output = to_do(out, "mine")
    run(out, "mine")
    assert "\nrun again: 1 cells of strategy mine: its revision is far 2, and was far 1" in output
    (record,) = (record for record in store.read(out).values() if record.label == "mine")
    assert (record.origin.distribution, record.origin.version, record.origin.revision) == ("far", "1.5", "2")


@pytest.mark.parametrize("installed", [False, True])
def test_the_revision_of_a_task_is_part_of_its_cells(
    install: Callable[[str], Path], tmp_path: Path, installed: bool
) -> None:
    path = install(TASK) if installed else tmp_path / "easy.py"
    path.write_text(TASK)
    out, names = tmp_path / "out", ["random"] if installed else ["random", str(path)]
    run(out, *names, task="easy")
    ids = set(store.read(out))
    run(out, *names)
    revisions = {record.cell.task.name: record.cell.task.revision for record in store.read(out).values()}
    assert revisions["composite"] == "" and (revisions["easy"] == "" if installed else "code-" in revisions["easy"])
    changed(path, "made easier", "with less noise")
    assert to_do(out, *names, task="easy").startswith("0 of ")
    changed(path, *(("[int] = 1", "[int] = 2") if installed else ("0.25", "0.5")))
    assert to_do(out, *names, task="easy").startswith(f"{len(ids)} of ")
    run(out, *names, task="easy")
    assert to_do(out, *names).startswith("0 of ") and set(store.read(out)) > ids


def test_records_of_earlier_versions_say_so(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out, str(mine))
    lines = [json.dumps(record.model_dump(mode="json")) for record in store.read(out).values()]
    for path in store.sealed_files(out):
        path.unlink()
    text = re.sub(r'"revision": "[^"]+"', f'"sha256": "{"ab" * 32}"', "\n".join([*lines, ""]))
    text = re.sub(r'"schema_version": \d+', '"schema_version": 3', text)
    (out / "records" / "old.jsonl").write_text(text)
    total = len(store.read(out))
    assert {record.origin.revision for record in store.read(out).values()} == {"ab" * 32}
    output = to_do(out, str(mine))
    run(out, str(mine))
    assert output.startswith(f"{total} of {total} cells") and "its revision is" in output
    assert to_do(out, str(mine)).startswith("0 of ")


@pytest.mark.parametrize("revision", ["0", "True", "1.0", '"2"'])
def test_a_revision_is_a_whole_number(mine: Path, tmp_path: Path, revision: str) -> None:
    changed(mine, "[int] = 1", f"[object] = {revision}")
    result = CliRunner().invoke(main, ["run", str(mine), "--suite", TINY, "--out", str(tmp_path / "out"), "--dry-run"])
    assert result.exit_code == 2 and "mine.revision must be a whole number" in result.stderr
