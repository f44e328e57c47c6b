"""A bad strategy affects its own cells only; the same command repairs missing weights."""

import logging
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import COMPOSITE, what_was_measured
from plugin_files import write_strategy
from processes import processes_of
from running import execute, inline, jobs_of, local, planned

from sparsebench import seeds
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record
from sparsebench.runner.engines import Queue, in_process
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context
from sparsebench.runner.run_cell import run_cells

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

BAD = ("clings", "allocates", "forks", "closes", "scribbles", "segfaults", "leaves", "prints")
GOOD = ("dense", "random", "oracle", "anti_oracle")
ORPHANS = """
if not os.environ.get("IT_LEFT_ONE"):
    os.environ["IT_LEFT_ONE"] = "1"
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
"""
HANGS = "clings"
SECONDS = 20.0
"""The time limit of the cell that hangs. Even on a slow machine it hangs before."""
MEMORY = int(1.25 * 2**30)


@pytest.fixture(scope="module")
def run(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], Path]:
    """Return the records of bad strategies and of good ones that run after them, by strategy, and the folder."""
    out = tmp_path_factory.mktemp("contained")
    orphans = write_strategy(out / "orphans.py", ORPHANS, "import os, time")
    plugins = (*(str(samples / f"{name}.py") for name in BAD), str(orphans))
    jobs = jobs_of(*plugins, n_train=(4,))
    records, hangs = list[Record](), [job for job in jobs if job.label == HANGS]
    beside = threading.Thread(
        target=lambda: records.extend(local(hangs, 1, out / "hangs", memory_limit=MEMORY, timeout=SECONDS))
    )
    beside.start()
    records += local([job for job in jobs if job.label != HANGS], 1, out, memory_limit=MEMORY)
    beside.join()
    assert len(records) == len(plugins) + len(GOOD)
    return {record.label: record for record in records}, out


def reason(record: Record) -> str:
    assert record.failure is not None
    return record.failure.reason


@pytest.mark.slow
def test_each_cell_has_one_record_and_the_good_ones_are_as_ever(run: tuple[dict[str, Record], Path]) -> None:
    records, out = run
    assert set(records) == {*BAD, "orphans", *GOOD}
    for record in inline(jobs_of(n_train=(4,)), Registry(), out / "alone"):
        assert what_was_measured(records[record.label]) == what_was_measured(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "statuses", "says"),
    [
        ("clings", {"timeout"}, "--timeout 20"), ("allocates", {"oom"}, "over the --memory-limit of 1.25 GiB"),
        ("closes", {"crashed"}, ""), ("scribbles", {"crashed"}, ""), ("segfaults", {"crashed"}, "SIGSEGV"),
        ("leaves", {"crashed", "failed"}, "3"),
    ],
)  # fmt: skip
def test_what_ends_a_cell_is_said(
    run: tuple[dict[str, Record], Path], name: str, statuses: set[str], says: str
) -> None:
    record = run[0][name]
    assert record.status in statuses and says in reason(record) and record.metrics == {} and record.seconds > 0
    if name == HANGS:
        assert record.seconds >= SECONDS
        assert record.failure is not None and 'clings.py", line' in record.failure.traceback


@pytest.mark.slow
def test_copies_of_the_process_and_lines_that_are_printed_are_no_answers(run: tuple[dict[str, Record], Path]) -> None:
    records, out = run
    assert records["forks"].status == records["prints"].status == "ok" and processes_of(out) == []
    log = (out / "logs" / "worker-0.log").read_text()
    assert "a line\nand another\n" in log and '{"not": "a record"}\n' in log


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_only_a_strategys_interrupt_is_a_failure(
    job_of: Callable[..., list[Job]], samples: Path, tmp_path: Path, alone: bool
) -> None:
    """What Ctrl-C raises is a failure if only a strategy can have raised it."""
    (job,) = job_of(str(samples / "interrupts.py"), n_train=4)
    context = Context(RunEnvironment(out=tmp_path, device="cpu"), alone=alone)
    if alone:
        (record,) = run_cells([job], Registry(), context)
        assert record.status == "failed" and "KeyboardInterrupt" in reason(record)
    else:
        with pytest.raises(KeyboardInterrupt):
            list(run_cells([job], Registry(), context))


GELU = "torch.nn.GELU.forward = lambda self, x: x"
KINDS = {
    "at_import": (f"{GELU}; sparsebench.seeds.seed_of = lambda *names: 3", "pass"),
    "patches_judge": (
        "", "import sparsebench.training.evaluation as e; f = e.predictions; e.predictions = lambda *x: f(*x)"
    ),
    "hooks": ("", "torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out)"),
    "optimiser": ("", "torch.optim.AdamW.step = lambda self, closure=None: None"),
    "breaks": ("", "torch.Tensor.norm = lambda *given, **more: 1 / 0"),
    "dtype": ("", "torch.set_default_dtype(torch.float64)"),
    "seeds": ("import random, numpy", "torch.manual_seed(1); numpy.random.seed(1); random.seed(1)"),
    "environment": ("import os", "os.environ['ATEN_CPU_CAPABILITY'] = 'default'; os.environ['MKL_CBWR'] = 'SSE2'"),
    "signals": ("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(600)"),
    "threads": ("import threading, time", "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"),
}  # fmt: skip


