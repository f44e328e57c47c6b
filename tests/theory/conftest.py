from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory

from sparsebench import style
from sparsebench.models.base import Model
from sparsebench.paper import Result, Trial, as_csv, as_json
from sparsebench.plan.expand import expand
from sparsebench.plan.job import Job
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.tasks.base import Task

SIZES = tuple(sorted({round(2 ** (k / 8)) for k in range(8, 90)}))
"""Fine enough for N50 to be within a few percent of the size at which trials begin to succeed."""


def _trial(
    n: int = 8, repetition: int = 0, *, strategy: str = "dense", removed: float = 0.0, where: str = "both",
    diverged: bool = False, task: dict[str, Any] | None = None, model: dict[str, Any] | None = None,
    curves: dict[str, tuple[float, ...]] | None = None, kinds: tuple[type[Task], type[Model]] = (Theory, Shallow),
    **values: float | None,
) -> Trial:  # fmt: skip
    return Trial(
        task=kinds[0](**(task or {})), model=kinds[1](**(model or {})), strategy=strategy, removed=removed, where=where,
        n=n, repetition=repetition, values={} if diverged else {"success": 1.0, "steps": 10.0} | values,
        curves={} if diverged else curves or {}, diverged=diverged,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_trial() -> Callable[..., Trial]:
    """Return a maker of trials: what is no parameter of the task or the model is a metric.

    `kinds` are the classes of task and model, those of the shallow-ViT paper unless given.
    """
    return _trial


@functools.cache
def _jobs(suite: str, figure: str) -> list[Job]:
    return list(expand(Request(suite=suite, figures=(figure,)), Registry()))


@pytest.fixture(scope="session")
def planned() -> Callable[..., list[Trial]]:
    """Return a maker of the trials that a suite plans for a figure, without running them.

    `fill` gives metrics and curves of a job, or None if its training diverged; `keep` says which repetitions there are.
    """

    def make(
        suite: str, figure: str, fill: Callable[[Job], tuple[dict[str, Any], dict[str, Any]] | None],
        keep: Callable[[int], bool] = lambda repetition: True,
    ) -> list[Trial]:  # fmt: skip
        registry = Registry()
        trials = []
        for job in _jobs(suite, figure):
            cell = job.cell
            if job.keep_weights or not keep(cell.repetition):
                continue
            found = fill(job)
            values, curves = found or ({}, {})
            trials.append(Trial(
                task=registry.task(cell.task.name)(**cell.task.params),
                model=registry.model(cell.model.name)(**cell.model.params), strategy=job.label,
                removed=round(1 - (cell.budget.keep_rate or 1), 6), where=cell.where, n=cell.n_train,
                repetition=cell.repetition, values=values, curves=curves, diverged=found is None,
            ))  # fmt: skip
        return trials

    return make


@pytest.fixture(scope="session")
def sound() -> Callable[[Result], None]:
    """Return a check that a figure can be drawn and written, and that neither shows a NaN."""

    def check(result: Result) -> None:
        texts = [as_json(result.verdicts, []), *map(as_csv, result.tables.values())]
        assert not any(re.search(r"nan\b", text, re.IGNORECASE) for text in texts)
        assert {v.verdict for v in result.verdicts} <= {"reproduced", "partly", "not reproduced", "undecided"}
        assert result.panels
        for panel in result.panels:
            panel(Figure().subplots())

    return check


@pytest.fixture(scope="session")
def drawn() -> Callable[[Result], None]:
    """Return a check that the pictures of a figure are whole."""

    def check(result: Result) -> None:
        made = result.pictures()
        assert set(made) == {"png", "svg", "pdf"} and ElementTree.fromstring(made["svg"]).tag.endswith("svg")
        with Image.open(io.BytesIO(made["png"])) as picture:
            assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
        shown = re.findall(rb"<!-- (.*?) -->", made["svg"])  # the texts of the picture
        assert len(shown) > 5 and not any(re.search(rb"nan\b", text.lower()) for text in shown)

    return check


@pytest.fixture(scope="session")
def grid_of() -> Callable[..., list[Trial]]:
    """Return a maker of the trials of one condition that succeed from about `n50` samples on.

    Repetitions differ by up to `spread`, a factor, about it.
    """

    def make(
        n50: float, *, repetitions: int = 8, spread: float = 1.15, sizes: Sequence[int] = SIZES, **options: Any
    ) -> list[Trial]:
        steps = [2 * r / (repetitions - 1) - 1 for r in range(repetitions)] if repetitions > 1 else [0.0]
        return [
            _trial(n, r, success=float(n >= n50 * spread**step), **options)
            for r, step in enumerate(steps)
            for n in sizes
        ]

    return make


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures have pictures of a few bytes, where only their files matter: to render them takes seconds."""
    monkeypatch.setattr(Result, "pictures", lambda result: {form: result.title.encode() for form in style.FORMS})
