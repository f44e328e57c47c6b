import mmap
import os
from typing import Any

import pytest

from sparsebench.errors import UserError
from sparsebench.plan.request import TIMEOUT, How
from sparsebench.runner.process import held_over

MIB = 2**20


def limits(timeout: Any, memory: Any, jobs: int = 1) -> tuple[float, float]:
    """Return what a user asks for."""
    return How(timeout=timeout, memory_limit=memory, jobs=jobs).limits()


@pytest.mark.parametrize(
    ("seconds", "size", "given"),
    [
        (30, 0, ("30", None)), (1.5, 0, (1.5, "0")), (90, 0, ("90s", None)), (600, 0, ("10 min", None)),
        (5400, 0, ("1.5h", None)), (86400, 0, ("1d", None)), (0.5, 0, (".5", None)), (0, 0, ("0", None)),
        (TIMEOUT, 0, (None, None)), (TIMEOUT, 4 * 2**30, (None, "4GiB")), (TIMEOUT, 4 * 2**30, (None, "4g")),
        (TIMEOUT, 9 * 10**8, (None, "900MB")), (TIMEOUT, 2**31, (None, 2**31)),
    ],
)  # fmt: skip
def test_a_limit_is_a_number_with_or_without_a_unit(seconds: float, size: int, given: tuple[Any, Any]) -> None:
    assert limits(*given) == (seconds, size)


@pytest.mark.parametrize("option", ["--timeout", "--memory-limit"])
@pytest.mark.parametrize("given", ["", "-1", "soon", "1e3", "10x", "nan", "inf", "1 h 2", "١", -1, "4Gib2", "100"])
def test_another_limit_is_refused(option: str, given: Any) -> None:
    if (option, given) != ("--timeout", "100"):
        with pytest.raises(UserError, match=f"{option}; got.*allowed: "):
            limits(*((given, None) if option == "--timeout" else (None, given)))


@pytest.mark.parametrize(("option", "given"), [("--timeout", ("1h", None)), ("--memory-limit", (None, "4GiB"))])
def test_without_a_worker_process_no_limit_can_be_held(option: str, given: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=f"{option} needs a worker process.*--jobs 1"):
        limits(*given, jobs=0)
    assert limits(None, None, jobs=0) == limits(None, None)


def test_memory_is_counted_when_it_is_used() -> None:
    before = held_over([os.getpid()], 0)
    with mmap.mmap(-1, 50 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:  # none that was freed before
        pages.write(b"1" * (50 * MIB))
        assert 40 * MIB < held_over([os.getpid()], 0) - before < 130 * MIB
        assert held_over([os.getpid()], before + 30 * MIB) >= before + 30 * MIB
        assert held_over([os.getpid()], before + 300 * MIB) == 0


def test_memory_that_two_processes_share_is_counted_once() -> None:
    with mmap.mmap(-1, 100 * MIB) as shared:
        shared.write(b"1" * (100 * MIB))
        alone = held_over([os.getpid()], 0)
        told, tell = os.pipe()
        if (child := os.fork()) == 0:
            sum(shared[k] for k in range(0, 100 * MIB, 4096))
            os.read(told, 1)
            os._exit(0)
        together = held_over([os.getpid(), child], 0)
        os.write(tell, b"1")
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)
    assert together - alone < 60 * MIB
