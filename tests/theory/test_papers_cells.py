"""A small cell of each task through the whole harness, and the suites of papers."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from running import inline
from safetensors.torch import load_file
from sparsebench_theory.models import Positional, Shallow, TwoLayer
from sparsebench_theory.overfitting import figures as overfitting
from sparsebench_theory.overfitting.network import TwoLayerViT
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.paper import PAPER
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.sparse_tokens import figures as sparse_tokens
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial import figures as spatial
from sparsebench_theory.spatial.network import PositionalViT
from sparsebench_theory.spatial.task import Spatial

from sparsebench.errors import UserError
from sparsebench.plan import suite as suites
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Cell

OVERFITTING = "overfitting:tokens=6,d=60,signal=8,test=20,lr=1,steps=200,watch=7"
SPATIAL = "spatial:tokens=12,group=3,d=20,test=60,lr=0.5,lr_attention=20,steps=25,watch=10"
SPARSE = "sparse_tokens:tokens=8,d=6,relevant=2,test=60,steps=9,watch=4"
TRANSFER = "spatial:tokens=6,group=3,d=8,test=40,lr=0.5,lr_attention=50,steps=8,feature=1,start=pretrained"


def jobs_of(task, model, plugin="dense", n=12, **options):
    request = Request(plugins=(plugin,), tasks=(task,), model=model, n_train=(n,), seeds=1, **options)
    return [job for job in expand(request, Registry()) if job.cell.strategy.name == plugin.partition(":")[0]
            or job.keep_weights]  # fmt: skip


def run(jobs, out):
    records = list(inline(jobs, Registry(), out))
    assert [record.status for record in records] == ["ok"] * len(jobs), [record.failure for record in records]
    writer = store.Writer(out)
    for record in records:
        writer.append(record)  # values that are not JSON are refused
    writer.close()
    return records


WATCHED = {
    "two_layer:d_h=16,d_v=8,shrink=4": (OVERFITTING, 12, set(TwoLayerViT.shows)),
    "positional": (SPATIAL, 40, set(PositionalViT.shows)),
    "one_query": (SPARSE, 40, {"alignment"}),
}


@pytest.mark.parametrize("plugin", ["dense", "attn_topk:keep_rate=0.5"])
@pytest.mark.parametrize("model", WATCHED)
def test_a_watched_trial_is_recorded(tmp_path, model, plugin):
    task, n, shows = WATCHED[model]
    (record,) = run(jobs_of(task, model, plugin, n=n), tmp_path)
    values, samples = {name: metric.value for name, metric in record.metrics.items()}, record.samples
    named = {"trained_scores"} if model == "positional" else set()
    named |= {"watched_steps", *(f"watched_{name}" for name in ("test_loss", "test_accuracy", *shows))}
    assert set(samples) == named
    at, steps = samples["watched_steps"], values["steps"]
    every = int(task.rpartition("watch=")[2])
    assert steps is not None and at == (*range(0, math.ceil(steps), every), steps)
    assert all(len(samples[f"watched_{name}"]) == len(at) for name in shows)
    assert all(np.isfinite(some).all() for some in samples.values())
    assert all(values[name] == samples[f"watched_{name}"][-1] for name in shows)
    assert samples["watched_test_loss"][-1] == pytest.approx(values["test_loss"], rel=1e-4)
    assert values["accuracy"] == pytest.approx(samples["watched_test_accuracy"][-1])
    if model == "one_query":
        assert samples["watched_alignment"][0] == 0 < values["alignment"] <= 1
        assert values["success"] == (1 - values["accuracy"] < 0.1 + 1e-9)
    elif model == "positional":
        scores = np.reshape(samples["trained_scores"], (12, 12))
        np.testing.assert_allclose(np.diag(scores), math.log(math.log(20)), rtol=1e-6)
        first = Positional().build(Spatial(tokens=12, group=3, d=20).draw(40, 0, {}), 0).A.detach().numpy()
        moved = np.abs(scores - first)[~np.eye(12, dtype=bool)]
        assert moved.max() > 1e-3 and (plugin == "attn_topk:keep_rate=0.5" or moved.min() > 0)
        assert samples["watched_alignment"][-1] > samples["watched_alignment"][0] + 0.3
        assert "fitted" not in values  # no early end
    else:
        assert values["fitted"] == (values["train_loss"] < 0.01) == (steps < 200)
        assert values["fitted"] == 1 or plugin.startswith("attn")  # attention may remove the signal
        assert samples["watched_train_loss_then"][0] == pytest.approx(math.log(2), rel=0.1)
        assert values["success"] == (values["test_loss"] < 0.2)


def test_the_oracle_keeps_the_tokens_of_the_signal(tmp_path):
    (record,) = run(jobs_of(SPARSE, "one_query", "oracle:keep_rate=0.25", n=40), tmp_path)
    positive = SparseTokens(tokens=8, d=6, relevant=2, test=60).draw(2, 0, {}).test.labels.mean()
    for name in ("selection_recall", "selection_precision"):
        assert record.metrics[name].value == pytest.approx(positive)  # samples of class -1 count 0


@pytest.mark.parametrize("group", [1, 12])
def test_sets_of_one_position_or_of_all_can_be_watched(tmp_path, group):
    (record,) = run(jobs_of(SPATIAL.replace("group=3", f"group={group}"), "positional", n=10), tmp_path)
    assert record.metrics["in_group_lead"].value == 0 and record.metrics["association"].value == 1


def test_a_two_layer_model_reads_two_classes_only(tmp_path):
    four = "theory:tokens=20,classes=4,relevant=0.5,confusion=0.15,test=10,steps=3"
    (record,) = inline(jobs_of(four, "two_layer:d_h=4,d_v=4"), Registry(), tmp_path)
    assert record.status == "failed" and record.failure is not None and "for two classes" in record.failure.reason


# ---- transfer


def test_pre_training_is_one_cell():
    """Pre training is one cell with trained attention whatever the cell's model."""
    for attention in ("frozen", "trained"):
        first, *rest = jobs_of(TRANSFER + ",permuted=false,true", f"positional:attention={attention}", n=8)
        assert first.keep_weights and first.cell.n_train == 2000 and first.cell.init is None
        assert first.cell.model.params["attention"] == "trained"
        own = {name: first.cell.task.params[name] for name in ("feature", "start", "permuted", "structure", "watch")}
        assert own == {"feature": 0, "start": "random", "permuted": False, "structure": 0, "watch": 0}
        assert {job.after for job in rest} == {first.cell.id} and len(rest) == 2
        assert {job.cell.model.params["attention"] for job in rest} == {attention}
        assert {job.cell.task.params["permuted"] for job in rest} == {False, True}


