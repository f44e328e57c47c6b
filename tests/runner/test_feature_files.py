"""Files of features: computed once by several processes at once, computed again if damaged, rounded in one way."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sparsebench.runner import features
from sparsebench.runner.features import Probed, Shared, features_at, path_of, rounded

EMPTY = np.empty(0, dtype=np.int64)
SHARED = Shared(metrics={}, trajectory=(), schedule=None, samples={"s": (0.1, None)}, notes={"a": "b"})
ONES = np.ones((2, 3), dtype=np.float16)
PROBED = Probed("name", ONES, ONES, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, ("cat", "dog"), ("all",), SHARED)
HOLDS = """
import sys, time
from pathlib import Path
from sparsebench.runner.features import features_at

def wait():
    print("computing", flush=True)
    time.sleep(600)

features_at(Path(sys.argv[1]), wait)
"""


def test_several_that_want_a_file_at_once_compute_it_once(tmp_path: Path) -> None:
    path, computed, results = tmp_path / "features" / "name.safetensors", list[int](), list[Probed]()

    def compute() -> Probed:
        computed.append(1)
        time.sleep(0.2)
        return PROBED

    threads = [threading.Thread(target=lambda: results.append(features_at(path, compute))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(computed) == 1 and len(results) == 4
    for result in results:
        assert result.classes == ("cat", "dog") and result.shared == SHARED
        assert result.train.dtype == np.float16 and (result.train == 1).all()


@pytest.mark.integration
def test_a_process_that_is_killed_leaves_the_file_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "features" / "name.safetensors"
    results: list[Probed] = []
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "computing\n"
        waiting = threading.Thread(target=lambda: results.append(features_at(path, lambda: PROBED)))
        waiting.start()
        waiting.join(0.5)
        assert not results, "it waits for the other process"
        os.kill(holder.pid, signal.SIGKILL)
    waiting.join()
    assert [result.name for result in results] == ["name"]


@pytest.mark.parametrize("damage", ["torn", "other name", "other version"])
def test_a_file_that_does_not_hold_them_is_computed_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "name.safetensors"
    features_at(path, lambda: PROBED)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other name":
        path = path.rename(tmp_path / "another.safetensors")
    else:
        monkeypatch.setattr(features, "VERSION", 0)
    result = features_at(path, lambda: replace(PROBED, name=path.stem, classes=("new",)))
    assert result.classes == ("new",)
    again = features_at(path, lambda: PROBED)
    assert again.classes == ("new",)


def test_machines_have_files_of_their_own_which_are_removed_together(tmp_path: Path) -> None:
    paths = [path_of(tmp_path, "name", machine) for machine in ("torch 1, cpu", "torch 2, cpu", "torch 2, H100")]
    for path in paths:
        computed = replace(PROBED, name=path.stem, classes=(path.stem,))
        features_at(path, partial(replace, computed))
    read = [features_at(path, lambda: PROBED).classes for path in paths]
    assert read == [(path.stem,) for path in paths] and len(set(read)) == 3
    other = path_of(tmp_path, "other", "torch 2, cpu")
    features_at(other, lambda: PROBED)
    features.remove(tmp_path, "name")
    assert [path.stem for path in other.parent.glob("*.safetensors")] == [other.stem]
    features.remove(tmp_path, "other")
    assert not other.parent.exists()


def test_large_features_are_scaled_and_others_only_rounded() -> None:
    plain = np.array([[1.0001, -3.0], [0.5, 60000.0]], dtype=np.float32)
    assert (rounded(plain) == plain.astype(np.float16)).all()
    large = np.array([[1e6, 2e6]], dtype=np.float32)
    assert np.isfinite(rounded(large)).all()
    assert rounded(large)[0, 1] == 2 * rounded(large)[0, 0]
