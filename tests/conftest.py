import os

from running import inline

# One core for each test process: otherwise libraries start one thread per core in each of them.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import builtins
import functools
import gc
import io
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from measured import TINY
from samples import SAMPLES

from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.plan import prerequisites
from sparsebench.plan.request import Request
from sparsebench.plugin import registry
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Failure, Metric, Origin, Part, Record
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget

ROOT = Path(__file__).resolve().parents[1]
THEORIES = {"sparsebench_theory"}
"""Values of SPARSEBENCH_HIDE that disable a plugin of this repository: other tests must pass without the plugin."""

# No test fails because the machine is slow.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=40, **ANY_MACHINE)
settings.register_profile("slow", max_examples=200, **ANY_MACHINE)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run slow tests, and more examples")
    parser.addoption("--integration", action="store_true", help="also run tests with other programs and libraries")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a file of 1,500 slow tests, whose collection takes seconds."""
    return True if collection_path.name == "test_conformance.py" and not config.getoption("--slow") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        settings.load_profile("slow")
    for marker in ("slow", "integration"):
        if not config.getoption(f"--{marker}"):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    if _hides_theories():
        for item in items:
            if item.get_closest_marker("theory"):
                item.add_marker(pytest.mark.skip(reason="uses the plugin of the theories, which is hidden"))


def _hides_theories() -> bool:
    return bool(THEORIES & set(os.environ[registry.HIDDEN].split(",")))


def pytest_configure() -> None:
    """Hide installed third-party plugins from tests and from the processes that tests start.

    The garbage collector is disabled until all tests are collected, because it took half of that time.
    """
    gc.disable()
    # xdist's workers inherit the variable of the controller; with it they would see no plugin to hide.
    hidden = THEORIES & set(os.environ.pop(registry.HIDDEN, "").split(","))
    names = {
        registry.distribution(entry.dist)[0] for entry in registry.entries().values() if not registry.is_shipped(entry)
    }
    os.environ[registry.HIDDEN] = ",".join(sorted(names))
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sparsebench"]
    if named != {name: entry.value for name, entry in registry.entries().items()}:
        pytest.exit("other entry points are installed than pyproject.toml has: pip install --no-deps -e .", 2)
    os.environ[registry.HIDDEN] = ",".join(sorted(names | hidden))


def pytest_collection_finish() -> None:
    gc.freeze()  # collected tests stay in memory; the garbage collector need not scan them again
    gc.set_threshold(50_000)  # by default it scans so often that it takes a twentieth of the time
    gc.enable()


@functools.cache
def _entries(hidden: str, path: tuple[str, ...]) -> dict[str, Any]:
    return ENTRIES()


ENTRIES = registry.entries


@pytest.fixture(scope="session", autouse=True)
def isolation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate cache of decoded pictures, and search installed plugins once for each sys.path.

    Neither changes what is tested. Users choose the folder of the cache too, and it must not have pictures of earlier
    tests. A search takes longer than a small test, and what is installed does not change while tests run. Nothing else
    may be replaced here: a file of tests asks for a replacement by name, such as `no_picture`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entries", lambda: dict(_entries(os.environ[registry.HIDDEN], tuple(sys.path))))
        patch.setenv("SPARSEBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def no_picture() -> Iterator[None]:
    """Write an empty picture beside each board. For files of tests with many runs that are not about pictures."""
    from sparsebench.board import picture
    from sparsebench.stats import style

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "draw", lambda *_, **__: style.new(1, 1))
        yield


@pytest.fixture
def open_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often this process opens each file. An audit hook would stay, and slow down all later tests."""
    counts = Counter[str]()

    def counted(open_: Callable[..., Any]) -> Callable[..., Any]:
        def count(file: Any, *args: Any, **kwargs: Any) -> Any:
            counts[str(file)] += 1
            return open_(file, *args, **kwargs)

        return count

    monkeypatch.setattr(builtins, "open", counted(open))
    monkeypatch.setattr(io, "open", counted(io.open))
    monkeypatch.setattr(os, "open", counted(os.open))
    return counts


@pytest.fixture(scope="module")
def timed_once() -> Iterator[None]:
    """Time a batch once, not seven times. For files of tests with many cells that are not about speed."""
    from sparsebench.runner import run_cell

    once = functools.partial(run_cell.seconds_per_batch, repeats=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cell, "seconds_per_batch", once)
        yield