def kept_weights(jobs, tmp_path):
    """Return the weights after pre-training and after the transfer, and its record."""
    *_, record = run([jobs[0], *(job.model_copy(update={"keep_weights": True}) for job in jobs[1:])], tmp_path)
    before, after = (load_file(store.weights_path(tmp_path, job.cell.id)) for job in jobs)
    return before, after, record


@pytest.mark.parametrize("permuted", ["false", "true"])
def test_a_transfer_begins_with_learned_attention(tmp_path, permuted):
    """A transfer begins with the attention that was learned and a fresh read out."""
    jobs = jobs_of(TRANSFER + f",permuted={permuted},watch=4", "positional:attention=frozen", n=8)
    before, after, record = kept_weights(jobs, tmp_path)
    task = Spatial(**jobs[1].cell.task.params)
    fresh = Positional().build(task.draw(8, 0, {}), 0).state_dict()
    off = ~torch.eye(6, dtype=torch.bool)
    assert (before["A"] - fresh["A"])[off].abs().max() > 1e-4  # A was trained
    assert torch.equal(after["A"], before["A"])  # and then frozen
    scores = torch.tensor(record.samples["trained_scores"]).reshape(6, 6)
    torch.testing.assert_close(scores[off], before["A"][off])
    w = torch.from_numpy(task.draw(8, 0, {}).patterns[:, 0])
    alignment = torch.nn.functional.cosine_similarity
    first = float(alignment(fresh["head.weight"][0], w, dim=0))
    assert record.samples["watched_alignment"][0] == pytest.approx(first, abs=1e-5)  # of the new feature
    assert float(alignment(before["head.weight"][0], w, dim=0)) != pytest.approx(first, abs=1e-3)
    assert record.samples["watched_alignment"][-1] == pytest.approx(float(alignment(after["head.weight"][0], w, dim=0)))


