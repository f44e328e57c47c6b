"""Limits of the system, on address space, threads and cores, are named as what they are."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparsebench.errors import UserError, shortage
from sparsebench.tasks.sources import cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from sparsebench.cli.terminal import refusal
from sparsebench.models.timm_models import content_of
from sparsebench.tasks.sources.cache import Pixels

pixels = Pixels("many", (400, 3, 256, 256), lambda i: np.zeros((3, 256, 256), np.uint8))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000,) * 2)
for read in (lambda: content_of(Path(sys.argv[1])), lambda: content_of(Path(sys.argv[2])), pixels.array):
    try:
        read()
    except Exception as error:
        print(refusal(error))
"""
"""Reads two files of weights and a cache of pictures of 79 MB and more, with 60 MB of address space."""


@pytest.mark.integration
def test_what_does_not_fit_the_address_space_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path))
    state = {"head.weight": torch.zeros(20_000_000)}
    torch.save(state, tmp_path / "own.pt")
    save_file(state, tmp_path / "own.safetensors")
    cache.Pixels("many", (400, 3, 256, 256), lambda i: np.zeros((3, 256, 256), np.uint8)).array()
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "own.pt"), str(tmp_path / "own.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line, name in zip(lines, ("own.pt", "own.safetensors", "many"), strict=True):
        assert name in line and "not enough memory" in line and "ulimit -v" in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), ["threads", "ulimit -u"]),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), ["processes", "ulimit -u"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), ["memory"]),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ["memory"]),
    ],
)
def test_what_is_short_is_named_with_the_limit(error: Exception, words: list[str]) -> None:
    text = shortage(error)
    assert text is not None and all(word in text for word in words)
    assert shortage(UserError(str(error))) is None and shortage(ValueError("other")) is None


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "100000 100000", "job/cpu.max": "max 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu.max": "10000 100000"}, 1),
        ({}, math.inf),
    ],
)
def test_there_are_as_many_workers_as_the_quota_of_a_container_allows(
    files: dict[str, str], most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text("3:cpuset:/\n0::/job\n")
    monkeypatch.setattr(cache, "CGROUP", tmp_path)
    monkeypatch.setattr(cache, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cache.cores() == min(8, most)
