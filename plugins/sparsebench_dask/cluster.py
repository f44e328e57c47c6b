"""Cells on the workers of a Dask scheduler: one that is there, or one that submits jobs to a batch system."""

from __future__ import annotations

import base64
import json
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from sparsebench.contain.messages import dump
from sparsebench.engine.messages import Question
from sparsebench.engine.queue import Queue, Seconds, most_together, unknown
from sparsebench.engine.setting import OnBegin, Setting, nobody
from sparsebench.engine.stop import Stop
from sparsebench.errors import UserError
from sparsebench.planning.job import Job
from sparsebench.plugin.content import Content
from sparsebench.records import environment, files, store
from sparsebench.records.record import Failure, Record
from sparsebench.version import __version__
from sparsebench_dask import batch_system, worker
from sparsebench_dask.batch_system import TRIES

log = logging.getLogger(__name__)

CONNECT = 5.0
"""Seconds in which a scheduler must answer."""
LEAST, EACH = 16, 2
"""Cells that are with the scheduler at a time: at least, and for each that can run at once."""
COUNT = 2.0
"""Seconds between two looks at how many can run at once."""


Begun = tuple[datetime, float]


class Cluster:
    """A connection to a Dask scheduler.

    Args:
        client: distributed's.
        device: "cpu" or "cuda".
        seconds: what each job is expected to take.
    """

    def __init__(self, client: Any, device: str, seconds: Seconds = unknown):
        self.client, self.device, self.seconds = client, device, seconds

    def slots(self, exclusive: bool = False) -> int:
        """Return how many cells can run at once: threads of Dask workers, or the GPUs that they say they have.

        With `exclusive` a machine has one, unless it is for its GPUs.
        """
        workers = self.client.scheduler_info()["workers"].values()
        if self.device == "cpu" and exclusive:
            return len({each["host"] for each in workers})
        if self.device == "cpu":
            return sum(each["nthreads"] for each in workers)
        return int(sum(each["resources"].get(worker.GPU, 0) for each in workers))

    def records(
        self, jobs: Sequence[Job], setting: Setting, stop: Stop, on_begin: OnBegin = nobody
    ) -> Generator[Record, None, None]:
        """Yield the record of each job as it comes; see `Engine`.

        A cell whose Dask worker is lost is given to another, and after three has a record that says `crashed`. Where
        the scheduler's own setting, `allowed-failures`, lets it begin on a fourth, it is ended there at once. At most a
        few cells for each worker are with the scheduler at a time, whatever there is to do.

        Raises:
            UserError: a worker is not fit for the run, or the scheduler is lost.
        """
        places = {name: path.resolve() for name, path in setting.locations.items()}
        with _proof(setting.out) as proof:
            sent = worker.Sent(
                setting=setting.model_copy(update={"out": setting.out.resolve(), "locations": places}),
                version=__version__, proof=proof, must_share=any(job.after or job.keep_weights for job in jobs),
                files={path: _source(Path(path)) for path in sorted({path for job in jobs for path in job.files})},
            )  # fmt: skip
            queue = Queue(jobs, most_together(self.device), self.seconds)
            run = _Run(self, dump(sent), queue, setting.out, on_begin)
            stop.tell(run.begin_no_more)
            yield from run.records()


