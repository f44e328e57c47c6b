"""Devices, limits, threads, the recorded environment, and exclusive use of a device (--exclusive)."""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from measured import TINY
from running import inline, jobs_of, local

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plan.request import TIMEOUT, Execution
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.runner import devices
from sparsebench.runner.devices import NUMERIC_VARIABLES, THREADS, places, turn, variables
from sparsebench.runner.process import memory_over
from sparsebench.runner.run_cell import deterministic

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

DESCRIBE = "import json; from sparsebench.runner.devices import machine; print(json.dumps(machine()))"


def described(**variables: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in NUMERIC_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=known | variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_the_environment_names_libraries_without_threads() -> None:
    """The environment names what libraries compute with and no numbers of threads."""
    usual = described()
    assert usual["capability"] == torch.backends.cpu.get_cpu_capability()
    assert not usual.keys() & set(NUMERIC_VARIABLES)
    assert described(OMP_NUM_THREADS="3", MKL_NUM_THREADS="2") == usual
    default = described(ATEN_CPU_CAPABILITY="default")
    assert default == usual | {"capability": "DEFAULT", "ATEN_CPU_CAPABILITY": "default"}
    assert described(MKL_CBWR="COMPATIBLE") == usual | {"MKL_CBWR": "COMPATIBLE"}


def values() -> list[object]:
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return [
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), convolutions.fp32_precision,
        products.fp32_precision, torch.get_default_dtype(), torch.is_grad_enabled(),
    ]  # fmt: skip