def test_attention_that_is_trained_on_goes_on_from_what_was_learned(tmp_path):
    jobs = jobs_of(TRANSFER + ",watch=4", "positional", n=8)
    before, after, record = kept_weights(jobs, tmp_path)
    assert not torch.equal(after["A"], before["A"])
    sets = Spatial(**jobs[1].cell.task.params).sets()
    together, own = torch.from_numpy(sets[:, None] == sets), torch.eye(6, dtype=torch.bool)
    for at, A in ((0, before["A"]), (-1, after["A"])):
        lead = float(A[together & ~own].mean() - A[~together].mean())
        assert record.samples["watched_in_group_lead"][at] == pytest.approx(lead, rel=1e-4)


# ---- suites


@functools.cache
def jobs_in(suite):
    return tuple(expand(Request(suite=suite), Registry()))


EVERY = (overfitting.PAPER, spatial.PAPER, sparse_tokens.PAPER)
PAPERS = [(paper, preset) for paper in EVERY for preset in paper.presets]


@pytest.mark.parametrize(("paper", "preset"), PAPERS, ids=[paper.suites[preset] for paper, preset in PAPERS])
def test_a_suite_of_a_paper_has_every_figure(paper, preset):
    assert paper.presets[0] == "quick" and len(paper.presets) == 2
    assert {entry.figure for entry in suites.load(paper.suites[preset]).task} == set(paper.figures)


@pytest.mark.parametrize(
    ("paper", "preset"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[1] != "quick")) for one in PAPERS],
    ids=[paper.suites[preset] for paper, preset in PAPERS],
)
def test_every_cell_of_a_suite_of_a_paper_can_be_drawn_and_built(paper, preset):
    registry, drawn, built = Registry(), {}, set()
    for cell in (job.cell for job in jobs_in(paper.suites[preset])):
        assert cell.n_train >= 2
        task = registry.task(cell.task.name)(**cell.task.params)
        model = registry.model(cell.model.name)(**cell.model.params)
        assert task.inputs == model.inputs
        if (key := json.dumps(cell.task.params)) not in drawn:
            task.check()
            drawn[key] = None
            if task.inputs == "tokens":
                drawn[key] = task.model_copy(update={"test": 5}).draw(2, cell.repetition, {})
                relevant = {
                    "overfitting": 1, "spatial": cell.task.params.get("group"),
                    "sparse_tokens": 4 * drawn[key].test.labels,
                }[cell.task.name]  # fmt: skip
                assert (drawn[key].test.relevance.sum(axis=1) == relevant).all()
        model.check(task)
        shape = drawn[key] and drawn[key].train.inputs.shape[1:]
        if drawn[key] is not None and (shape, model) not in built:
            network = model.build(drawn[key], 0)
            assert network.cost.tokens == shape[0]
            assert task.recipe().watch == 0 or hasattr(network, "observe")
            built.add((shape, model))
    assert len(drawn) >= 9 and built


@pytest.mark.slow  # thousands of cells are planned
@pytest.mark.parametrize("paper", EVERY, ids=lambda paper: paper.name)
def test_a_paper_says_how_long_its_cells_take(paper):
    """A paper says how long its cells take and the larger preset has more."""
    quick, more = (jobs_in(paper.suites[some]) for some in paper.presets)
    seconds = [sum(paper.seconds(job) for job in jobs) for jobs in (quick, more)]
    assert 10 < seconds[0] < 1000 and 2 * seconds[0] < seconds[1] < 20000
    assert len(quick) < len(more)


