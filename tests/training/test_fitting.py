"""A strategy with `fit`: its training images, what is stored and noted, and its errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from measured import VIT, what_was_measured
from running import inline, local
from safetensors.torch import load_file

from sparsebench.inspection.pictures import load_cell
from sparsebench.models.actor import LEARNED
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import prepare
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context
from sparsebench.runner.run_cell import deterministic, run_cells

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

TASK = "composite:epochs=1,test=20,pretrain_epochs=0,batch=10"
PLUGIN = """
import torch, sparsebench

class Mine(sparsebench.Strategy):
    "Keeps the positions that were lightest on the images that it was shown."
    name, fit_images, fit_labels = "{name}", {images}, {labels}

    def module(self, place):
        return torch.nn.ParameterDict({{"light": torch.zeros(place.patches), "seen": torch.zeros({images})}})

    def fit(self, images, network):
        seen = images.items.float()
        {fit}
        light = []
        for part in images.split(3):
            network(part, lambda view: light.append(view.tokens.mean(dim=2)))
        return {{0: {{"light": torch.cat(light).mean(dim=0), "seen": seen}}}}

    def scores(self, view):
        return view.learned["light"].expand_as(view.sizes)

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Mine]
"""


@pytest.fixture(scope="module")
def jobs_of(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes the jobs of a cell from a line of a strategy's `fit`; it tests a trained network."""
    folder = tmp_path_factory.mktemp("plugins")

    def jobs(fit: str = "pass", name: str = "mine", images: int = 7, labels: bool = False, **more: Any) -> list[Job]:
        path = folder / f"{name}.py"
        path.write_text(PLUGIN.format(fit=fit, name=name, images=images, labels=labels))
        given = {"n_train": 20, "model": VIT, "where": "test"} | more
        return job_of(f"{path}:keep_rate=0.5", TASK, **given)  # type: ignore[no-any-return]

    return jobs


def run(jobs: list[Job], out: Path, context: Context | None = None) -> Record:
    """Return the record of the last job; the learned tensors are in the context."""
    with deterministic():
        return list(run_cells(jobs, Registry(), context or context_of(out)))[-1]


def context_of(out: Path) -> Context:
    return Context(RunEnvironment(out=out, device="cpu"))


def same(a: Record, b: Record) -> bool:
    return what_was_measured(a) == what_was_measured(b)


def test_the_record_says_what_it_saw(jobs_of: Any, tmp_path: Path) -> None:
    jobs, context = jobs_of(), context_of(tmp_path)
    record = run(jobs, tmp_path, context)
    assert record.status == "ok", record.failure
    assert record.notes["fit"].startswith("7 training images, 7 shown to the network, learned ")
    (fitted,) = context.fitted.values()
    items = fitted[0]["0.seen"].long().tolist()
    assert len(set(items)) == 7 and items == sorted(items) and set(items) <= set(range(20))
    assert record.metrics["macs_ratio"].value == record.metrics["macs_ratio_planned"].value
    dense = load_file(store.weights_path(tmp_path, jobs[0].cell.id))
    assert not any(name.startswith(f"{LEARNED}.") for name in dense)


