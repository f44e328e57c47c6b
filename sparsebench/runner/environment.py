"""The machine and the libraries a record was made with."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("sparsebench", "torch", "timm", "torchvision", "numpy", "scipy", "scikit-learn", "pillow", "pluggy",
            "pydantic", "numba", "llvmlite")  # fmt: skip
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT",
)  # fmt: skip
"""Variables by which the libraries compute otherwise. Numbers of threads are not among them: a cell has one."""
NUMBERS = {"tf32": "off", "kernels": "deterministic where torch has them, but attention's gradients on a GPU"}
"""How every cell computes, whatever the machine's own settings are; see `worker.one_thread`."""


@lru_cache(maxsize=1)
def describe() -> dict[str, str]:
    """Return the description; probes no GPU. Imports torch.

    Settings are in it where they are set, as most are nowhere.
    """
    import torch

    versions = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **NUMBERS,
        **{name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        **versions,
    }


def _processor() -> str:
    with suppress(OSError):  # of another system than Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
