"""Each row of what belongs to the whole process is seen when it changes, and put back."""

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.contain import process_state
from sparsebench.contain.process_state import RANDOM, STATE, changes, preserve, put, values

CHANGES: dict[str, Callable[[], Any]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's gradient mode": lambda: torch.set_grad_enabled(False),
    "torch's deterministic mode": lambda: torch.set_deterministic_debug_mode("warn"),
    "torch's matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "cuDNN's precision": lambda: setattr(process_state.CONVOLUTIONS, "fp32_precision", "ieee"),
    "torch's autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's anomaly detection": lambda: torch.set_anomaly_enabled(True),
    "NumPy's error handling": lambda: np.seterr(over="ignore"),
    "the working directory": lambda: os.chdir("/"),
    "the environment": lambda: os.environ.update(HOME="/nowhere"),
    "a timer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000),
    "signal handlers": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "random": lambda: random.random(),
}


def test_every_row_that_can_be_set_is_tried() -> None:
    rows = [row for row in (*STATE, *RANDOM) if row.set is not None]
    assert [row.name for row in rows] == list(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    before = values((*STATE, *RANDOM))
    with preserve():
        CHANGES[name]()
        assert changes(before) == [name]
    assert changes(before) == []
    assert values((*STATE, *RANDOM)) == before


def test_a_variable_that_is_added_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = values()
    monkeypatch.setenv("ADDED_BY_AN_IMPORT", "1")
    assert changes(before) == []


def test_a_variable_that_is_gone_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    with preserve():
        del os.environ["MINE"]
    assert os.environ["MINE"] == "1"


def test_a_precision_of_one_backend_is_a_change_too() -> None:
    before = values()
    with preserve():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert changes(before) == ["torch's matmul precision"]
        put({"torch's matmul precision": "differs"})
    assert changes(before) == []


def test_inference_mode_is_seen() -> None:
    before = values()
    with torch.inference_mode():
        assert "torch's inference mode" in changes(before)
