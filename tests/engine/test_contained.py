"""What a bad strategy does to its own cells, and does not do to others."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import processes_of

from sparsebench import engine
from sparsebench.cells.prepare import Context
from sparsebench.cells.run_cell import run_cell
from sparsebench.planning.expand import expand
from sparsebench.planning.job import Job
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record

BAD = ("clings", "allocates", "forks", "closes", "scribbles")
GOOD = ("dense", "random", "oracle", "anti_oracle")
LEAVES = """
import os, time
from typing import ClassVar
import sparsebench

class Leaves(sparsebench.Strategy):
    name: ClassVar[str] = "leaves"

    def scores(self, view):
        if not os.environ.get("IT_LEFT_ONE"):
            os.environ["IT_LEFT_ONE"] = "1"
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
        return view.tokens.sum(dim=-1)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Leaves]
"""
HANGS = "clings"
SECONDS = 20.0
"""What the cell that hangs may take: on a slow machine it has begun to hang by then."""
LIMITS = engine.Limits(memory=int(1.25 * 2**30))


@pytest.fixture(scope="module")
def run(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], Path]:
    """Return the records of bad strategies and of good ones after them, by strategy, and the folder."""
    out = tmp_path_factory.mktemp("contained")
    (out / "leaves.py").write_text(LEAVES)
    plugins = (*(str(samples / f"{name}.py") for name in BAD), str(out / "leaves.py"))
    request = Request(
        suite="quick-scratch", plugins=plugins, tasks=("theory:steps=40,test=20,tokens=20",), n_train=(4,), seeds=1
    )
    jobs = expand(request, Registry())
    records, hangs = list[Record](), [job for job in jobs if job.label == HANGS]
    brief = replace(LIMITS, timeout=SECONDS)
    beside = threading.Thread(
        target=lambda: records.extend(engine.local(hangs, 1, out / "hangs", "cpu", {}, limits=brief))
    )
    beside.start()
    records += engine.local([job for job in jobs if job.label != HANGS], 1, out, "cpu", {}, limits=LIMITS)
    beside.join()
    assert len(records) == len(plugins) + len(GOOD)
    return {record.label: record for record in records}, out


def reason(record: Record) -> str:
    assert record.failure is not None
    return record.failure.reason


@pytest.mark.slow
def test_each_cell_has_one_record_and_the_good_ones_are_as_ever(run: tuple[dict[str, Record], Path]) -> None:
    records, out = run
    assert set(records) == {*BAD, "leaves", *GOOD}
    jobs = expand(
        Request(suite="quick-scratch", tasks=("theory:steps=40,test=20,tokens=20",), n_train=(4,), seeds=1), Registry()
    )
    own = {"started", "seconds", "memory"}
    for record in engine.inline(jobs, Registry(), out / "alone", "cpu", {}):
        assert records[record.label].model_dump(exclude=own) == record.model_dump(exclude=own)


@pytest.mark.slow
def test_a_cell_that_hangs_is_ended_and_says_where_it_was(run: tuple[dict[str, Record], Path]) -> None:
    record = run[0]["clings"]
    assert record.status == "timeout" and "--timeout 20" in reason(record)
    assert record.seconds >= SECONDS
    assert record.failure is not None and 'clings.py", line' in record.failure.traceback


@pytest.mark.slow
def test_a_cell_that_takes_too_much_memory_is_ended_and_says_how_much(run: tuple[dict[str, Record], Path]) -> None:
    record = run[0]["allocates"]
    assert record.status == "oom" and record.seconds > 0
    assert "over the --memory-limit of 1.25 GiB" in reason(record)


@pytest.mark.slow
def test_a_copy_of_the_process_gives_no_answer(run: tuple[dict[str, Record], Path]) -> None:
    assert run[0]["forks"].status == "ok"


@pytest.mark.slow
def test_a_worker_whose_cell_leaves_processes_takes_no_other(run: tuple[dict[str, Record], Path]) -> None:
    assert run[0]["leaves"].status == "ok"
    logs = "".join(path.read_text() for path in (run[1] / "logs").iterdir())
    assert "takes no more cells: a cell has left processes" in logs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closes", "scribbles"])
def test_who_breaks_the_line_of_the_answers_has_none(run: tuple[dict[str, Record], Path], name: str) -> None:
    record = run[0][name]
    assert record.status == "crashed" and "answer" in reason(record)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_what_ctrl_c_raises_is_a_failure_if_only_a_strategy_can_have_raised_it(
    job_of: Callable[..., list[Job]], samples: Path, tmp_path: Path, alone: bool
) -> None:
    (job,) = job_of(str(samples / "interrupts.py"), "theory:steps=40,test=20,tokens=20", n_train=4)
    context = Context(tmp_path, "cpu", {}, alone=alone)
    if alone:
        record = run_cell(job, Registry(), context)
        assert record.status == "failed" and "KeyboardInterrupt" in reason(record)
    else:
        with pytest.raises(KeyboardInterrupt):
            run_cell(job, Registry(), context)


@pytest.fixture(scope="module")
def logs(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what the workers print of strategies that change their process or leave another."""
    out = tmp_path_factory.mktemp("changed")
    names = ("changes_process", "daemon")
    request = Request(
        suite="quick-scratch", plugins=tuple(str(samples / f"{name}.py") for name in names),
        tasks=("theory:steps=40,test=20,tokens=20",), n_train=(4,), seeds=1,
    )  # fmt: skip
    jobs = [job for job in expand(request, Registry()) if job.label not in GOOD]
    records = list(engine.local(jobs, 1, out, "cpu", {}, limits=LIMITS))
    assert len(records) == 6 and {record.status for record in records} == {"ok"}
    assert processes_of(out) == []
    return "".join(path.read_text() for path in (out / "logs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "changed torch's matmul precision", "changed NumPy's error handling", "changed the working directory",
        "changed the environment", "changed torch's anomaly detection", "left processes",
    ],
)  # fmt: skip
def test_a_worker_whose_process_was_changed_takes_no_other_cell(logs: str, what: str) -> None:
    assert logs.count("takes no more cells") == 6
    assert logs.count(f"takes no more cells: a cell has {what}\n") == 1


@pytest.mark.slow
def test_no_process_is_left(run: tuple[dict[str, Record], Path]) -> None:
    assert processes_of(run[1]) == []
