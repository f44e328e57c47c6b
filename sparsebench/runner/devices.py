"""Devices: the number and places of workers, exclusive use of a device, and the machine that records have."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.plan.plan import Plan
from sparsebench.tasks.sources.cache import cores

MOST_WORKERS = 16
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOCK_INTERVAL = 0.2
"""Seconds between two attempts to lock a device."""
PACKAGES = (
    "sparsebench",
    "torch",
    "timm",
    "torchvision",
    "numpy",
    "scipy",
    "scikit-learn",
    "pillow",
    "pluggy",
    "pydantic",
    "numba",
    "llvmlite",
)
NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
    "NUMBA_DISABLE_JIT",
)
"""Environment variables that change the libraries' results. Thread counts are left out: a cell has one thread."""
NUMERIC_SETTINGS = {"tf32": "off", "kernels": "deterministic where torch has them, but attention's gradients on a GPU"}
"""Numerical settings of every cell, independent of the machine's settings; see `run_cell.deterministic`."""


def workers_for(plan: Plan, device: str, jobs: int | None, exclusive: bool = False) -> int:
    """Return the number of worker processes: `jobs`, or one per core or GPU. 0 runs the cells in this process.

    There are at most as many as cells to run.

    Raises:
        UserError: with `exclusive`, more than one worker on the CPU or more than one per GPU.
    """
    if jobs == 0:
        return 0
    alone = gpus() if device == "cuda" else 1
    most = min(cores(), MOST_WORKERS) if device == "cpu" and not exclusive else alone
    if exclusive and jobs is not None and jobs > alone:
        rule = "one cell at a time on each GPU" if device == "cuda" else "one cell at a time"
        raise UserError(f"--exclusive runs {rule}", got=f"--jobs {jobs}", allowed=f"0 to {alone}")
    return max(1, min(jobs or most, len(plan.todo)))


def resolve_device(device: str) -> str:
    """Resolve auto, cpu, cuda or cuda:i to "cpu", "cuda:i" for one GPU, or "cuda" for several.

    Raises:
        UserError: the text is not one of these, or torch does not see the CUDA device.
    """
    if device == "cpu":
        return device
    kind, _, number = device.partition(":")
    if device != "auto" and (kind != "cuda" or (number and not (number.isascii() and number.isdigit()))):
        raise UserError("--device", got=f"'{device}'", allowed="auto, cpu, cuda, cuda:0, ...")
    available = gpus()
    if device == "auto" and not available:
        return "cpu"
    if int(number or 0) >= available:
        raise UserError(
            f"--device {device}: torch sees {available} CUDA devices here", next_step="use --device cpu or auto"
        )
    return f"cuda:{number or 0}" if number or available == 1 else "cuda"


def gpus() -> int:
    """Return the number of CUDA devices that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def search_path() -> list[str]:
    """Return the folders in which this process finds modules, as absolute paths."""
    return list(map(os.path.abspath, sys.path))


def variables() -> dict[str, str]:
    """Return the environment variables of worker processes: those of this process, one thread, and `search_path`."""
    path = os.pathsep.join(folder for folder in search_path() if os.pathsep not in folder)
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # differs for each test
    # KMP_DUPLICATE_LIB_OK as an import of scikit-learn sets it, so that this import changes nothing.
    return {"KMP_DUPLICATE_LIB_OK": "True"} | env | THREADS | {"PYTHONPATH": path}


def places(device: str, workers: int) -> list[dict[str, str]]:
    """Return, for each worker, the environment variables that only this worker has.

    A worker on a GPU sees only this GPU, as "cuda:0", so tensors that a strategy puts on "cuda" are on the cell's GPU.
    Workers on "cuda" are spread over all GPUs that this process sees. The names of GPUs are those in
    CUDA_VISIBLE_DEVICES (numbers, UUIDs or MIG names) if it is set, otherwise numbers.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        workers: the number of workers.
    """
    if device == "cpu":
        return [{} for _ in range(workers)]
    count = gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")][:count]
    _, _, number = device.partition(":")
    chosen = [names[int(number)]] if number else names
    return [{"CUDA_VISIBLE_DEVICES": chosen[i % len(chosen)]} for i in range(workers)]


def first_of(device: str) -> str:
    """Return the device of a process that uses one device: "cuda" becomes "cuda:0"."""
    return "cuda:0" if device == "cuda" else device


@contextmanager
def turn(device: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for exclusive use of a device ("cpu" or "cuda:i"), and hold it. Call `on_wait` repeatedly while waiting.

    A turn on the CPU excludes all other turns on this machine. A turn on a GPU excludes those on this GPU and on the
    CPU. A turn ends with its process, however that ends. It is known only to processes with the same folder for
    temporary files.
    """
    if device == "cpu":
        with _lock("machine", on_wait):
            yield
        return
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    with _lock("machine", on_wait, shared=True), _lock(gpu, on_wait):
        yield


@contextmanager
def _lock(name: str, on_wait: Callable[[], None], *, shared: bool = False) -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"sparsebench-{name}.lock"
    try:
        try:
            file = os.open(path, os.O_RDONLY)  # with O_CREAT Linux refuses other users' files in /tmp
        except FileNotFoundError:
            file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
            os.fchmod(file, 0o644)  # for all users
    except OSError as error:
        step = "remove it, or set TMPDIR"
        raise UserError(f"--exclusive cannot lock {path}: {error.strerror}", next_step=step) from error
    try:
        while True:
            try:
                files.lock(file, shared=shared)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(LOCK_INTERVAL)
            except OSError as error:
                step = "leave --exclusive out, or set TMPDIR to a folder whose file system has locks"
                raise UserError(f"--exclusive cannot lock {path}: {error.strerror}", next_step=step) from error
        yield
    finally:
        files.unlock(file)
        os.close(file)


@lru_cache(maxsize=1)
def machine() -> dict[str, str]:
    """Return the machine, the library versions and the numerical settings of this process's records.

    Of NUMERIC_VARIABLES only the variables that are set are included. This imports torch, but does not query a GPU.
    """
    import torch

    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **NUMERIC_SETTINGS,
        **{name: os.environ[name] for name in NUMERIC_VARIABLES if os.environ.get(name)},
        **{name: metadata.version(name) for name in PACKAGES},
    }


def _processor() -> str:
    with suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
