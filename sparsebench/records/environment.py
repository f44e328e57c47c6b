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

from sparsebench.records import files, store
from sparsebench.text import plain

FOLDER = "environments"
PACKAGES = ("sparsebench", "torch", "timm", "torchvision", "numpy", "scipy", "scikit-learn", "pillow", "pluggy",
            "pydantic", "numba", "llvmlite")  # fmt: skip


SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT",
)  # fmt: skip
"""Variables by which the libraries compute otherwise. Numbers of threads are not among them: a cell has one."""


def read(out: Path, wanted: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what a run's folder says of some machines, by their hashes; what cannot be read is left out."""
    environments, names = {}, {f"{name}.json" for name in set(wanted) - {""}}
    for name, content in store.beside(out, FOLDER).items():
        if name in names:
            try:
                said = sorted(json.loads(content).items())
                environments[name.removesuffix(".json")] = {plain(key): plain(value) for key, value in said}
            except (ValueError, AttributeError, RecursionError) as error:
                files.leave_out(Path(FOLDER, name), error)
    return environments


@lru_cache(maxsize=1)
def describe() -> dict[str, str]:
    """Return the description; probes no GPU. Imports torch.

    Settings are in it where they are set, as most are nowhere.
    """
    import torch

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
        "capability": torch.backends.cpu.get_cpu_capability(),
        **{name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        **versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Return the names of the CUDA devices. Imports torch."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
