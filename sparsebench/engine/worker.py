"""A worker process: reads a list of jobs a line, answers one record a line, leaves when its input ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebench.collector import without_collector
from sparsebench.contain.exclusive import turn
from sparsebench.contain.keeper import end_with_parent
from sparsebench.contain.messages import Line, load
from sparsebench.engine.messages import Message, Question
from sparsebench.engine.setting import Setting
from sparsebench.planning.job import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import environment

if TYPE_CHECKING:
    from sparsebench.contain.health import Health

LONGEST = 1e8
"""Seconds; timers take no more than some hundred years."""


THREAD_LIMIT = 1
"""Sums of floating-point numbers depend on how they are split over threads, so a cell has one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch deterministic for a while: one thread, no TF32, deterministic kernels where there are any."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from sparsebench.contain.process_state import STATE, preserve, put

    settings = {
        "the number of threads": THREAD_LIMIT,
        # As use_deterministic_algorithms(True, warn_only=True), which first imports torch's compiler for seconds.
        "torch's deterministic mode": "warn",
        # cuDNN's convolutions are the one place where TF32 is on unless told otherwise.
        "cuDNN's precision": "ieee",
    }
    with preserve([row for row in STATE if row.name in settings]):
        put(settings)
        yield


def main(setting: Setting, *, strangers: bool) -> None:
    """Answer jobs until the input ends, or a cell leaves the process in a state that the next must not meet.

    Functions are compared too where the cells run code of strangers.
    """
    end_with_parent()
    _end_before_others()
    faulthandler.enable()  # a crash says in the log where it was
    line = Line()

    with without_collector():
        from sparsebench.cells.changed import mark
        from sparsebench.cells.prepare import Context
        from sparsebench.cells.run_cell import run_cells
        from sparsebench.contain.health import Health, device_is_lost
        from sparsebench.contain.memory import forget_peak, peak

    registry = Registry(rehearses=False)
    context = Context(
        setting.out, setting.device, setting.locations, setting.checkpoint,
        alone=True, exclusive=setting.limits.exclusive,
        on_share=lambda cell_id, share: line.say(Message(at=(cell_id,), share=share)),
    )  # fmt: skip

    def begin(jobs: Sequence[Job]) -> None:
        forget_peak()
        _say_where_it_hangs(setting.limits.timeout)
        line.say(Message(at=tuple(job.cell.id for job in jobs)))

    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment.describe()  # as it is before strangers' code is here
        health = Health(line.descriptors, context.device, os.getppid())
        if strangers:
            _watch_functions(health)
        line.say(Message())

        def turns() -> Iterator[list[Job]]:
            for asked in line.jobs:
                # Who waits says so: no second of it is a cell's.
                with turn(context.device, lambda: line.say(Message())) if context.exclusive else nullcontext():
                    yield list(load(Question, asked).jobs)

        for jobs in turns():
            unfit = ""
            for done, record in enumerate(run_cells(jobs, registry, context, begin), 1):
                faulthandler.cancel_dump_traceback_later()
                record = record.model_copy(update={"memory": peak()})
                unfit = unfit or health.trouble(record.failure.kind if record.failure else None)
                record = mark(record, health.changed)
                # Cells that were trained together are all trained by now: what one has left cannot meet another's.
                now = unfit and (done == len(jobs) or device_is_lost(context.device))
                if now:  # said before the answer, after which it is ended
                    sys.stderr.write(f"this worker takes no more cells: {unfit}\n")
                line.say(Message(record=record, unfit=unfit if now else ""))
                if now:
                    os._exit(0)
    os._exit(0)


def _watch_functions(health: Health) -> None:
    with without_collector():
        import sparsebench.training.kernels  # noqa: F401  # what is watched must be there

        health.watch_functions()


def _end_before_others() -> None:
    """Have Linux choose this process if the machine is out of memory, and not the run or somebody else's."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900", encoding="utf-8")


def _say_where_it_hangs(timeout: float) -> None:
    """Print what the process is at shortly before it is killed, even if it holds the interpreter's lock."""
    if timeout:
        faulthandler.dump_traceback_later(min(timeout - min(1.0, timeout / 4), LONGEST))


if __name__ == "__main__":
    main(load(Setting, sys.argv[1]), strangers=len(sys.argv) > 2)
