"""A worker process: it is given its setting, then lists of jobs, and answers a record for each."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from sparsebench.plan.job import Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.runner import environment
from sparsebench.runner.devices import turn
from sparsebench.runner.process import Line, Message, forget_peak, peak

LONGEST = 1e8
"""Seconds; timers take no more than some hundred years."""


THREAD_LIMIT = 1
"""Sums of floating-point numbers depend on how they are split over threads, so a cell has one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch deterministic for a while: one thread, no TF32, deterministic kernels where there are any."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    memory: Any = torch.utils.deterministic
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), convolutions.fp32_precision
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(THREAD_LIMIT)
    # As use_deterministic_algorithms(True, warn_only=True), which first imports torch's compiler for seconds.
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = False  # costs a kernel for each new tensor
    convolutions.fp32_precision = "ieee"  # the one place where TF32 is on unless told otherwise
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        convolutions.fp32_precision = before[2]
        memory.fill_uninitialized_memory = filled


def main(line: Line) -> None:
    """Answer jobs until the line is closed, or memory or the device is not what the next cell needs."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import run_cells

    with suppress(OSError):  # Linux, if it lacks memory, chooses this process, and not the run or somebody else's
        Path("/proc/self/oom_score_adj").write_text("900", encoding="utf-8")
    faulthandler.enable()  # a crash says in the log where it was
    setting: Setting = line.recv()
    registry = Registry()
    context = Context(setting, True, lambda cell_id, share: line.say(Message(at=(cell_id,), share=share)))

    def begin(jobs: Sequence[Job]) -> None:
        forget_peak()
        if timeout := setting.limits.timeout:  # shortly before it is killed, even if it holds the interpreter's lock
            faulthandler.dump_traceback_later(min(timeout - min(1.0, timeout / 4), LONGEST))
        line.say(Message(at=tuple(job.cell.id for job in jobs)))

    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment.describe()  # as it is before strangers' code is here
        line.say(Message())
        while True:
            jobs: list[Job] = line.recv()
            # Who waits says so: no second of it is a cell's.
            with turn(setting.device, lambda: line.say(Message())) if setting.limits.exclusive else nullcontext():
                out_of_memory = False
                for done, record in enumerate(run_cells(jobs, registry, context, begin), 1):
                    faulthandler.cancel_dump_traceback_later()
                    out_of_memory = out_of_memory or record.status == "oom"
                    # Cells that were trained together are all trained by now.
                    unfit = (out_of_memory and done == len(jobs)) or device_is_lost(setting.device)
                    line.say(Message(record=record.model_copy(update={"memory": peak()}), unfit=unfit))
                    if unfit:
                        return


def device_is_lost(device: str) -> bool:
    """Say whether a CUDA device answers nothing but errors from now on, in this process."""
    if not device.startswith("cuda"):
        return False
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
