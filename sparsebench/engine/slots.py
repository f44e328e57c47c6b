"""Places for workers: each worker has one device, and one thread on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Slot:
    """Where one worker after another runs.

    Attributes:
        number: from 0.
        device: "cpu" or "cuda:0", as the worker sees it.
        environment: all variables of the worker.
    """

    number: int
    device: str
    environment: Mapping[str, str] = field(repr=False)


def slots(device: str, workers: int, gpus: int = 0, environ: Mapping[str, str] | None = None) -> list[Slot]:
    """Return the places of a run's workers.

    A worker on a GPU sees that one alone, so that what a strategy puts on "cuda" is where its cell is. Workers on
    "cuda" are spread over all GPUs that this process sees.

    Args:
        device: "cpu", "cuda" or "cuda:i".
        workers: how many.
        gpus: the number of GPUs that torch sees here.
        environ: the variables of this process. [os.environ]
    """
    base = dict(os.environ if environ is None else environ) | THREADS
    base["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if device == "cpu":
        return [Slot(i, device, base) for i in range(workers)]
    names = visible(gpus, base.get("CUDA_VISIBLE_DEVICES"))
    _, _, number = device.partition(":")
    chosen = [names[int(number)]] if number else names
    return [Slot(i, "cuda:0", base | {"CUDA_VISIBLE_DEVICES": chosen[i % len(chosen)]}) for i in range(workers)]


def first_of(device: str) -> str:
    """Return the device of a process that has one only."""
    return "cuda:0" if device == "cuda" else device


def visible(gpus: int, listed: str | None) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls each GPU: as it is listed already, number, UUID or MIG, or the number."""
    if listed is None:
        return [str(i) for i in range(gpus)]
    return [name.strip() for name in listed.split(",")][:gpus]
