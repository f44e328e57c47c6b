import json
import os
import subprocess
import sys

import pytest
import torch

from sparsebench.records import environment
from sparsebench.records.cell import digest

DESCRIBE = "import json; from sparsebench.records import environment as e; print(json.dumps(e.describe()))"


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


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what the machine is described as, which a test may change."""
    description = {"python": "3.11", "processor": "one", "torch": "2.9", "capability": "AVX512"}
    monkeypatch.setattr(environment, "describe", lambda: description)
    return description


def test_a_record_from_before_is_of_the_same_machine_where_the_rest_is_the_same(here: dict[str, str]) -> None:
    former = digest({"python": "3.11", "processor": "one", "torch": "2.9"})
    assert environment.same(digest(here), digest(here)) and environment.same("other", "other")
    assert environment.same(former, digest(here))
    assert not environment.same(former, "other")
    assert not environment.same(digest({"python": "3.11", "processor": "two", "torch": "2.9"}), digest(here))
    assert not environment.same(digest(here | {"capability": "AVX2"}), digest(here))
    here["MKL_CBWR"] = "COMPATIBLE"
    assert not environment.same(former, digest(here)), "a record from before would not have said so"
