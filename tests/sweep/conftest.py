from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsebench.budget import Budget
from sparsebench.plugin.origin import Origin
from sparsebench.plugin.registry import Registry
from sparsebench.sweep import engine
from sparsebench.sweep.cell import Cell, Part
from sparsebench.sweep.contenders import Request
from sparsebench.sweep.expand import expand
from sparsebench.sweep.job import Job
from sparsebench.sweep.record import Failure, Metric, Record
from sparsebench.sweep.run import needed_by


@pytest.fixture(scope="session")
def samples() -> Path:
    return Path(__file__).resolve().parents[1] / "plugins"


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    """Return a maker of records of one cell; `started` counts seconds, `value` is the accuracy."""

    def make(
        *, repetition: int = 0, status: Any = "ok", sha256: str = "a", started: int = 0, value: float = 0.5, **more: Any
    ) -> Record:
        cell = Cell(
            task=Part(name="theory", params={"tokens": 20}), model=Part(name="shallow"), strategy=Part(name="mine"),
            budget=Budget(macs=0.5), n_train=8, repetition=repetition,
        )  # fmt: skip
        good = status == "ok"
        return Record(
            cell=cell, cell_id=cell.id, status=status, origin=Origin(plugin="mine", sha256=sha256), kind="deployable",
            label="mine", started=f"2026-01-01T00:00:{started:02}+00:00",
            metrics={"accuracy": Metric(value=value, unit="fraction", n=20)} if good else {},
            failure=None if good else Failure(reason="it broke"), **more,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def job_of() -> Callable[..., list[Job]]:
    """Return a function from a plugin and a task to the job of its cell, after those of the cells it starts from."""

    def find(plugin: str, task: str, *, n_train: int, repetition: int = 0, **options: Any) -> list[Job]:
        registry = Registry()
        jobs = expand(
            Request(
                plugins=(plugin,),
                **(
                    {"suite": "quick-scratch", "tasks": (task,), "n_train": (n_train,), "seeds": repetition + 1}
                    | options
                ),
            ),
            registry,
        )
        path = plugin.partition(".py")[0] + ".py"
        names = registry.load_file(Path(path)) if ".py" in plugin else [plugin.partition(":")[0]]
        (job,) = (j for j in jobs if j.cell.strategy.name == names[0] and j.cell.repetition == repetition and j.asked)
        before = needed_by([job.cell.id], jobs, lambda _: True)
        return [j for j in jobs if j.cell.id in before] + [job]

    return find


@pytest.fixture(scope="session")
def measured(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function from a plugin and a task to the record of its cell; equal questions are answered once."""
    out = tmp_path_factory.mktemp("measured")

    @functools.cache
    def measure(
        plugin: str, task: str = "theory:steps=40,test=20,tokens=20", n_train: int = 8, **options: Any
    ) -> Record:
        jobs = job_of(plugin, task, n_train=n_train, **options)
        return list(engine.inline(jobs, Registry(), out, "cpu", {}))[-1]

    return measure
