"""Measure the overhead of a cell, and the gain of a second worker, on this machine and through Dask.

python benchmarks/sweep.py                     # ten minutes of two idle cores; prints the tables of RESULTS.md
python benchmarks/sweep.py --part grouped      # one part

The number of cells that run at the same time is computed from the records. Other work on the machine slows all cells
and does not change this number. The CPU seconds of a cell show whether cells slow each other down.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from sparsebench_dask.cluster import Cluster, connect
from timing import ratio, table, turns

from sparsebench.plan import plan as planner
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Execution, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.runner import run as runs
from sparsebench.runner.engines import Queue, in_workers
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.process import descendants
from sparsebench.runner.progress import Callbacks

TRIVIAL = "theory:steps=1,test=1,tokens=5"
BUSY = "theory:steps={steps},test=20,tokens=20,lr=1e-9"
WARM = 4
"""Number of first records before workers count as warm, and of last records that are ignored."""


def jobs_of(task: str, number: int) -> list[Job]:
    """Return the dense cells of a task."""
    jobs = expand(Request(tasks=(task,), n_train=(4,), seeds=number), Registry())
    return [job for job in jobs if job.label == "dense"]


def overhead(number: int) -> str:
    """Time trivial cells by the intervals between records."""
    rows: list[tuple[object, ...]] = [("the cells alone", *bare(number), "", "")]
    for name, workers in (("inline", 0), ("one warm worker", 1)):
        with tempfile.TemporaryDirectory() as folder:
            marks: list[tuple[float, float, float, float]] = []

            def note(record: Record, marks: list[tuple[float, float, float, float]] = marks) -> None:
                now = time.perf_counter(), record.seconds
                marks.append((*now, time.process_time(), cpu_seconds_of_workers()))

            request = Request(tasks=(TRIVIAL,), n_train=(4,), seeds=number // 4)
            plan = planner.plan(request, planner.Files(), Registry(), Path(folder), "missing")
            execution, callbacks = Execution(device="cpu", jobs=workers), Callbacks(on_record=note)
            runs.carry_out(plan, execution, Registry(), Path(folder), callbacks)
        pairs = list(zip(marks[WARM:-1], marks[WARM + 1 :], strict=True))
        here = statistics.median(then[2] - before[2] for before, then in pairs)
        there = (marks[-2][3] - marks[WARM][3]) / (len(pairs) - 1)
        wall = statistics.median(then[0] - before[0] for before, then in pairs)
        beyond = statistics.median(then[0] - before[0] - then[1] for before, then in pairs)
        shown = (f"{1e3 * x:.1f}" for x in (here, there, wall, beyond))
        rows.append((name, len(pairs), *shown))
    headers = [
        "engine",
        "cells",
        "CPU-ms a cell here",
        "in the worker",
        "wall-ms a cell",
        "of these outside of the cell",
    ]
    return table(headers, rows)


def bare(number: int) -> tuple[int, str, str]:
    """Run trivial cells without engine and store; return their number and the median of their CPU milliseconds."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import deterministic, run_cells

    jobs = expand(Request(tasks=(TRIVIAL,), n_train=(4,), seeds=number // 4), Registry())
    registry, used = Registry(), list[float]()
    with tempfile.TemporaryDirectory() as folder, deterministic():
        for job in jobs:
            start = time.process_time()
            list(run_cells([job], registry, Context(RunEnvironment(out=Path(folder), device="cpu"))))
            used.append(time.process_time() - start)
    return len(used) - WARM, f"{1e3 * statistics.median(used[WARM:]):.1f}", ""


def cpu_seconds_of_workers() -> float:
    """Return the CPU seconds of the worker processes of this process so far."""
    ticks = 0
    for pid in descendants(os.getpid()):
        try:
            if b"sparsebench.runner.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ticks += sum(
                    map(int, Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13])
                )
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def at_a_time(records: Iterator[Record], number: int) -> tuple[float, float]:
    """Return the mean number of cells that run at the same time in warm workers, and the CPU seconds per cell."""
    spans, marks = list[tuple[float, float]](), list[tuple[float, float]]()
    for record in records:
        assert record.status == "ok", record.failure
        start = datetime.fromisoformat(record.started).timestamp()
        spans.append((start, start + record.seconds))
        marks.append((time.time(), cpu_seconds_of_workers()))
    assert len(spans) == number
    (begin, used), (end, used_then) = marks[WARM], marks[-1 - WARM]
    inside = [max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans]
    return sum(inside) / (end - begin), (used_then - used) / (number - 1 - 2 * WARM)