def records_of(kinds: dict[str, tuple[str, str]], samples: Path, out: Path) -> dict[str, Record]:
    paths = [samples / "good.py"]
    for name, (first, then) in kinds.items():
        paths.insert(0, write_strategy(out / f"{name}.py", f"import torch; {then}", f"import torch\n{first}"))
    request = Request(suite="quick-scratch", plugins=tuple(map(str, paths)), tasks=(COMPOSITE,), n_train=(20,), seeds=1)
    with pytest.MonkeyPatch.context() as patch:  # files are loaded in this process too
        patch.setattr(torch.nn.GELU, "forward", torch.nn.GELU.forward)
        patch.setattr(seeds, "seed_of", seeds.seed_of)
        jobs = sorted(expand(request, Registry()), key=lambda job: job.label in GOOD)
    return {record.label: record for record in local(jobs, 1, out)}


@pytest.mark.slow
def test_no_kind_of_change_reaches_another(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    clean, records = records_of({}, samples, tmp_path / "clean"), records_of(KINDS, samples, tmp_path)
    own = {"started", "seconds", "memory", "samples", "metrics"}
    for label in (*GOOD, "norm"):
        assert records[label].outcomes == clean[label].outcomes is not None
        assert records[label].model_dump(exclude=own) == clean[label].model_dump(exclude=own)


def test_a_job_has_only_the_files_that_bring_its_strategy_and_task(samples: Path) -> None:
    files = str(samples / "good.py"), str(samples / "brings_task.py")
    jobs = {(job.cell.task.name, job.label): job for job in jobs_of(*files, tasks=("composite", "small"))}
    names = {key: {Path(path).name for path in job.files} for key, job in jobs.items()}
    assert names["composite", "dense"] == set() and jobs["composite", "dense"].code == ()
    assert names["composite", "norm"] == {"good.py"}
    assert names["small", "dense"] == {"brings_task.py"}
    assert names["small", "norm"] == {"good.py", "brings_task.py"}
    assert len(jobs["small", "norm"].code) == 3


ENDS = """
with open({tries!r}, "a") as file:
    file.write("tried\\n")
if len(open({tries!r}).read().split()) <= {times}:
    os.kill(os.getpid(), signal.{how})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "times", "status", "tried"),
    [("SIGKILL", 1, "ok", 2), ("SIGTERM", 1, "ok", 2), ("SIGKILL", 9, "crashed", 2), ("SIGSEGV", 9, "crashed", 1)],
)
def test_a_cell_whose_worker_is_killed_is_tried_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, times: int, status: str, tried: int
) -> None:
    """A cell whose worker is killed is tried once more and one that ends by a fault has crashed."""
    tries = tmp_path / "tries"
    body = ENDS.format(tries=str(tries), how=how, times=times)
    path = write_strategy(tmp_path / "ends.py", body, "import os, signal")
    jobs = [job for job in jobs_of(str(path), n_train=(4,)) if job.label in ("ends", "oracle")]
    with caplog.at_level(logging.WARNING):
        records = {record.label: record for record in local(jobs, 1, tmp_path)}
    assert records["oracle"].status == "ok" and records["ends"].status == status
    warnings = [line for line in caplog.messages if how in line and "ends" in line and "it is tried once more" in line]
    assert len(warnings) == len(caplog.messages) == tried - 1
    if status == "crashed":
        assert how in reason(records["ends"]) and len(tries.read_text().split()) == tried


STARTED: dict[str, Any] = {
    "suite": "quick-scratch", "tasks": ("composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40",),
    "model": "vit:dim=16,depth=2,heads=2", "n_train": (20,),
}  # fmt: skip


def collect(out: Path, disturb: Callable[[Job, Record], Record] = lambda job, record: record) -> dict[str, Record]:
    """Run the request, and pass records of cells that others start from to `disturb`; return the stored records."""
    jobs = {job.cell.id: job for job in planned(out, **STARTED).jobs}

    def disturbed(queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
        for record in in_process(Registry(), queue, environment):
            job = jobs[record.cell_id]
            yield disturb(job, record) if job.keep_weights else record

    execute(planned(out, **STARTED), Registry(), out, engine=disturbed)
    return dict(store.read(out))


def crash(out: Path, job: Job, record: Record) -> Record:
    store.weights_path(out, job.cell.id).unlink()
    return job.record_of_failure("crashed", Failure(reason="the worker was ended by SIGKILL", kind="crashed"))


def tear(out: Path, job: Job, record: Record) -> Record:
    path = store.weights_path(out, job.cell.id)
    path.write_bytes(path.read_bytes()[:-4])
    return record


@pytest.mark.parametrize(("disturb", "first"), [(crash, "crashed"), (tear, "ok")])
def test_a_cell_with_lost_initial_weights_is_skipped(
    tmp_path: Path, disturb: Callable[[Path, Job, Record], Record], first: str
) -> None:
    """What begins with weights that are gone or torn is skipped and the same command runs it."""
    records = collect(tmp_path, partial(disturb, tmp_path))
    assert sorted(record.status for record in records.values()) == sorted([first, *["skipped"] * 4])
    reasons = {record.failure.reason for record in records.values() if record.status == "skipped" and record.failure}
    assert all("the same command" in reason for reason in reasons) and len(reasons) == 1
    assert len(planned(tmp_path, **STARTED).todo) == 5
    assert {record.status for record in collect(tmp_path).values()} == {"ok"}
    assert planned(tmp_path, **STARTED).todo == []
