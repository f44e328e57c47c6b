"""On what cells run: the machine, its devices, where each worker is, and how a cell has its device for itself."""

from __future__ import annotations

import fcntl
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

from sparsebench.errors import UserError
from sparsebench.plan.plan import Plan
from sparsebench.tasks.sources.cache import cores

MOST_WORKERS = 16
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOOK = 0.2
"""Seconds between two looks whether it is one's turn."""
PACKAGES = ("sparsebench", "torch", "timm", "torchvision", "numpy", "scipy", "scikit-learn", "pillow", "pluggy",
            "pydantic", "numba", "llvmlite")  # fmt: skip
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT",
)  # fmt: skip
"""Variables by which the libraries compute otherwise. Numbers of threads are not among them: a cell has one."""
NUMBERS = {"tf32": "off", "kernels": "deterministic where torch has them, but attention's gradients on a GPU"}
"""How every cell computes, whatever the machine's own settings are; see `run_cell.one_thread`."""


def workers_for(plan: Plan, device: str, jobs: int | None, exclusive: bool = False) -> int:
    """Return how many worker processes a run has: as asked, or one a core, or one a GPU; 0 is this process.

    Raises:
        UserError: with `exclusive`, more than the one of this machine, or than one a GPU.
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
    """Return "cpu", "cuda:i" for one GPU or "cuda" for several, for auto, cpu, cuda or cuda:i.

    Raises:
        UserError: another word, or a CUDA device that is not there.
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
    """Return how many CUDA devices torch sees here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def variables() -> dict[str, str]:
    """Return the variables of a run's workers: those of this process, one thread, and where it finds modules."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # in each test another
    return {"KMP_DUPLICATE_LIB_OK": "True"} | env | THREADS | {"PYTHONPATH": path}  # as scikit-learn's import sets it


def places(device: str, workers: int) -> list[dict[str, str]]:
    """Return, for each worker of a run, its variables besides those of the run.

    A worker on a GPU sees that one alone, as "cuda:0", so that what a strategy puts on "cuda" is where its cell is.
    Workers on "cuda" are spread over all GPUs that this process sees. A GPU is called as CUDA_VISIBLE_DEVICES lists
    it, by number, UUID or MIG, or else by its number.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        workers: how many.
    """
    if device == "cpu":
        return [{} for _ in range(workers)]
    listed, seen = os.environ.get("CUDA_VISIBLE_DEVICES"), gpus()
    names = [str(i) for i in range(seen)] if listed is None else [name.strip() for name in listed.split(",")][:seen]
    _, _, number = device.partition(":")
    chosen = [names[int(number)]] if number else names
    return [{"CUDA_VISIBLE_DEVICES": chosen[i % len(chosen)]} for i in range(workers)]


def first_of(device: str) -> str:
    """Return the device of a process that has one only."""
    return "cuda:0" if device == "cuda" else device


@contextmanager
def turn(device: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for one's turn and have it: no other turn at the same time on this machine, or on this GPU.

    A cell on the CPU has the machine for itself, one on a GPU that GPU, with no cell on the CPU beside it. Turns end
    with the process, however it ends. They are known to those who have the same folder for temporary files.

    Args:
        device: "cpu" or "cuda:i".
        on_wait: called now and then meanwhile.
    """
    if device == "cpu":
        with _lock("machine", fcntl.LOCK_EX, on_wait):
            yield
        return
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    with _lock("machine", fcntl.LOCK_SH, on_wait), _lock(gpu, fcntl.LOCK_EX, on_wait):
        yield


@contextmanager
def _lock(name: str, kind: int, on_wait: Callable[[], None]) -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"sparsebench-{name}.lock"
    try:
        try:
            file = os.open(path, os.O_RDONLY)  # with O_CREAT Linux refuses the files of others in /tmp
        except FileNotFoundError:
            file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
            os.fchmod(file, 0o644)  # for all users
    except OSError as error:
        step = "remove it, or set TMPDIR"
        raise UserError(f"--exclusive cannot lock {path}", got=error.strerror, next_step=step) from error
    try:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(LOOK)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a copy of this process may have the file open too
        os.close(file)


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Return what the machine and the libraries are that a record is made with; probes no GPU. Imports torch.

    Settings are in it where they are set, as most are nowhere.
    """
    import torch

    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **NUMBERS,
        **{name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        **{name: metadata.version(name) for name in PACKAGES},
    }


def _processor() -> str:
    with suppress(OSError):  # of another system than Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
