"""Running cells on the workers of a Dask scheduler. Dask's settings say how often it repeats lost tasks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from sparsebench import __version__
from sparsebench.errors import UserError, one_line
from sparsebench.plan.jobs import Job
from sparsebench.records import manifests
from sparsebench.records.record import Failure, Record
from sparsebench.records.store import Store
from sparsebench.runner.devices import machine, places
from sparsebench.runner.engines import Queue, Supervisor
from sparsebench.runner.environment import RunEnvironment

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Seconds to wait for the answer of a scheduler."""
LEAST_TASKS, TASKS_PER_SLOT = 8, 2
"""Dask tasks that the scheduler has at a time: LEAST_TASKS, or more if TASKS_PER_SLOT for each free place are more."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks whether a Dask task was cancelled."""
GPU = "GPU"
"""The name of the GPU among a Dask worker's resources: `dask worker --resources GPU=1`."""


def answer(environment: RunEnvironment, jobs: Sequence[Job], version: str) -> tuple[list[Record], dict[str, str]]:
    """Return the records of cells, and the environment of this machine; runs in a thread of a Dask worker.

    The cells run in a worker process of the Dask worker, as on one machine. It is ended if the Dask task is cancelled.
    """
    from distributed import get_worker

    dask = get_worker()
    if version != __version__:
        what = f"{dask.address} on {socket.gethostname()} has another version of sparsebench"
        raise UserError(what, got=__version__, allowed=version)
    task, over = dask.get_current_task(), threading.Event()
    (place,) = places(environment.device, 1)
    name = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    supervisor = Supervisor(environment, name, place, lambda cells, share: None)

    def watch() -> None:
        while not over.wait(CHECK_INTERVAL):
            state = dask.state.tasks.get(task)
            if state is None or state.state != "executing":
                supervisor.kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        return [record for _, record in supervisor.records(list(jobs))], machine()
    finally:
        over.set()
        supervisor.end()


class Cluster:
    """A connection to a Dask scheduler.

    Args:
        client: a `distributed.Client`.
        device: "cpu" or "cuda".
    """

    def __init__(self, client: Any, device: str):
        self.client, self.device = client, device

    def slots(self) -> int:
        """Return how many cells can run at once: the threads of all Dask workers, or the GPUs in their resources."""
        infos = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return sum(int(info["nthreads"] if self.device == "cpu" else info["resources"].get(GPU, 0)) for info in infos)

    def records(self, queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
        """Yield the record of each job as soon as it is complete; see `Engine`.

        A cell counts as begun when it is submitted. If more Dask workers die with a cell than the scheduler allows, its
        record says `crashed`.

        Raises:
            UserError: a worker cannot run cells, or the scheduler is lost.
        """
        places = {name: path.resolve() for name, path in environment.locations.items()}
        environment = replace(environment, out=environment.out.resolve(), locations=places)
        run = _Run(self, environment, queue)
        try:
            while (result := run.next()) is not None:
                for job, record in run.records_of(*result):
                    yield record
                    queue.done(job)
        finally:
            with suppress(Exception):  # the scheduler may be gone
                self.client.cancel(list(run.futures), force=True)


class _Run:
    """The submitted jobs of a run."""

    def __init__(self, cluster: Cluster, environment: RunEnvironment, queue: Queue):
        from distributed import as_completed

        self.cluster, self.environment, self.queue = cluster, environment, queue
        self.store = Store(environment.out)
        self.futures: dict[Any, list[Job]] = {}
        self.coming = as_completed(with_results=True, raise_errors=False, loop=cluster.client.loop)

    def next(self) -> tuple[Any, Any] | None:
        """Submit jobs until the scheduler has enough; return the next finished future and its result, or None."""
        try:
            slots = self.cluster.slots()
            if not slots:
                log.warning("waiting for a worker%s", "" if self.cluster.device == "cpu" else " with a GPU")
            enough = max(LEAST_TASKS, TASKS_PER_SLOT * slots)
            while len(self.futures) < enough:
                jobs = self.queue.take(wait=not self.futures)
                if not jobs:
                    break
                self._submit(jobs)
            return next(self.coming) if self.futures else None
        except UserError:
            raise
        except Exception as error:  # a client without its scheduler raises various errors
            raise UserError(f"the scheduler is lost: {error}", next_step="the same command continues") from error

    def _submit(self, jobs: list[Job]) -> None:
        resources = {} if self.cluster.device == "cpu" else {"resources": {GPU: 1}}
        future = self.cluster.client.submit(answer, self.environment, jobs, __version__, pure=False, **resources)
        self.futures[future] = jobs
        self.coming.add(future)
        self.queue.on_progress([job.cell.id for job in jobs], 0.0)

    def records_of(self, future: Any, result: Any) -> list[tuple[Job, Record]]:
        """Return the jobs of a finished Dask task with their records.

        If Dask workers died, several jobs are submitted again one by one, and a single job has crashed.
        """
        from distributed import KilledWorker

        jobs = self.futures.pop(future)
        if future.status == "finished":
            records, machine_of_records = result
            self.store.keep(manifests.ENVIRONMENTS, machine_of_records)
            of_cell = {record.cell_id: record for record in records}
            return [(job, of_cell[job.cell.id]) for job in jobs]
        if future.status != "error":
            raise UserError("the scheduler is lost, or has dropped a cell", next_step="the same command continues")
        error = result[1] if isinstance(result, tuple) else result
        if not isinstance(error, KilledWorker):
            raise UserError(f"a worker of the cluster cannot run cells: {one_line(error)}") from error
        if len(jobs) > 1:
            for job in jobs:
                self._submit([job])
            return []
        failure = Failure(reason=f"workers of the cluster were lost with this cell: {one_line(error)}", kind="crashed")
        return [(jobs[0], jobs[0].record_of_failure("crashed", failure))]


@contextmanager
def connect(address: str, device: str) -> Iterator[Cluster]:
    """Connect to a Dask scheduler.

    Args:
        address: the address of the scheduler, e.g. tcp://HOST:PORT.
        device: "cpu", or "cuda" for workers with GPUs.

    Raises:
        UserError: Dask is not installed, or no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError("Dask is not installed", next_step="pip install 'sparsebench[cluster]'") from error
    logging.getLogger("distributed").setLevel(logging.WARNING)  # by default it logs each connection
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(f"no Dask scheduler answers at {address}: {' '.join(str(error).split())}") from error
    with client:
        yield Cluster(client, device)
