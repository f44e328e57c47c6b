"""Run cells without a plan, or a plan without a request, in this process or in worker processes."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measured import TINY

from sparsebench.plan import plan as planner
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request, Rerun, values_of
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.runner import run as runs
from sparsebench.runner.engines import Engine, Queue, in_process, in_workers
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.progress import SILENT, Callbacks


def planned(out: Path, rerun: Rerun = "missing", files: Files | None = None, **options: Any) -> Plan:
    """Return the plan of the tiny suite, with four training samples and one repetition by default."""
    request = Request(**{"suite": TINY, "n_train": (4,), "seeds": 1} | options)
    return planner.plan(request, files or Files(), Registry(), out, rerun)


def jobs_of(*plugins: str, **options: Any) -> list[Job]:
    """Return the jobs of the tiny suite, with 4 and 8 training samples and one repetition by default."""
    return expand(Request(plugins=plugins, **({"suite": TINY, "n_train": (4, 8), "seeds": 1} | options)), Registry())


def inline(
    jobs: Sequence[Job], registry: Registry, out: Path, checkpoint: float = 60.0, exclusive: bool = False
) -> Iterator[Record]:
    """Yield the record of each job, run in this process."""
    environment = RunEnvironment(out, "cpu", execution=Execution(checkpoint=checkpoint, exclusive=exclusive))
    return in_process(registry, Queue(jobs), environment)


def local(
    jobs: Sequence[Job], workers: int, out: Path, most: int = 1, locations: Mapping[str, Path] = {}, **limits: Any
) -> Generator[Record, None, None]:
    """Yield the record of each job, run by worker processes in batches of up to `most` jobs."""
    return in_workers(workers, Queue(jobs, most), RunEnvironment(out, "cpu", locations, Execution(**limits)))


def run_without_board(*plugins: str, out: Path, **options: Any) -> None:
    """Run the missing cells of the options of `sparsebench.run`, by default in this process, and write no board.

    For tests that read the records, or judge them in their own way: a board takes longer than some tiny cells.
    """
    values = values_of({"plugins": plugins, "device": "cpu", "jobs": 0, **options})
    runs.run_missing(*values, Registry(), out)


def execute(
    plan: Plan,
    registry: Registry,
    out: Path,
    workers: int = 0,
    on_record: Callable[[Record], None] = SILENT.on_record,
    on_stop: Callable[[], None] = SILENT.on_stop,
    engine: Engine | None = None,
    rerun: Rerun = "missing",
) -> None:
    """Run the missing cells of a plan."""
    execution, callbacks = (
        Execution(device="cpu", jobs=workers, rerun=rerun),
        Callbacks(on_record=on_record, on_stop=on_stop),
    )
    runs.carry_out(plan, execution, registry, out, callbacks, engine)