class _Run:
    """The jobs of a run on their way to the scheduler and back.

    Attributes:
        open: the jobs of each task that is with the scheduler, by its key.
        begun: when each was begun, as a time and on a clock that nobody sets; several times if workers are lost.
        dropped: tasks that nobody waits for any more.
        lost: how many workers were lost with jobs, by the first one's cell.
    """

    def __init__(self, cluster: Cluster, setting: str, queue: Queue, out: Path, on_begin: OnBegin):
        from distributed import as_completed

        self.cluster, self.client, self.setting, self.queue, self.out = cluster, cluster.client, setting, queue, out
        self.on_begin = on_begin
        self.open: dict[str, list[Job]] = {}
        self.futures: dict[str, Any] = {}
        self.begun: defaultdict[str, list[Begun]] = defaultdict(list)
        self.dropped: set[str] = set()
        self.lost: Counter[str] = Counter()
        self.coming = as_completed(with_results=True, raise_errors=False, loop=self.client.loop)
        self.most, self.counted = LEAST, -COUNT
        self.said: set[str] = set()

    def records(self) -> Iterator[Record]:
        """Yield the record of each job as it comes."""
        topic = worker.topic(self.setting)
        self.client.subscribe_topic(topic, self._hear)
        try:
            self._top_up()
            while self.open:
                future, result = next(self.coming)
                yield from self._records_of(future, result)
                self._top_up()
        finally:
            with suppress(Exception):  # the scheduler may be gone
                self.client.cancel(list(self.futures.values()), force=True)
                self.client.unsubscribe_topic(topic)

    def _top_up(self) -> None:
        """Give the scheduler as many cells as it should have."""
        if time.monotonic() > self.counted + COUNT:
            slots = self._ask(self.cluster.slots)
            self.most, self.counted = max(LEAST, EACH * slots), time.monotonic()
            if not slots:
                self._say(f"no worker{' with a GPU' if self.cluster.device != 'cpu' else ''} is there yet; waiting")
        while len(self.open) < self.most and (jobs := self.queue.take(wait=False)):
            self._submit(jobs)

    def _submit(self, jobs: list[Job]) -> None:
        key = f"sparsebench-{secrets.token_hex(8)}"
        self.open[key] = jobs
        resources = {} if self.cluster.device == "cpu" else {"resources": {worker.GPU: 1}}
        question = dump(Question(jobs=tuple(jobs)))
        submit = partial(self.client.submit, worker.answer, self.setting, question, key=key, pure=False, **resources)
        self.futures[key] = future = self._ask(submit)
        self.coming.add(future)

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Take note, in another thread, of what a worker says that it begins."""
        _, said = event
        key, cells = said["task"], tuple(said["cells"])
        if key not in self.open:
            return
        if cells:
            self.on_begin(cells)
            return
        self.begun[key].append((datetime.now(UTC), time.monotonic()))
        if len(self.begun[key]) > TRIES:
            self._cancel([key])

    def _cancel(self, keys: Sequence[str]) -> None:
        """Take tasks back from the scheduler; in the client's own thread."""
        futures = [self.futures[key] for key in keys if key in self.futures]
        self.client.loop.add_callback(partial(self.client.cancel, futures, force=True, asynchronous=True))

    def begin_no_more(self) -> None:
        """Let what was begun come to its end, and take back the rest."""
        self.queue.close()

        def drop() -> None:
            waiting = [key for key in list(self.futures) if not self.begun.get(key)]
            self.dropped.update(waiting)
            self._cancel(waiting)

        self.client.loop.add_callback(drop)

    def _records_of(self, future: Any, result: Any) -> Iterator[Record]:
        """Yield what a task has come to."""
        key, status = future.key, future.status
        jobs, begun = self.open.pop(key), self.begun.pop(key, [])
        del self.futures[key]
        future.release()
        if key in self.dropped and status != "finished":
            return
        if status == "finished":
            answer = worker.Answer.model_validate_json(result)
            if answer.refused:
                raise UserError(f"the cluster is not fit for this run: {answer.refused}")
            if answer.note:
                self._say(answer.note)
            store.keep(self.out / environment.FOLDER, answer.environment)
            records = list(answer.records)
        elif status == "error" and not self._was_lost(result):
            raise UserError(f"a worker of the cluster cannot run cells: {_error_text(result)}")
        elif status != "error" and len(begun) <= TRIES:
            raise UserError("the scheduler is lost, or has dropped a cell", next_step="the same command goes on")
        else:
            records = []
        left = {job.cell.id: job for job in jobs}
        missing = left.keys() - {record.cell_id for record in records}
        if missing:
            records += self._after_a_loss([left[cell] for cell in left if cell in missing], begun)
        for record in records:
            yield record
            self.queue.done(left[record.cell_id])

    def _was_lost(self, result: Any) -> bool:
        from distributed.scheduler import KilledWorker

        return isinstance(result[1] if isinstance(result, tuple) else result, KilledWorker)

    def _after_a_loss(self, jobs: list[Job], begun: Sequence[Begun]) -> list[Record]:
        """Return records that say `crashed` if too many workers were lost with the jobs, else give them out again."""
        first, now = jobs[0].cell.id, (datetime.now(UTC), time.monotonic())
        self.lost[first] += max(1, len(begun))  # schedulers blame a cell that only waits for a lost worker too
        if self.lost[first] < TRIES:
            self._submit(jobs)
            return []
        failure = Failure(reason=f"{TRIES} workers of the cluster were lost with this cell", kind="crashed")
        since, clock = begun[-1] if begun else now
        seconds = now[1] - clock
        return [job.record_of_failure("crashed", failure, since.isoformat(), seconds) for job in jobs]

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return what the scheduler answers."""
        try:
            return question()
        except Exception as error:  # a client that has lost its scheduler raises this and that
            raise UserError(f"the scheduler is lost: {error}", next_step="the same command goes on") from error

    def _say(self, note: str) -> None:
        if note not in self.said:
            self.said.add(note)
            log.warning("%s", note)


@contextmanager
def connect(
    address: str | None, file: Path | None, workers: int | None, device: str, seconds: Seconds = unknown
) -> Iterator[Cluster]:
    """Connect to the scheduler at an address, or start one that submits jobs as a file says.

    Args:
        address: "tcp://host:port".
        file: see `batch_system.start`.
        workers: how many Dask workers are submitted; with an address they are there already.
        device: "cpu", or "cuda" for workers with GPUs.
        seconds: what each job is expected to take.

    Raises:
        UserError: Dask is not installed, nobody answers, or the file is wrong.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError("Dask is not installed", next_step="pip install 'sparsebench[cluster]'") from error
    logging.getLogger("distributed").setLevel(logging.WARNING)  # its import has set it to tell each connection
    with ExitStack() as stack:
        where: Any = address if file is None else stack.enter_context(batch_system.start(file, workers))
        try:
            client = stack.enter_context(Client(where, timeout=CONNECT, set_as_default=False))
        except (OSError, TimeoutError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"no Dask scheduler answers at {address}: {reason}") from error
        yield Cluster(client, device, seconds)


@contextmanager
def _proof(out: Path) -> Iterator[str]:
    """Put a file into a folder for a while, by which who sees it knows that this is the folder; yield its name."""
    name = f".run-{secrets.token_hex(8)}"
    files.write_whole(out / name, b"")
    try:
        yield name
    finally:
        with suppress(OSError):
            (out / name).unlink()


def _source(path: Path) -> worker.Source:
    content = Content.of_file(path)
    texts = {name: base64.b64encode(held.read_bytes()).decode() for name, held in content.names().items()}
    return worker.Source(sha256=content.sha256, name=path.resolve().relative_to(content.root).as_posix(), files=texts)


def _error_text(result: Any) -> str:
    error = result[1] if isinstance(result, tuple) else result
    cause = getattr(error, "__cause__", None)
    text = f"{error}" if cause is None else f"{error} ({cause})"
    return json.dumps(" ".join(text.split())[:300])
