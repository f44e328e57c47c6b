import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.contain import health
from sparsebench.contain.health import Health
from sparsebench.records.record import Failure, Record


def of_this(*descriptors: int, device: str = "cpu") -> Health:
    return Health(descriptors, device, os.getpid())


@pytest.fixture
def ok(make_record: Callable[..., Record]) -> Record:
    return make_record()


@contextmanager
def set_to(value: Any, get: Callable[[], Any], put: Callable[[Any], Any]) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def test_a_process_that_is_as_it_was_takes_another_cell(ok: Record) -> None:
    assert of_this(0, 1, 2).trouble(None) == ""


CHANGES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: set_to(torch.float64, torch.get_default_dtype, torch.set_default_dtype),
    "number of threads": lambda: set_to(torch.get_num_threads() + 1, torch.get_num_threads, torch.set_num_threads),
    "gradient mode": lambda: set_to(False, torch.is_grad_enabled, torch.set_grad_enabled),
    "precision": lambda: set_to("medium", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "working directory": lambda: set_to("/", os.getcwd, os.chdir),
    "error handling": lambda: np.errstate(over="ignore"),
    "a timer": lambda: set_to(100, lambda: 0, signal.alarm),
    "signal handlers": lambda: set_to(
        signal.SIG_IGN, lambda: signal.getsignal(signal.SIGALRM), lambda x: signal.signal(signal.SIGALRM, x)
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_cell_has_changed_is_seen(ok: Record, what: str) -> None:
    found = of_this()
    with CHANGES[what]():
        assert what in found.trouble(None)
    assert found.trouble(None) == ""


def test_a_changed_environment_is_seen(ok: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    found = of_this()
    monkeypatch.setenv("ADDED_BY_AN_IMPORT", "1")
    assert found.trouble(None) == ""
    monkeypatch.setenv("MINE", "2")
    assert "environment" in found.trouble(None)


def test_a_descriptor_that_was_closed_or_replaced_is_seen(ok: Record, tmp_path: Path) -> None:
    number = os.open(tmp_path / "one", os.O_CREAT | os.O_WRONLY)
    found = of_this(number)
    os.close(number)
    assert "descriptors" in found.trouble(None)
    assert os.open(tmp_path / "two", os.O_CREAT | os.O_WRONLY) == number
    assert "descriptors" in found.trouble(None)
    os.close(number)


def test_threads_that_go_on_are_seen(ok: Record) -> None:
    found, over = of_this(), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert "threads" in found.trouble(None)
    over.set()
    thread.join()
    assert found.trouble(None) == ""


def test_processes_that_go_on_are_seen(ok: Record) -> None:
    found = of_this()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert "processes" in found.trouble(None)
    process.kill()
    process.wait()
    assert found.trouble(None) == ""


def test_memory_that_is_not_free_is_seen(ok: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "GROWTH", 30 * 2**20)
    gc.collect()  # what earlier tests left would be free in the middle of this one
    found = of_this()
    array = np.ones(200 * 2**20, dtype=np.uint8)
    assert "memory" in found.trouble(None)
    del array
    assert found.trouble(None) == ""


@pytest.mark.parametrize(
    ("kind", "device", "fit"),
    [("StrategyError", "cuda:0", True), ("ValueError", "cuda:0", True), ("RuntimeError", "cpu", True),
     ("RuntimeError", "cuda:0", False), ("AcceleratorError", "cuda:0", False), ("MemoryError", "cpu", False),
     ("KeyboardInterrupt", "cpu", False)],
)  # fmt: skip
def test_only_after_an_ordinary_failure_is_a_process_used_again(
    make_record: Callable[..., Record], kind: str, device: str, fit: bool
) -> None:
    record = make_record(status="failed").model_copy(update={"failure": Failure(reason="it broke", kind=kind)})
    assert (of_this(device=device).trouble(record.failure.kind) == "") == fit
