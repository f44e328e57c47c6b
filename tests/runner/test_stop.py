"""Runs that are stopped, share a folder, or whose folder is removed or moved."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from measured import TINY
from processes import processes_of
from running import execute, planned
from waiting import soon

from sparsebench import api
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner.engines import first_interrupt


def plan(out: Path) -> planner.Plan:
    return planned(out, tasks=("composite:epochs=100",), n_train=(4, 8), seeds=10)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Let SIGINT not be ignored here, and so not in processes that are started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_is_heard_and_the_second_interrupts() -> None:
    heard: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_interrupt(lambda: heard.append("first")):
        signal.raise_signal(signal.SIGINT)
        assert heard == ["first"]
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_is_left_alone() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append("own"))
    with first_interrupt(lambda: heard.append("first")):
        signal.raise_signal(signal.SIGINT)
    assert heard == ["own"]


def test_a_run_in_another_thread_stores_its_records(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: execute(planned(tmp_path), Registry(), tmp_path))
    thread.start()
    thread.join()
    assert len(store.read(tmp_path)) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_after_the_first_ctrl_c_the_cells_under_way_are_done_and_no_others(tmp_path: Path, workers: int) -> None:
    new: list[Record] = []
    stops: list[int] = []

    def once(record: Record) -> None:
        new.append(record)
        if len(new) == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        execute(plan(tmp_path), Registry(), tmp_path, workers, once, on_stop=lambda: stops.append(len(new)))
    assert stops == [1] and 1 <= len(new) < 80  # several if a slow machine handles the signal late
    assert len(store.read(tmp_path)) == len(new) and {record.status for record in new} == {"ok"}
    assert len(plan(tmp_path).todo) == 80 - len(new)
    status = CliRunner().invoke(main, ["status", str(tmp_path)])
    assert f"was stopped with {80 - len(new)} cells left: run the same command" in status.output


HOLDS = """
import sys
from pathlib import Path
from sparsebench.runner.engines import CellLocks

