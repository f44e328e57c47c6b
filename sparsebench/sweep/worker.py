"""A worker process: reads a list of jobs a line, answers one record a line, leaves when its input ends."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from sparsebench.plugin.registry import Registry
from sparsebench.sweep.job import Job

JOBS = TypeAdapter(list[Job])

THREAD_LIMIT = 1
"""Sums of floating-point numbers depend on how they are split over threads, so a cell has one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch deterministic for a while: one thread, no TF32, deterministic kernels where there are any."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    # cuDNN's convolutions are the one place where TF32 is on unless told otherwise.
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    precision = convolutions.fp32_precision
    torch.set_num_threads(THREAD_LIMIT)
    torch.use_deterministic_algorithms(True, warn_only=True)
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        convolutions.fp32_precision = precision


def main(setting: dict[str, Any]) -> None:
    """Answer jobs until the input ends; then leave at once, even in the middle of a cell."""
    # Whatever a strategy prints goes to the log: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs), daemon=True).start()

    from sparsebench.sweep.prepare import Context
    from sparsebench.sweep.run_cell import run_cells

    locations = {name: Path(path) for name, path in setting["locations"].items()}
    registry = Registry()
    context = Context(Path(setting["out"]), setting["device"], locations, setting["checkpoint"])
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            for record in run_cells(JOBS.validate_json(jobs.get()), registry, context):
                answers.write(record.model_dump_json().encode() + b"\n")
                answers.flush()


def _listen(source: BinaryIO, jobs: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
