"""A run's folder, its records or its segment are removed or replaced while the run is under way."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sparsebench import engine
from sparsebench.cli import main
from sparsebench.engine import run as runs
from sparsebench.errors import UserError
from sparsebench.planning import planner
from sparsebench.planning.expand import expand
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record

REQUEST = Request(suite="quick-scratch", tasks=("theory:steps=10,test=20,tokens=20",), n_train=(4,), seeds=1)


def run(out: Path, workers: int, at_first: Callable[[], object]) -> list[Record]:
    """Run four cells and do something after the first; return the records that were stored."""
    new: list[Record] = []

    def on_record(record: Record) -> None:
        new.append(record)
        if len(new) == 1:
            at_first()

    plan = planner.plan(REQUEST, planner.Files(), Registry(), out, "missing")
    store.check_writable(out)
    runs.execute(plan, Registry(), out, "cpu", workers, on_record)
    return new


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return the run's folder, and another one with something in it that is nobody's business."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("as it was")
    return tmp_path / "out", other


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["removed", "linked"])
def test_a_run_whose_folder_is_gone_ends_at_the_next_record_and_writes_nowhere_else(
    places: tuple[Path, Path], workers: int, how: str
) -> None:
    out, other = places

    def replace() -> None:
        out.rename(out.with_name("moved")) if how == "linked" else shutil.rmtree(out)
        if how == "linked":
            out.symlink_to(other)

    with pytest.raises(UserError, match="out was removed or replaced while the run was under way"):
        run(out, workers, replace)
    assert [path.name for path in other.rglob("*")] == ["precious"]
    assert out.is_symlink() == out.exists() == (how == "linked")


def test_records_are_not_written_through_a_link_in_the_place_of_their_folder(places: tuple[Path, Path]) -> None:
    out, other = places

    def replace() -> None:
        (out / "records").rename(out / "moved")
        (out / "records").symlink_to(other)

    with pytest.raises(UserError, match="records was removed or replaced while the run was under way"):
        run(out, 0, replace)
    assert [path.name for path in other.rglob("*")] == ["precious"]


@pytest.mark.parametrize("what", ["segment", "folder"])
def test_records_that_are_removed_meanwhile_are_written_again(
    places: tuple[Path, Path], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    out, _ = places

    def remove() -> None:
        shutil.rmtree(out / "records") if what == "folder" else store.segments(out)[0].unlink()

    with caplog.at_level(logging.WARNING):
        new = run(out, 0, remove)
    assert len(new) == 4 and store.read(out) == {record.cell_id: record for record in new}
    (said,) = caplog.messages
    assert "was removed while it was written; its records are written again" in said


def test_a_folder_that_was_moved_with_a_link_to_it_is_the_same(places: tuple[Path, Path]) -> None:
    out, other = places

    def move() -> None:
        out.rename(other / "moved")
        out.symlink_to(other / "moved")

    new = run(out, 1, move)
    assert store.read(out) == {record.cell_id: record for record in new} and len(new) == 4


@pytest.mark.parametrize("what", ["out", "out/records"])
def test_a_link_to_what_is_no_runs_folder_is_refused(places: tuple[Path, Path], what: str) -> None:
    out, other = places
    link = out.parent / what
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(other)
    words = ["run", "--suite", "quick-scratch", "--task", *REQUEST.tasks, "--n-train", "4", "--seeds", "1"]
    done = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert done.exit_code == 2 and " is a link" in done.stderr
    assert [path.name for path in other.rglob("*")] == ["precious"]


def test_a_link_to_an_empty_folder_or_to_a_runs_is_taken(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        store.check_writable(tmp_path / "out")
        (tmp_path / "disk" / "leaderboard.md").touch()
    assert (tmp_path / "disk" / "records").is_dir()


PRINTS = """
from typing import ClassVar
import sparsebench

class Prints(sparsebench.Strategy):
    name: ClassVar[str] = "prints"

    def scores(self, view):
        for number in range(50):
            print("x" * 2**16)
        print("the last line")
        {then}
        return view.tokens.sum(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Prints]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "status"), [("pass", "ok"), ("import os; os.abort()", "crashed")])
def test_what_a_cell_prints_takes_a_bounded_part_of_the_log(tmp_path: Path, then: str, status: str) -> None:
    path = tmp_path / "prints.py"
    path.write_text(PRINTS.format(then=then))
    request = Request(suite=REQUEST.suite, plugins=(str(path),), tasks=REQUEST.tasks, n_train=(4,), seeds=1)
    jobs = [job for job in expand(request, Registry()) if job.label == "prints"]
    (record,) = engine.local(jobs, 1, tmp_path, "cpu", {})
    assert record.status == status
    (log,) = (tmp_path / "logs").iterdir()
    text = log.read_text()
    assert log.stat().st_size < 2**21 and "bytes are left out]" in text and "the last line" in text
    if record.failure is not None:
        assert "numba" in record.failure.traceback


def test_a_log_is_not_written_through_a_link(places: tuple[Path, Path]) -> None:
    out, other = places
    (out / "logs").mkdir(parents=True)
    (out / "logs" / "worker-0.log").symlink_to(other / "precious")
    with pytest.raises(UserError, match=r"worker-0\.log cannot be started: Too many levels of symbolic links"):
        list(engine.local(expand(REQUEST, Registry()), 1, out, "cpu", {}))
    assert (other / "precious").read_text() == "as it was"