def second_worker(number: int, steps: int) -> str:
    """Compare one worker with two."""
    rows = []
    jobs = jobs_of(BUSY.format(steps=steps), number)
    for name, run in (("local", local), ("Dask on loopback", dask)):
        found = [at_a_time(run(jobs, workers), number) for workers in (1, 2)]
        (alone, cpu), (both, cpu_then) = found
        speed = both / alone * cpu / cpu_then
        rows.append((name, f"{alone:.2f}", f"{both:.2f}", f"{cpu:.2f}", f"{cpu_then:.2f}", f"{speed:.2f}"))
    headers = ["engine", "cells at a time, 1 worker", "2 workers", "CPU-s a cell, 1 worker", "2 workers", "speed-up"]
    return table(headers, rows)


def local(jobs: Sequence[Job], workers: int) -> Iterator[Record]:
    """Yield records of local worker processes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = RunEnvironment(out=Path(folder), device="cpu")
        yield from in_workers(workers, Queue(jobs), environment)


def dask(jobs: Sequence[Job], workers: int) -> Iterator[Record]:
    """Yield records of local Dask workers."""
    with tempfile.TemporaryDirectory() as folder, on_loopback(workers, folder) as cluster:
        yield from cluster.records(Queue(jobs), RunEnvironment(out=Path(folder) / "out", device="cpu"))


def on_loopback(workers: int, folder: str) -> partial[Cluster]:
    """Return a context manager of a local cluster of Dask workers."""
    from contextlib import contextmanager

    from distributed import LocalCluster

    @contextmanager
    def started() -> Iterator[Cluster]:
        with (
            LocalCluster(
                n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50,
                local_directory=folder, host="127.0.0.1",
            ) as here,
            connect(here.scheduler_address, "cpu") as cluster,
        ):  # fmt: skip
            cluster.client.wait_for_workers(workers)
            yield cluster

    return started()  # type: ignore[return-value]


KINDS = (
    ("theory", "theory", 8, 6),
    ("overfitting", "overfitting:signal=64,steps=60", 16, 2),
    ("spatial", "spatial:steps=150", 64, 1),
    ("composite", "composite:epochs=1,pretrain_epochs=0", 200, 1),
)
"""Cells whose data take different times to draw: name, task, training samples, repetitions."""


def grouped(rounds: int) -> str:
    """Compare cells that reuse the data of the previous cell with cells that draw new data, in one process."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import deterministic, run_cells

    rows: list[tuple[object, ...]] = []
    for name, task, n_train, seeds in KINDS:
        registry = Registry()
        jobs = expand(Request(tasks=(task,), n_train=(n_train,), seeds=seeds), registry)
        jobs.sort(key=lambda job: job.cell.draw)

        def run(anew: bool, jobs: list[Job] = jobs, registry: Registry = registry) -> None:
            with tempfile.TemporaryDirectory() as folder, deterministic():
                context = Context(RunEnvironment(out=Path(folder), device="cpu"))
                for job in jobs:
                    if anew:
                        trusted, context = context.trusted, Context(context.environment)
                        context.trusted = trusted
                    (record,) = run_cells([job], registry, context)
                    assert record.status in ("ok", "unsupported")

        variants = {
            "drawn anew": partial(run, True),
            "grouped": partial(run, False),
            "drawn anew again": partial(run, True),
        }
        seconds = turns(variants, rounds)
        share = len(jobs) / len({job.cell.draw for job in jobs})
        each = (1e3 * statistics.median(seconds[variant]) / len(jobs) for variant in ("drawn anew", "grouped"))
        ratios = (ratio(seconds["drawn anew"], seconds[other]) for other in ("grouped", "drawn anew again"))
        rows.append((name, len(jobs), f"{share:.0f}", *(f"{x:.1f}" for x in each), *(f"{x:.3f}" for x in ratios)))
    headers = ["cells of", "cells", "with the same data", "CPU-ms a cell, drawn anew", "grouped", "speed-up", "A/A"]
    return table(headers, rows)


