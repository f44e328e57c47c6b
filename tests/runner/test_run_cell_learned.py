"""What a strategy learns is a part of the cell's network: trained, resumed, kept; and what adaptive ones spend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from measured import VIT, Measure
from running import inline
from safetensors.torch import load_file

from sparsebench.models.actor import LEARNED
from sparsebench.plan.request import Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record, numbers_of
from sparsebench.runner.prepare import Context, prepare

TASK = "composite:epochs=2,test=40,pretrain_epochs=1,pretrain_samples=40,batch=10"
UNTAUGHT = TASK.replace("pretrain_epochs=1,pretrain_samples=40", "pretrain_epochs=0")


def run(jobs: list[Job], out: Path, every: float = 0) -> Record:
    for job in jobs:  # one by one, as a run does that keeps what is written
        (record,) = inline([job], Registry(), out, every)
        assert record.status == "ok", record.failure
    return record


@pytest.fixture(scope="module")
def jobs(job_of: Any) -> list[Job]:
    return job_of("dynamic_vit:keep_rate=0.5", TASK, n_train=40, model=VIT)  # type: ignore[no-any-return]


def test_what_is_learned_is_trained_and_kept_with_the_networks_weights(jobs: list[Job], tmp_path: Path) -> None:
    start, dense, job = jobs
    run([start, dense], tmp_path)
    prepared = prepare(job, Registry(), Context(Setting(out=tmp_path, device="cpu")))
    first = {name: value.clone() for name, value in prepared.network.module.state_dict().items()}
    learned = [name for name in first if name.startswith(f"{LEARNED}.")]
    assert {name.split(".")[1] for name in learned} == {"1", "2"}
    record = run([job.model_copy(update={"keep_weights": True})], tmp_path)
    state = load_file(store.weights_path(tmp_path, job.cell.id))
    assert set(state) == set(first)
    assert record.metrics["parameters"].value == sum(weight.numel() for weight in state.values())
    assert all(not torch.equal(state[name], first[name]) for name in learned)
    assert record.metrics["macs_ratio"].value == record.metrics["macs_ratio_planned"].value
    assert sum(step.own for step in record.trajectory) > 0
    assert record.metrics["selection_auroc"].value is not None and "inactive" not in record.notes


def test_it_begins_as_the_dense_network_of_its_repetition_which_is_its_teacher(jobs: list[Job], tmp_path: Path) -> None:
    start, dense, job = jobs
    trained = run([start, dense], tmp_path)
    assert "weights" in trained.notes and dense.cell == job.cell.init and start.cell == dense.cell.init
    cell = prepare(job, Registry(), Context(Setting(out=tmp_path, device="cpu")))
    weights = load_file(store.weights_path(tmp_path, dense.cell.id))
    assert cell.start.name == trained.notes["weights"]
    state = cell.network.module.state_dict()
    assert {"head.weight", "head.bias"} <= set(weights) < set(state)
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    pictures = torch.from_numpy(cell.data.test.inputs)
    with torch.no_grad():
        for weight in cell.network.module.parameters():
            weight.add_(0.1)
    assert cell.teacher is not None and trained.outcomes is not None
    predicted = cell.teacher.tell(pictures).logits.argmax(dim=1)
    assert predicted.tolist() == numbers_of(trained.outcomes.predicted, len(predicted)).tolist()
    assert not any(weight.requires_grad for weight in cell.teacher.module.parameters())  # type: ignore[attr-defined]
    # What knows other classes gives no output layer.
    other = prepare(dense, Registry(), Context(Setting(out=tmp_path, device="cpu")))
    assert not torch.equal(other.network.module.head.weight, weights["head.weight"]) and other.teacher is None


@pytest.mark.parametrize(
    ("plugin", "taught", "note"),
    [
        ("dynamic_vit", False, "kl, distillation: no teacher"),
        ("dynamic_vit:share=0,kl=0", False, "share, kl: weight 0; distillation: no teacher"),
        ("dynamic_vit:distillation=0", True, "distillation: weight 0"),
        ("a_vit:ponder=0", False, "ponder: weight 0"),
        ("a_vit", False, ""),
        ("dynamic_vit:share=0,keep_rate=1.0", False, ""),
    ],
)
def test_a_record_says_which_published_terms_were_inactive(
    job_of: Any, tmp_path: Path, plugin: str, taught: bool, note: str
) -> None:
    plugin += "" if "keep_rate" in plugin else ("," if ":" in plugin else ":") + "keep_rate=0.5"
    *starts, job = job_of(plugin, UNTAUGHT.replace("epochs=2", "epochs=1"), n_train=20, model=VIT)
    if not taught:
        job = job.model_copy(update={"after": "", "cell": job.cell.model_copy(update={"init": None})})
    record = run([*starts, job] if taught else [job], tmp_path)
    assert record.notes.get("inactive", "") == note


THEORY = "theory:steps=4,test=4,tokens=20"


@pytest.mark.parametrize(
    ("plugin", "task", "options", "says"),
    [
        ("dynamic_vit", TASK, {"model": VIT, "where": "test"}, "must be trained with the network"),
        pytest.param("dynamic_vit", THEORY, {}, "learned, keeps another number", marks=pytest.mark.theory),
        pytest.param("ats", THEORY, {}, "learned, keeps another number", marks=pytest.mark.theory),
    ],
)
def test_where_it_cannot_be_learned_it_is_unsupported(
    measured: Measure, plugin: str, task: str, options: Any, says: str
) -> None:
    record = measured(plugin, task, 8, **options)
    assert record.status == "unsupported" and record.failure is not None and says in record.failure.reason


FRUGAL = """
import sparsebench, torch

class Frugal(sparsebench.Strategy):
    "Keeps half as many tokens as it may, and of every other image one more."
    name, adaptive = "frugal", True

    def plan(self, view, keep):
        more = (view.tokens.sum(dim=(1, 2)) > 0).long()[:, None]
        return sparsebench.Mask(torch.arange(view.index.shape[1]) < (keep // 2 + more).clamp(min=1))

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Frugal]
"""


def test_an_adaptive_strategy_spends_in_the_mean_what_was_asked_for(measured: Measure, tmp_path: Path) -> None:
    (tmp_path / "frugal.py").write_text(FRUGAL)
    record = measured(f"{tmp_path / 'frugal.py'}:macs=0.3", UNTAUGHT, 40, model=VIT)
    assert record.status == "ok", record.failure
    assert record.metrics["macs_ratio"].value == pytest.approx(0.3, rel=0.05), record.notes
    assert record.metrics["macs_ratio_planned"].value == pytest.approx(0.3, rel=0.02)
    assert "training images" in record.notes["calibration"]
    p95, mean = record.metrics["macs_p95"].value, record.metrics["macs"].value
    assert p95 is not None and mean is not None and p95 > mean
    steps = record.trajectory
    assert steps[0].tokens_in == steps[0].tokens_out != int(steps[0].tokens_out) and steps[0].spread > 0
