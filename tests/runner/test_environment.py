"""What a machine and its libraries are described by."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sparsebench.runner import environment

DESCRIBE = "import json; from sparsebench.runner import environment as e; print(json.dumps(e.describe()))"


def described(**variables: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in environment.SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=known | variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_the_environment_names_what_libraries_compute_with_and_no_numbers_of_threads() -> None:
    usual = described()
    assert usual["capability"] == torch.backends.cpu.get_cpu_capability()
    assert not usual.keys() & set(environment.SETTINGS)
    assert described(OMP_NUM_THREADS="3", MKL_NUM_THREADS="2") == usual
    default = described(ATEN_CPU_CAPABILITY="default")
    assert default == usual | {"capability": "DEFAULT", "ATEN_CPU_CAPABILITY": "default"}
    assert described(MKL_CBWR="COMPATIBLE") == usual | {"MKL_CBWR": "COMPATIBLE"}
