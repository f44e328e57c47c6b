"""What a bad strategy does to its own cells, and does not do to others."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from measured import TINY, what_was_measured
from plugin_files import write_strategy
from processes import processes_of
from running import inline, local

from sparsebench.plan.expand import expand
from sparsebench.plan.request import Job, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.runner.prepare import Context
from sparsebench.runner.run_cell import run_cell

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
"""What the cell that hangs may take: on a slow machine it has begun to hang by then."""
MEMORY = int(1.25 * 2**30)


@pytest.fixture(scope="module")
def run(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], Path]:
    """Return the records of bad strategies and of good ones after them, by strategy, and the folder."""
    out = tmp_path_factory.mktemp("contained")
    orphans = write_strategy(out / "orphans.py", ORPHANS, "import os, time")
    plugins = (*(str(samples / f"{name}.py") for name in BAD), str(orphans))
    request = Request(suite=TINY, plugins=plugins, n_train=(4,), seeds=1)
    jobs = expand(request, Registry())
    records, hangs = list[Record](), [job for job in jobs if job.label == HANGS]
    beside = threading.Thread(
        target=lambda: records.extend(local(hangs, 1, out / "hangs", memory_limit=MEMORY, timeout=SECONDS))
    )
    beside.start()
    records += local([job for job in jobs if job.label != HANGS], 1, out, memory=MEMORY)
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
    jobs = expand(Request(suite=TINY, n_train=(4,), seeds=1), Registry())
    for record in inline(jobs, Registry(), out / "alone"):
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
def test_what_ctrl_c_raises_is_a_failure_if_only_a_strategy_can_have_raised_it(
    job_of: Callable[..., list[Job]], samples: Path, tmp_path: Path, alone: bool
) -> None:
    (job,) = job_of(str(samples / "interrupts.py"), n_train=4)
    context = Context(Setting(out=tmp_path, device="cpu"), alone=alone)
    if alone:
        record = run_cell(job, Registry(), context)
        assert record.status == "failed" and "KeyboardInterrupt" in reason(record)
    else:
        with pytest.raises(KeyboardInterrupt):
            run_cell(job, Registry(), context)