locks = CellLocks(Path(sys.argv[1]), {})
print(locks.begin(sys.argv[2]), flush=True)
sys.stdin.read()
"""


@pytest.mark.integration
def test_a_cell_of_another_run_is_left_to_it(tmp_path: Path) -> None:
    """A cell that another run is at is left to it and done when that has died."""
    plan = planned(tmp_path)
    (first, *others), new = [job.cell.id for job in plan.todo], list[str]()
    words = [sys.executable, "-c", HOLDS, str(tmp_path), first]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"

        def on_record(record: Record) -> None:
            new.append(record.cell_id)
            if len(new) == len(others):
                other.kill()

        execute(plan, Registry(), tmp_path, 0, on_record)
    assert sorted(new[:-1]) == sorted(others) and new[-1] == first


def test_unsealed_cells_of_a_killed_run_run_again_on_request(tmp_path: Path) -> None:
    """What a killed run has not sealed runs again where that is asked for."""
    new, writer = list[Record](), store.Writer(tmp_path)
    for job in planned(tmp_path).todo:
        writer.append(job.record_of_failure("failed", Failure(reason="it broke"), "2026-01-01T00:00:00+00:00"))
    writer.close()
    (segment,) = store.segments(tmp_path)
    segment.rename(segment.with_name("20260101T000000-other-7-0.jsonl"))
    plan = planned(tmp_path, "failed")
    execute(plan, Registry(), tmp_path, 0, new.append)
    assert len(plan.todo) == 4 and [record.status for record in new] == ["ok"] * 4


def run(out: Path, workers: int, at_first: Callable[[], object]) -> list[Record]:
    """Run four cells, and call a function after the first; return the stored records."""
    new: list[Record] = []

    def on_record(record: Record) -> None:
        new.append(record)
        if len(new) == 1:
            at_first()

    store.check_writable(out)
    execute(planned(out), Registry(), out, workers, on_record)
    return new


@pytest.mark.parametrize(("what", "workers"), [("folder", 1), ("records", 0), ("segment", 0)])
def test_a_run_whose_records_are_removed_ends_at_the_next_record(tmp_path: Path, what: str, workers: int) -> None:
    out = tmp_path / "out"

    def remove() -> None:
        if what == "segment":
            store.segments(out)[0].unlink()
        folder = out if what == "folder" else out / "records"
        while what != "segment" and folder.exists():  # a worker may write its log meanwhile
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(UserError, match="was removed during the run"):
        run(out, workers, remove)
    assert not store.read(out)


def test_a_folder_that_was_moved_with_a_link_to_it_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def move() -> None:
        out.rename(tmp_path / "moved")
        out.symlink_to(tmp_path / "moved")

    new = run(out, 1, move)
    assert store.read(out) == {record.cell_id: record for record in new} and len(new) == 4


# About a fifth of a second a cell.
LONG = "composite:epochs=150"
COMMAND = [
    sys.executable, "-m", "sparsebench", "run", "--suite", TINY, "--task", LONG, "--n-train", "4", "--seeds", "2",
    "--jobs", "1",
]  # fmt: skip


def cells_of(out: Path) -> list[str]:
    """Return the cells of all records, sealed or not."""
    return store.rows(out, counted=False)["cell_id"].to_pylist() if store.summaries(out) else []


def finish(out: Path) -> tuple[str, int]:
    """Run the same request in this process; return the leaderboard without speeds, and the number of cells that ran."""
    new: list[Record] = []
    api.run("attn_topk", suite=TINY, tasks=LONG, n_train=[4], seeds=2, out=out, jobs=0, on_record=new.append)
    board = pd.read_csv(out / "leaderboard.csv").drop(columns=["images_per_s", "pareto_speed"])
    return board.to_csv(), len(new)


def stopped_by(number: int, out: Path, plugin: str, under_way: Callable[[], bool], times: int = 1) -> tuple[int, str]:
    """Start a run and send it the signal when it is under way; return how it left and its standard error.

    A signal that is to be sent again is sent when the run has said that it has the one before.
    """
    command = [*COMMAND, "--plugin", plugin, "--out", str(out)]
    with (out / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        assert soon(lambda: under_way() or process.poll() is not None)
        process.send_signal(number)
        for _ in range(times - 1):
            assert soon(lambda: "stopping" in (out / "stderr").read_text())
            time.sleep(0.5)
            process.send_signal(number)
        process.wait(timeout=55)  # less than one pass of `sleeps`
    finally:
        process.kill()
        process.wait()
    return process.returncode, (out / "stderr").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the leaderboard of a run that was not stopped."""
    board, cells = finish(tmp_path_factory.mktemp("undisturbed"))
    assert cells == 10
    return board


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_leaves_no_process_and_goes_on_where_it_was(
    tmp_path: Path, undisturbed: str, number: int
) -> None:
    code, error = stopped_by(number, tmp_path, "attn_topk", lambda: len(cells_of(tmp_path)) >= 3)
    assert soon(lambda: not processes_of(tmp_path))
    if number == signal.SIGINT:
        assert code == 130 and "Traceback" not in error
        assert "Ctrl-C again stops now" in error and "the same command continues" in error
    else:
        assert code == -signal.SIGKILL
    kept = cells_of(tmp_path)
    assert 3 <= len(kept) < 10
    board, cells = finish(tmp_path)
    assert board == undisturbed and cells == 10 - len(kept)
    assert set(kept) < set(cells_of(tmp_path)) and len(set(cells_of(tmp_path))) == len(cells_of(tmp_path)) == 10


@pytest.mark.slow
def test_two_runs_in_one_folder_end_with_the_board_of_one(tmp_path: Path, undisturbed: str) -> None:
    command = [*COMMAND, "--plugin", "attn_topk", "--out", str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(300) for run in runs] == [0, 0]
    assert len(set(cells_of(tmp_path))) == len(cells_of(tmp_path)) == 10, "no cell is done twice"
    assert finish(tmp_path) == (undisturbed, 0)
    assert not (tmp_path / "underway").exists() and not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "number", "times"), [("clings", signal.SIGKILL, 1), ("sleeps", signal.SIGINT, 2)])
def test_nothing_outlives_a_killed_run(tmp_path: Path, samples: Path, plugin: str, number: int, times: int) -> None:
    """Nothing outlives a run that is killed or hears Ctrl-C twice even if it hangs and hides."""
    log = tmp_path / "logs" / "worker-0.log"
    asleep = lambda: log.exists() and "asleep" in log.read_text()  # noqa: E731
    code, error = stopped_by(number, tmp_path, str(samples / f"{plugin}.py"), asleep, times)
    assert soon(lambda: not processes_of(tmp_path)) and "Traceback" not in error
    assert code == (130 if times == 2 else -number)
    assert times == 1 or "the same command continues" in error
    assert plugin not in {record.label for record in store.read(tmp_path).values()}
