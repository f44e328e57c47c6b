import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import execute, planned

from sparsebench.plan import plan as planner
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.engines import first_interrupt


def plan(out: Path) -> planner.Plan:
    return planned(out, tasks=("composite:epochs=100",), n_train=(4, 8), seeds=10)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_is_heard_and_the_second_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_interrupt(lambda: heard.append("first")):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # at the same moment: the same one
        assert heard == ["first"]
        monkeypatch.setattr("sparsebench.runner.engines.ECHO", 0)
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
    asked: list[int] = []

    def once(record: Record) -> None:
        new.append(record)
        if len(new) == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        execute(plan(tmp_path), Registry(), tmp_path, workers, once, on_stop=lambda: asked.append(len(new)))
    assert asked == [1] and 1 <= len(new) < 80  # more than one where a slow machine hears of it late
    assert len(store.read(tmp_path)) == len(new) and {record.status for record in new} == {"ok"}
    assert len(plan(tmp_path).todo) == 80 - len(new)
