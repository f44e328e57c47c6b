import mmap
import os
from typing import Any

import numpy as np
import pytest

from sparsebench.errors import UserError
from sparsebench.plan.job import TIMEOUT, Limits
from sparsebench.runner.process import held_bytes, held_over

MIB = 2**20


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("30", 30), (1.5, 1.5), ("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400), ("1d", 86400), (".5", 0.5),
     ("0", 0), (None, TIMEOUT)],
)  # fmt: skip
def test_a_time_limit_is_a_number_with_or_without_a_unit(given: Any, seconds: float) -> None:
    assert Limits.parse(given, None, 1).timeout == seconds


@pytest.mark.parametrize(
    ("given", "size"),
    [("4GiB", 4 * 2**30), ("4g", 4 * 2**30), ("900MB", 9 * 10**8), (2**31, 2**31), ("0", 0), (None, 0)],
)
def test_a_memory_limit_is_a_number_of_bytes_with_or_without_a_unit(given: Any, size: int) -> None:
    assert Limits.parse(None, given, 1).memory == size


@pytest.mark.parametrize("given", ["", "-1", "soon", "1e3", "10x", "nan", "inf", "1 h 2", "١", -1, float("nan")])
def test_another_time_limit_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"--timeout; got.*allowed: 30, 10m"):
        Limits.parse(given, None, 1)


@pytest.mark.parametrize("given", ["4Gib2", "-4GiB", "lots", "1s", "100MiB", 1000])
def test_another_memory_limit_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"--memory-limit; got.*allowed: "):
        Limits.parse(None, given, 1)


@pytest.mark.parametrize(("option", "given"), [("--timeout", ("1h", None)), ("--memory-limit", (None, "4GiB"))])
def test_without_a_worker_process_no_limit_can_be_held(option: str, given: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=f"{option} needs a worker process.*--jobs 1"):
        Limits.parse(*given, 0)
    assert Limits.parse(None, None, 0) == Limits()


def test_memory_is_counted_when_it_is_used() -> None:
    before = held_bytes([os.getpid()])
    array = np.ones(50 * MIB, dtype=np.uint8)
    assert 40 * MIB < held_bytes([os.getpid()]) - before < 80 * MIB
    assert held_over([os.getpid()], before + 30 * MIB) >= before + 30 * MIB
    assert held_over([os.getpid()], before + 300 * MIB) == 0
    del array


def test_memory_that_two_processes_share_is_counted_once() -> None:
    with mmap.mmap(-1, 100 * MIB) as shared:
        shared.write(b"1" * (100 * MIB))
        alone = held_bytes([os.getpid()])
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            sum(shared[k] for k in range(0, 100 * MIB, 4096))
            os.read(told, 1)
            os._exit(0)
        together = held_bytes([os.getpid(), child])
        os.write(tell, b"1")
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
    assert together - alone < 60 * MIB