def test_cells_have_one_thread_and_exact_kernels() -> None:
    """Cells have one thread and exact kernels and nothing stays."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = values()
    with deterministic():
        assert values() == [1, True, "ieee", *before[3:]]
    assert values() == before
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_gpus_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_of(device: str, workers: int, gpus: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "gpus", lambda: gpus)
        return [place["CUDA_VISIBLE_DEVICES"] for place in places(device, workers)]


def test_a_worker_has_one_thread_and_the_variables_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert (variables() | THREADS).items() == variables().items() and variables()["HOME"] == "/home/me"
    assert places("cpu", 2) == [{}, {}]
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK", raising=False)
    before = variables()
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as scikit-learn's import does, between a run's parts
    assert variables() == before, "or the run would start its server anew"


def test_workers_share_gpus_evenly_or_have_the_one_that_was_named() -> None:
    assert gpus_of("cuda", 5, 2) == ["0", "1", "0", "1", "0"] and gpus_of("cuda:2", 2, 4) == ["2", "2"]


@pytest.mark.parametrize("listed", ["3,1", "GPU-8932f937-d72c, MIG-GPU-5c89/1/0", " 3 , 1 "])
def test_gpus_that_the_run_was_given_are_called_what_it_calls_them(
    listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    names = [name.strip() for name in listed.split(",")]
    assert gpus_of("cuda", 2, 2) == names
    assert gpus_of("cuda:1", 1, 2) == names[1:]


@pytest.mark.parametrize("device", ["foo", "", "cpu:0", "auto:0", "cuda:x", "cuda:-1", "cuda:0:1", "cuda:²"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"--device.*allowed: auto, cpu, cuda"):
        devices.resolve_device(device)


def test_a_device_is_found_or_taken_as_given() -> None:
    assert devices.resolve_device("cpu") == "cpu"
    assert devices.resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")


MIB = 2**20


def limits(timeout: Any, memory: Any, jobs: int = 1) -> tuple[float, float]:
    """Return the limits that the options set."""
    return Execution(timeout=timeout, memory_limit=memory, jobs=jobs).limits()


@pytest.mark.parametrize(
    ("seconds", "size", "limit"),
    [
        (30, 0, ("30", None)), (1.5, 0, (1.5, "0")), (90, 0, ("90s", None)), (600, 0, ("10 min", None)),
        (5400, 0, ("1.5h", None)), (86400, 0, ("1d", None)), (0.5, 0, (".5", None)), (0, 0, ("0", None)),
        (TIMEOUT, 0, (None, None)), (TIMEOUT, 4 * 2**30, (None, "4GiB")), (TIMEOUT, 4 * 2**30, (None, "4g")),
        (TIMEOUT, 9 * 10**8, (None, "900MB")), (TIMEOUT, 2**31, (None, 2**31)),
    ],
)  # fmt: skip
def test_a_limit_is_a_number_with_or_without_a_unit(seconds: float, size: int, limit: tuple[Any, Any]) -> None:
    assert limits(*limit) == (seconds, size)


@pytest.mark.parametrize("option", ["--timeout", "--memory-limit"])
@pytest.mark.parametrize("limit", ["", "-1", "soon", "1e3", "10x", "nan", "inf", "1 h 2", "١", -1, "4Gib2", "100"])
def test_another_limit_is_refused(option: str, limit: Any) -> None:
    if (option, limit) != ("--timeout", "100"):
        with pytest.raises(UserError, match=f"{option}; got.*allowed: "):
            limits(*((limit, None) if option == "--timeout" else (None, limit)))


@pytest.mark.parametrize(("option", "limit"), [("--timeout", ("1h", None)), ("--memory-limit", (None, "4GiB"))])
def test_without_a_worker_process_no_limit_can_be_held(option: str, limit: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match=f"{option} needs a worker process.*--jobs 1"):
        limits(*limit, jobs=0)
    assert limits(None, None, jobs=0) == limits(None, None)


def test_memory_is_counted_when_it_is_used() -> None:
    before = memory_over([os.getpid()], 0)
    with mmap.mmap(-1, 50 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:  # no reused memory
        pages.write(b"1" * (50 * MIB))
        assert 40 * MIB < memory_over([os.getpid()], 0) - before < 130 * MIB
        assert memory_over([os.getpid()], before + 30 * MIB) >= before + 30 * MIB
        assert memory_over([os.getpid()], before + 300 * MIB) == 0


def test_memory_that_two_processes_share_is_counted_once() -> None:
    """Two small processes of their own: a fork of this large one would copy what either of them writes to."""
    size = 100 * MIB
    hold = (
        "import mmap, sys\n"
        "with mmap.mmap(int(sys.argv[1]), 0) as pages:\n"
        "    sum(pages[k] for k in range(0, len(pages), 4096))\n"
        "    print('read', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    shared = os.memfd_create("shared")
    with os.fdopen(shared, "wb") as file, ExitStack() as stack:
        file.write(b"1" * size)
        file.flush()
        pids = []
        for _ in range(2):
            command = [sys.executable, "-c", hold, str(shared)]
            child = stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, pass_fds=[shared]))
            assert child.stdout is not None and child.stdout.readline() == b"read\n"
            pids.append(child.pid)
        assert size < memory_over(pids, 0) < size + 80 * MIB


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use locks of these tests' own, not those of other runs on this machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.slow
def test_runs_on_one_machine_take_turns(tmp_path: Path) -> None:
    """One run is in this process, one in a worker. The worker waits for longer than its time limit."""
    jobs, records = jobs_of(n_train=(4,)), list[Record]()
    log, how = tmp_path / "worker" / "logs" / "worker-0.log", {"timeout": 30.0, "exclusive": True}
    runs = [
        threading.Thread(target=lambda: records.extend(local(jobs, 1, tmp_path / "worker", **how))),
        threading.Thread(target=lambda: records.extend(inline(jobs, Registry(), tmp_path / "here", exclusive=True))),
    ]
    with turn("cpu"):
        for run in runs:
            run.start()
        while not log.exists():
            time.sleep(0.05)
        time.sleep(35.0)
        assert records == []
        released = time.monotonic()
    for run in runs:
        run.join(300)
    assert sum(record.seconds for record in records) <= time.monotonic() - released + 0.01
    assert [record.status for record in records] == ["ok"] * 2 * len(jobs)
    spans = sorted((datetime.fromisoformat(record.started).timestamp(), record.seconds) for record in records)
    assert min(after - (begun + took) for (begun, took), (after, _) in pairwise(spans)) > -0.002  # seconds are rounded


@pytest.mark.usefixtures("no_early_start")
def test_several_workers_at_a_time_are_refused(tmp_path: Path) -> None:
    words = ["run", "--suite", TINY, "--device", "cpu", "--out", str(tmp_path / "x"), "--exclusive", "--jobs", "2"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "--exclusive runs one cell at a time; got --jobs 2; allowed: 0 to 1" in done.stderr
