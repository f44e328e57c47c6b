"""The machine and the libraries a record was made with."""

from __future__ import annotations

import os
import platform
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

FOLDER = "environments"
PACKAGES = ("sparsebench", "torch", "timm", "torchvision", "numpy", "scipy", "scikit-learn", "pillow", "pluggy",
            "pydantic", "numba", "llvmlite")  # fmt: skip


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
