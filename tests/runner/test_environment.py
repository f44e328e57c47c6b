"""What a machine and its libraries are described by, and how torch computes in a cell."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from sparsebench.runner.devices import SETTINGS
from sparsebench.runner.run_cell import one_thread

DESCRIBE = "import json; from sparsebench.runner.devices import environment; print(json.dumps(environment()))"


def described(**variables: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=known | variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_the_environment_names_what_libraries_compute_with_and_no_numbers_of_threads() -> None:
    usual = described()
    assert usual["capability"] == torch.backends.cpu.get_cpu_capability()
    assert not usual.keys() & set(SETTINGS)
    assert described(OMP_NUM_THREADS="3", MKL_NUM_THREADS="2") == usual
    default = described(ATEN_CPU_CAPABILITY="default")
    assert default == usual | {"capability": "DEFAULT", "ATEN_CPU_CAPABILITY": "default"}
    assert described(MKL_CBWR="COMPATIBLE") == usual | {"MKL_CBWR": "COMPATIBLE"}


HOW: list[Callable[[], object]] = [
    torch.get_num_threads,
    torch.are_deterministic_algorithms_enabled,
    lambda: torch.backends.cudnn.conv.fp32_precision,
    lambda: torch.backends.cuda.matmul.fp32_precision,
    torch.get_default_dtype,
    torch.is_grad_enabled,
]


def values() -> list[object]:
    return [setting() for setting in HOW]


def test_cells_have_one_thread_and_exact_kernels_and_nothing_stays() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = values()
        with one_thread():
            assert values()[:3] == [1, True, "ieee"]
            assert values()[4:] == before[4:]
        assert values() == before
    finally:
        torch.set_num_threads(threads)