@pytest.mark.slow
def test_the_published_map_of_overfitting_is_whole():
    cells = [job.cell for job in expand(Request(suite="overfitting-full", figures=("1",)), Registry())]
    result = {(cell.n_train, cell.task.params["signal"], cell.repetition) for cell in cells}
    assert result == {(n, float(s), r) for n in range(2, 21, 2) for s in range(1, 101) for r in range(10)}
    assert len(cells) == len(result) and {cell.strategy.name for cell in cells} == {"dense"}
    (own,) = {json.dumps(cell.task.params | {"signal": 0}) for cell in cells}
    assert json.loads(own) == Overfitting().model_dump(mode="json") | {"signal": 0}
    (model,) = {json.dumps(cell.model.params) for cell in cells}
    assert json.loads(model) == TwoLayer().model_dump(mode="json")


@pytest.mark.parametrize("preset", spatial.PAPER.presets)
def test_transfer_has_each_attention_at_each_n_and_structure(preset):
    jobs = expand(Request(suite=f"spatial-{preset}", figures=("transfer",)), Registry())
    first = [job.cell for job in jobs if job.keep_weights]
    rest = [job.cell for job in jobs if not job.keep_weights]
    structures = {cell.task.params["structure"] for cell in rest}
    assert [cell.task.params["structure"] for cell in first] == sorted(structures) and len(structures) >= 2
    assert {cell.model.params["attention"] for cell in first} == {"trained"}
    sizes = {cell.n_train for cell in rest}
    modes = {(c.task.params["start"], c.task.params["permuted"], c.model.params["attention"]) for c in rest}
    assert modes == {
        ("pretrained", False, "frozen"), ("pretrained", True, "frozen"), ("random", False, "frozen"),
        ("random", False, "trained"),
    }  # fmt: skip
    assert len(rest) == 4 * len(sizes) * len(structures) and min(sizes) <= 16 <= 4 * min(sizes) < max(sizes)
    assert {cell.task.params["feature"] for cell in rest} == {1}


def test_a_model_of_the_theory_leaves_the_trained_networks_alone():
    jobs = expand(Request(suite="quick", model="shallow:m=8", seeds=1), Registry())
    result = {(job.cell.task.name, job.cell.track, job.cell.model.params.get("m")) for job in jobs if job.requested}
    assert result == {("theory", "scratch", 8), ("composite", "frozen", None), ("spurious", "frozen", None)}


@functools.cache
def theory_cells(preset: str) -> tuple[Cell, ...]:
    return tuple(job.cell for job in expand(Request(suite=f"theory-{preset}"), Registry()))


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name == "full")) for name in PAPER.presets]
)
def test_every_cell_of_a_theory_suite_can_be_drawn(preset: str) -> None:
    tasks = {json.dumps(cell.task.params): cell.task.params for cell in theory_cells(preset)}
    assert len(tasks) >= 15
    for params in tasks.values():
        task = Theory(**params)
        data = task.draw(2, 0, {})
        assert task.counts().sum() == task.tokens == data.train.inputs.shape[1]
        assert data.test.relevance.sum(axis=1).tolist() == [task.counts()[0]] * task.test
    for cell in theory_cells(preset):
        assert cell.n_train >= 2 and cell.budget.keep_rate in {None, 0.8, 0.6, 0.4}
    assert {Shallow(**cell.model.params).m for cell in theory_cells(preset)} == {256 if preset == "quick" else 1000}


def test_figures_can_be_asked_for_alone() -> None:
    jobs = expand(Request(suite="theory-quick", figures=("4", "8")), Registry())
    wholes = [expand(Request(suite="theory-quick", figures=(figure,)), Registry()) for figure in ("4", "8")]
    assert {job.cell.id for job in jobs} == {job.cell.id for whole in wholes for job in whole}
    assert 0 < len(jobs) == sum(map(len, wholes)) < len(theory_cells("quick"))
    with pytest.raises(UserError, match=r"figure of suite 'theory-quick'.*'6'.*1a, 1b, 2, 3"):
        expand(Request(suite="theory-quick", figures=("6",)), Registry())