@pytest.fixture
def no_early_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not load worker processes while a run is planned. For tests of requests that are refused."""
    from sparsebench.runner import run

    monkeypatch.setattr(run, "begin", lambda *_: None)


@pytest.fixture(scope="session")
def scripted() -> Callable[..., Strategy]:
    """Return a function that makes a strategy from `decide(view, keep)`, which returns its plan.

    If it is not budgeted, it may return None wherever it is asked.
    """

    def make(
        decide: Callable[..., Any],
        *,
        site: str = "input",
        needs: Collection[str] = ("tokens",),
        kind: str = "deployable",
        budgeted: bool = True,
    ) -> Strategy:
        class Scripted(Strategy):
            def plan(self, view: Any, keep: int) -> Any:
                return decide(view, keep)

        Scripted.name, Scripted.site, Scripted.needs, Scripted.kind = "scripted", site, frozenset(needs), kind
        Scripted.budgeted = budgeted
        return Scripted()

    return make


CLASSES = ("airplane", "bird", "cat", "dog")


@pytest.fixture(scope="session")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with some of cifar10/{train,test}/<class>/*.jpg, of `CLASSES`, and plants/*.jpg."""
    folder_name = os.environ.get("SPARSEBENCH_DATA")
    source = Path(folder_name) if folder_name else ROOT.parent / "shared" / "data"
    if (source / "cifar10").is_dir() and (source / "plants").is_dir():
        return source
    folder = tmp_path_factory.mktemp("images")
    some = {
        "cifar10-jpeg": [f"cifar10/*/{name}/*{end}0.jpg" for name in CLASSES for end in "05"],
        "plants": ["plants/*_n.jpg"],
    }
    for name, patterns in some.items():
        if not (archive := source / f"{name}.tar.xz").is_file():
            pytest.skip(
                "no real images: set SPARSEBENCH_DATA to a folder with cifar10 and plants, or their archives, in it"
            )
        subprocess.run(["tar", "-xJf", archive, "-C", folder, "--wildcards", *patterns], check=True)
    return folder


@pytest.fixture(scope="session")
def samples() -> Path:
    return SAMPLES


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    """Return a function that makes records of one cell; `started` is in seconds, `value` is the accuracy."""

    def make(
        *,
        repetition: int = 0,
        status: Any = "ok",
        revision: str = "a",
        started: int = 0,
        value: float = 0.5,
        **more: Any,
    ) -> Record:
        cell = Cell(
            task=Part(name="composite", params={"canvas": 20}), model=Part(name="vit"), strategy=Part(name="mine"),
            budget=Budget(macs=0.5), n_train=8, repetition=repetition,
        )  # fmt: skip
        good = status == "ok"
        return Record(
            cell=cell, cell_id=cell.id, status=status, origin=Origin(plugin="mine", revision=revision),
            kind="deployable", label="mine", started=f"2026-01-01T00:00:{started:02}+00:00",
            metrics={"accuracy": Metric(value=value, unit="fraction", n=20)} if good else {},
            failure=None if good else Failure(reason="it broke"), **more,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def job_of() -> Callable[..., list[Job]]:
    """Return a function from a plugin and a task to the job of its cell, preceded by the jobs that the cell depends on.

    Without a task the cell is a tiny one.
    """

    def find(plugin: str, task: str = "", *, n_train: int, repetition: int = 0, **options: Any) -> list[Job]:
        registry, suite = Registry(), "quick-scratch" if task else TINY
        jobs = expand(
            Request(
                plugins=(plugin,),
                **(
                    {"suite": suite, "tasks": (task,) * bool(task), "n_train": (n_train,), "seeds": repetition + 1}
                    | options
                ),
            ),
            registry,
        )
        path = plugin.partition(".py")[0] + ".py"
        names = registry.load_file(Path(path)) if ".py" in plugin else [plugin.partition(":")[0]]
        (job,) = (
            j for j in jobs if j.cell.strategy.name == names[0] and j.cell.repetition == repetition and j.requested
        )
        before = prerequisites([job.cell.id], jobs, lambda _: True)
        return [j for j in jobs if j.cell.id in before] + [job]

    return find


@pytest.fixture(scope="session")
def measured(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function from a plugin and a task to the record of its cell, computed once for equal arguments."""
    out = tmp_path_factory.mktemp("measured")

    @functools.cache
    def measure(plugin: str, task: str = "", n_train: int = 8, **options: Any) -> Record:
        jobs = job_of(plugin, task, n_train=n_train, **options)
        return list(inline(jobs, Registry(), out))[-1]

    return measure
