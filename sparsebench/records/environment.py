"""The machine and the libraries a record was made with."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from sparsebench.records import files
from sparsebench.text import plain

FOLDER = "environments"
PACKAGES = ("sparsebench", "torch", "timm", "torchvision", "numpy", "scipy", "scikit-learn", "pillow", "pluggy",
            "pydantic", "numba", "llvmlite")  # fmt: skip


def read(out: Path, wanted: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what a run's folder says of some machines, by their hashes; what cannot be read is left out."""
    environments = {}
    for name in sorted(set(wanted) - {""}):
        path = out / FOLDER / f"{name}.json"
        try:
            said = sorted(json.loads(files.content_of(path)).items())
            environments[name] = {plain(key): plain(value) for key, value in said}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            files.leave_out(path, error)
    return environments


@lru_cache(maxsize=1)
def describe() -> dict[str, str]:
    """Return the description; probes no GPU and imports no torch."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        **versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Return the names of the CUDA devices. Imports torch."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
