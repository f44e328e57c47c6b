import functools
import io
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory

from sparsebench.paper import Result, Trial, as_csv
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.stats import style

SIZES = tuple(sorted({round(2 ** (k / 8)) for k in range(8, 90)}))
"""So dense that N50 is within a few percent of the size from which on trials succeed."""


def _trial(
    n=8,
    repetition=0,
    *,
    strategy="dense",
    removed=0.0,
    where="both",
    diverged=False,
    task=None,
    model=None,
    curves=None,
    kinds=(Theory, Shallow),
    **values,
):
    return Trial(
        task=kinds[0](**(task or {})), model=kinds[1](**(model or {})), strategy=strategy, removed=removed, where=where,
        n=n, repetition=repetition, values={} if diverged else {"success": 1.0, "steps": 10.0} | values,
        curves={} if diverged else curves or {}, diverged=diverged,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_trial():
    """Return a function that makes trials. Keywords that are not parameters of task or model are metrics.

    `kinds` are the classes of task and model, by default those of the shallow-ViT paper.
    """
    return _trial


_registry = functools.cache(Registry)


@functools.cache
def _jobs(suite, figure):
    """Return the jobs of a figure, each with its task and its model."""
    registry, known = _registry(), {}

    def made(find, part):
        key = part.model_dump_json()
        if key not in known:
            known[key] = find(part.name)(**part.params)
        return known[key]

    jobs = expand(Request(suite=suite, figures=(figure,)), registry)
    return [(j, made(registry.task, j.cell.task), made(registry.model, j.cell.model)) for j in jobs]


@pytest.fixture(scope="session")
def planned():
    """Return a function that makes the trials that a suite plans for a figure, without running them.

    `fill` gives metrics and curves of a job, or None if its training diverged; `keep` selects repetitions.
    """

    def make(suite, figure, fill, keep=lambda repetition: True):
        trials = []
        for job, task, model in _jobs(suite, figure):
            cell = job.cell
            if job.keep_weights or not keep(cell.repetition):
                continue
            result = fill(job)
            values, curves = result or ({}, {})
            trials.append(Trial(
                task=task, model=model, strategy=job.label,
                removed=round(1 - (cell.budget.keep_rate or 1), 6), where=cell.where, n=cell.n_train,
                repetition=cell.repetition, values=values, curves=curves, diverged=result is None,
            ))  # fmt: skip
        return trials

    return make


@pytest.fixture(scope="session")
def sound():
    """Return a check that a figure can be drawn and written, without NaN in texts and tables."""

    def check(result):
        texts = [str(result.verdicts), *map(as_csv, result.tables.values())]
        assert not any(re.search(r"nan\b", text, re.IGNORECASE) for text in texts)
        assert {v.verdict for v in result.verdicts} <= {"reproduced", "partly", "not reproduced", "undecided"}
        assert result.panels
        for panel in result.panels:
            panel(Figure().subplots())

    return check


@pytest.fixture(scope="session")
def drawn():
    """Return a check that the pictures of a figure are complete."""

    def check(result):
        made = result.pictures()
        assert set(made) == {"png", "svg", "pdf"} and ElementTree.fromstring(made["svg"]).tag.endswith("svg")
        with Image.open(io.BytesIO(made["png"])) as picture:
            assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
        shown = re.findall(rb"<!-- (.*?) -->", made["svg"])  # the texts of the picture
        assert len(shown) > 5 and not any(re.search(rb"nan\b", text.lower()) for text in shown)

    return check


@pytest.fixture(scope="session")
def grid_of():
    """Return a function that makes trials of one condition that succeed from about `n50` samples on.

    The N50 of repetitions vary by factors up to `spread`.
    """

    def make(n50, *, repetitions=8, spread=1.15, sizes=SIZES, **options):
        steps = [2 * r / (repetitions - 1) - 1 for r in range(repetitions)] if repetitions > 1 else [0.0]
        return [
            _trial(n, r, success=float(n >= n50 * spread**step), **options)
            for r, step in enumerate(steps)
            for n in sizes
        ]

    return make


@pytest.fixture
def no_pictures(monkeypatch):
    """Replace the pictures of figures by a few bytes, since rendering takes seconds."""
    monkeypatch.setattr(Result, "pictures", lambda result: {form: result.title.encode() for form in style.FORMS})