def test_other_budgets_reuse_a_fit(jobs_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other budgets take what is known and other parameters and repetitions do not."""
    (*starts, job), context = jobs_of(), context_of(tmp_path)
    first = run([*starts, job], tmp_path, context)
    budget = job.cell.budget.model_copy(update={"keep_rate": 0.3})
    other = job.model_copy(update={"cell": job.cell.model_copy(update={"budget": budget})})
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "fit", lambda *given: 1 / 0)
        assert same(first, run([job], tmp_path, context))
        assert run([other], tmp_path, context).notes["fit"] == first.notes["fit"]
    for more in ({"repetition": 1}, {"images": 8, "name": "eight"}):
        assert run(jobs_of(**more), tmp_path, context).notes["fit"] != first.notes["fit"]
    assert len(context.fitted) == 3


def test_a_cell_does_not_depend_on_others_on_their_order_or_on_threads(jobs_of: Any, tmp_path: Path) -> None:
    *starts, job = jobs_of()
    other = jobs_of(name="other")[-1]
    alone = run([*starts, job], tmp_path / "a")
    after = run([*starts, other, job], tmp_path / "b")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = run([*starts, job], tmp_path / "c")
    finally:
        torch.set_num_threads(before)
    assert alone.status == "ok" and same(alone, after) and same(alone, threads)


def test_where_there_are_fewer_images_it_sees_them_all(jobs_of: Any, tmp_path: Path) -> None:
    record = run(jobs_of("seen = torch.zeros(99)", images=99), tmp_path)
    assert record.status == "ok" and record.notes["fit"].startswith("20 training images, 20 shown")


def test_its_mistakes_cost_its_own_cell(jobs_of: Any, tmp_path: Path) -> None:
    *starts, bad = jobs_of("images.relevance", name="bad", labels=True)
    good = jobs_of()[-1]
    *_, record, other = inline([*starts, bad, good], Registry(), tmp_path)
    assert (record.status, other.status) == ("failed", "ok") and record.failure is not None
    says = "'bad': fit raised AttributeError: 'Images' object has no attribute 'relevance' (bad.py:13); mend it"
    assert says in record.failure.reason and record.failure.kind == "UserError" and not record.failure.traceback


@pytest.mark.parametrize("labels", [True, False])
def test_images_of_a_fit_are_drawn_by_repetition(
    jobs_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: bool
) -> None:
    """The images are training images of the cell drawn by its repetition."""
    given = []

    def look(*arguments: Any) -> Any:
        given.append((arguments[2], arguments[5]))
        return original(*arguments)

    original = prepare.fit
    monkeypatch.setattr(prepare, "fit", look)
    rows = []
    for repetition in (0, 1):
        *starts, job = jobs_of(labels=labels, repetition=repetition)
        assert run([*starts, job], tmp_path).status == "ok"
        images, relevance = given.pop()
        train = prepare.prepare(job, Registry(), context_of(tmp_path)).train
        assert torch.equal(images.inputs, train.inputs[images.items]) and torch.equal(relevance, train.relevance)
        assert images._labels is None if not labels else torch.equal(images.labels, train.labels[images.items])
        rows.append(images.items.tolist())
    assert rows[0] != rows[1]


def test_with_the_training_it_learns_from_the_network_that_it_begins_with(jobs_of: Any, tmp_path: Path) -> None:
    *starts, tested = jobs_of()
    (dense,) = [one for one in starts if one.label == "dense"]
    from_new = tested.model_copy(
        update={"network": "", "after": "", "cell": tested.cell.model_copy(update={"where": "both"})}
    )
    record = run([from_new], tmp_path)
    assert record.status == "unsupported" and record.failure is not None
    assert "belongs to the tracks frozen and tuned" in record.failure.reason
    cell = from_new.cell.model_copy(update={"init": dense.cell})
    tuned = from_new.model_copy(update={"cell": cell, "after": dense.cell.id, "keep_weights": True})
    context = context_of(tmp_path)
    with deterministic():
        records = list(run_cells([*starts, tested, tuned], Registry(), context))
    assert [one.status for one in records] == ["ok"] * len(records), records[-1].failure
    first, second = load_file(store.weights_path(tmp_path, dense.cell.id)), store.weights_path(tmp_path, cell.id)
    trained, (fitted,) = load_file(second), context.fitted.values()
    assert records[-1].notes["fit"] == records[-2].notes["fit"]  # with the same network, before its training continues
    assert all(torch.equal(trained[f"{LEARNED}.{name}"], value) for name, value in fitted[0].items())
    assert any(not torch.equal(trained[name], value) for name, value in first.items())


def test_what_is_looked_at_has_learned_the_same(jobs_of: Any, tmp_path: Path) -> None:
    (*starts, job), context = jobs_of(), context_of(tmp_path)
    run([*starts, job], tmp_path, context)
    (fitted,) = context.fitted.values()
    state = load_cell(job, Registry(), context_of(tmp_path)).network.module.state_dict()
    assert all(torch.equal(state[f"{LEARNED}.{name}"], value) for name, value in fitted[0].items())


@pytest.mark.slow
def test_a_fit_that_hangs_is_ended_by_the_cells_time_limit(jobs_of: Any, tmp_path: Path) -> None:
    *starts, hangs = jobs_of("import time; time.sleep(600)", name="hangs")
    good = jobs_of()[-1]
    run(starts, tmp_path)
    records = local([hangs, good], 1, tmp_path, timeout=20.0)
    by_label = {record.label: record for record in records}
    failure = by_label["hangs"].failure
    assert by_label["hangs"].status == "timeout" and failure is not None and "--timeout 20" in failure.reason
    assert 'hangs.py", line 13 in fit' in failure.traceback and by_label["mine"].status == "ok"