def lost_worker(number: int, steps: int) -> str:
    """Kill one of two Dask workers in the middle of a run."""
    jobs, begun = jobs_of(BUSY.format(steps=steps), number), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, on_loopback(2, folder) as cluster:
        pids, found = list(cluster.client.run(os.getpid).values()), list[Record]()
        environment = RunEnvironment(out=Path(folder) / "out", device="cpu")
        for record in cluster.records(Queue(jobs, on_progress=lambda cells, share: begun.update(cells)), environment):
            found.append(record)
            if len(found) == number // 2:
                os.kill(pids[0], signal.SIGKILL)
    ok = len({record.cell_id for record in found if record.status == "ok"})
    again = sum(times > 1 for times in begun.values())
    return table(["cells", "records", "ok", "begun more than once"], [(number, len(found), ok, again)])


def driver(numbers: Sequence[int]) -> str:
    """Measure the memory of runs of trivial cells through Dask, whose scheduler is another process."""
    rows: list[tuple[object, ...]] = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder, on_loopback(2, folder) as cluster:
            words = [sys.executable, __file__, "--drive", str(number), cluster.client.scheduler.address]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
        seconds, before, *marks = map(float, done.stdout.split())
        shown = (f"{mark:.0f}" for mark in (before, *marks))
        rows.append((f"{number:,}", *shown, f"{1e3 * seconds / number:.0f}"))
        print(*rows[-1], file=sys.stderr)
    return table(["cells", "planned, MiB", *(f"at {tenth}0 %" for tenth in TENTHS), "wall-ms a cell"], rows)


TENTHS = (1, 3, 5, 7, 9, 10)


def drive(number: int, address: str) -> None:
    """Run `number` trivial cells; print the seconds, and the resident MiB after planning and at some tenths."""
    with tempfile.TemporaryDirectory() as folder, connect(address, "cpu") as cluster:
        request = Request(tasks=(TRIVIAL,), n_train=(4,), seeds=number // 4)
        plan = planner.plan(request, planner.Files(), Registry(), Path(folder), "missing")
        seen, marks, at, start = 0, [resident()], {number * tenth // 10 for tenth in TENTHS}, time.monotonic()

        def note(record: Record) -> None:
            nonlocal seen
            seen += 1
            if seen in at:
                marks.append(resident())

        runs.carry_out(
            plan, Execution(device="cpu"), Registry(), Path(folder), Callbacks(on_record=note), cluster.records
        )
    print(time.monotonic() - start, *marks)


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=24)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--part", action="append", choices=("overhead", "second", "lost", "grouped", "memory"))
    parser.add_argument("--many", type=int, nargs="+", default=(1000, 2000), help="cells of the part on memory")
    asked = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1"})
    print(f"load {os.getloadavg()[0]:.1f}\n")
    parts = {
        "overhead": partial(overhead, 200),
        "second": partial(second_worker, asked.cells, asked.steps),
        "lost": partial(lost_worker, asked.cells, asked.steps),
        "grouped": partial(grouped, 3),
        "memory": partial(driver, asked.many),
    }
    for name in asked.part or parts:
        print(parts[name](), end="\n\n")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        drive(int(sys.argv[2]), sys.argv[3])
    else:
        main()
