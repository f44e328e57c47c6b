"""Records of cells: measurements, errors, and what a strategy learned."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured import COMPOSITE, VIT, Measure, reason, value, what_was_measured
from plugin_files import write_strategy
from running import inline, jobs_of
from safetensors.torch import load_file

from sparsebench.measure.cost import Step
from sparsebench.models.actor import LEARNED
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Outcomes, Record, numbers_of
from sparsebench.runner import run_cell
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context, prepare
from sparsebench.strategy.spec import fill

THEORY = "theory:steps=40,test=20,tokens=20"
SPURIOUS = "spurious:epochs=10,lr=0.003,test=40,pretrain_epochs=0"


def opened(outcomes: Outcomes | None) -> tuple[np.ndarray, ...]:
    assert outcomes is not None
    return tuple(numbers_of(text, outcomes.n) for text in (outcomes.predicted, outcomes.label, outcomes.group))


@pytest.fixture(scope="session")
def image(measured: Measure) -> Measure:
    """Return a function from a plugin to the record of its cell on the composite or the spurious task."""

    def measure(plugin: str, task: str = COMPOSITE, **options: Any) -> Record:
        return measured(plugin, task, 40, **({"model": VIT} | options))

    return measure


@pytest.mark.parametrize(
    ("name", "status", "kind", "says"),
    [
        ("wrong_shape", "failed", "StrategyError", "scores must have shape (8, 16), got (8, 16, 16)"),
        ("out_of_range", "failed", "StrategyError", "must lie in 0..15, got 1000.."),
        ("duplicates", "failed", "StrategyError", "names a token twice"),
        ("nan_scores", "failed", "StrategyError", "scores holds NaN"),
        ("no_plan", "failed", "StrategyError", "returned Tensor, not a plan"),
        ("undeclared_relevance", "failed", "StrategyError", "view.relevance was read but not declared"),
        ("raises", "failed", "ValueError", "ValueError: no idea which token matters"),
        ("raises_contract", "failed", "StrategyError", "no idea which token matters"),
        ("unsupported", "unsupported", "UnsupportedError", "only for round tokens"),
    ],
)
def test_what_a_strategy_does_wrong_is_in_its_record(
    samples: Path, measured: Measure, name: str, status: str, kind: str, says: str
) -> None:
    record = measured(str(samples / f"{name}.py"))
    assert record.failure is not None and (record.status, record.label, record.failure.kind) == (status, name, kind)
    assert says in reason(record)
    assert len(reason(record).splitlines()) == 1
    assert record.metrics == {} and record.outcomes is None
    traceback = record.failure.traceback  # only unexpected errors have one
    assert "raises.py" in traceback and "in scores" in traceback if kind == "ValueError" else traceback == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("past_the_end", "Keep.index must lie in 0..63, got 0.."),
        ("twice", "Keep.index names a token twice"),
        ("nan", "scores holds NaN"),
        ("empty_group", "Merge.target leaves one of its 32 groups empty"),
    ],
)
def test_an_illegal_plan_is_found_in_a_later_batch_too(samples: Path, image: Measure, wrong: str, says: str) -> None:
    record = image(
        f"{samples / 'wrong_later.py'}:wrong={wrong},keep_rate=0.5", COMPOSITE.replace("test=40", "test=700")
    )
    assert record.status == "failed" and record.failure is not None
    assert record.failure.kind == "StrategyError" and says in reason(record)


STRIPES = (Path(__file__).resolve().parents[1] / "plugins" / "stripes.py").read_text()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rng = seeds", "raise ValueError('no')\n        rng = seeds", "ValueError: no (stripes.py:37)"),
        ('return {"hes', '1 / 0\n        return {"hes', "ZeroDivisionError: division by zero (stripes.py:31)"),
        ('return {"hesitation": items.losses.std()}', "return {}", "declares metric 'hesitation' but"),
        ("rng.integers(0, 2, n), ", "rng.integers(1, 3, n), ",
         "the labels of its train split; got int64 from 1 to 2; allowed: integers from 0 to 1, as it has 2 classes"),
        ("Split(inputs, labels", "Split(inputs, labels / 2", "its train split; got float64 from 0.0 to 0.5;"),
        ("Split(inputs", "Split(inputs / 255", "the inputs of its train split; got float64; allowed: uint8 for images"),
    ],
    ids=["draw", "measure", "no metric", "labels", "real labels", "real images"],
)  # fmt: skip
def test_what_a_task_does_wrong_is_in_its_record(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in STRIPES
    path = tmp_path / "stripes.py"
    path.write_text(STRIPES.replace(old, new))
    jobs = jobs_of(str(path), suite="quick-scratch", tasks=("stripes",), model=VIT, n_train=(8,))
    record = next(inline(jobs[:1], Registry(), tmp_path))
    assert record.status == "failed" and says in reason(record)


def test_a_model_of_fewer_blocks_than_the_suites_is_cut_where_it_can_be(image: Measure) -> None:
    record = image("attn_topk:keep_rate=0.5", model="vit:dim=16,depth=2,heads=2")
    assert [(s.tokens_in, s.tokens_out) for s in record.trajectory] == [(64, 32), (32, 16)]


def test_validation_samples_are_counted_and_neither_trained_nor_tested_on(image: Measure) -> None:
    record = image("random", SPURIOUS + ",validation=0.25")
    assert record.metrics["train_loss"].n == 30 and record.metrics["accuracy"].n == 40
    assert record.metrics["validation_accuracy"].n == record.metrics["validation_worst_group_accuracy"].n == 10
    assert value(record, "validation_worst_group_accuracy") <= value(record, "validation_accuracy")
    assert "kept_epoch" not in record.metrics
    plain = image("random", SPURIOUS)
    assert value(plain, "train_loss") != value(record, "train_loss") and "validation_accuracy" not in plain.metrics


def test_early_stopping_names_the_pass_that_the_weights_are_from(image: Measure) -> None:
    record = image("random", SPURIOUS + ",validation=0.25,patience=2,validate_by=worst_group")
    kept = value(record, "kept_epoch")
    assert value(record, "epochs") == min(10, kept + 2)


def test_the_strategy_validates_as_it_tests(measured: Measure) -> None:
    """The weights are the same; only whether tokens are removed after training is not."""
    task = SPURIOUS.replace("test=40", "test=100,validation=0.5")
    both, trained = (measured("random:keep_rate=0.2", task, 200, model=VIT, where=where) for where in ("both", "train"))
    assert value(both, "train_loss") == value(trained, "train_loss")
    assert value(both, "test_loss") != value(trained, "test_loss")
    assert value(both, "validation_accuracy") != value(trained, "validation_accuracy")


def test_the_worst_of_one_group_is_no_validation_result(image: Measure) -> None:
    record = image("random", COMPOSITE + ",validation=0.25,patience=2,validate_by=worst_group")
    assert record.status == "failed" and "has no groups; got validate_by=worst_group" in reason(record)


@pytest.mark.theory
@pytest.mark.parametrize("steps", [3, 1], ids=["while it is trained", "after the last step"])
def test_training_that_diverges_is_a_failure(measured: Measure, steps: int) -> None:
    record = measured("dense", THEORY.replace("steps=40", f"steps={steps},lr=1e30"))
    assert record.status == "failed" and "diverged" in reason(record)


def test_an_image_cell_is_timed(image: Measure) -> None:
    record = image("random")
    seconds = record.samples["seconds_per_batch"]
    assert value(record, "images_per_s") == pytest.approx(40 / float(np.median(seconds)), rel=0.01)
    assert value(record, "timed_batch") == 40
    assert "success" not in record.metrics and "spurious_gap" not in record.metrics


def test_a_test_of_many_batches_is_timed_by_these_alone(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebench.training.evaluation.BATCH", 4)
    monkeypatch.setattr("sparsebench.runner.run_cell.seconds_per_batch", None)  # no extra pass is made
    (record,) = inline(job_of("random", COMPOSITE, n_train=40, model=VIT), Registry(), tmp_path)
    seconds = record.samples["seconds_per_batch"]
    assert len(seconds) == record.metrics["accuracy"].n // 4 - 1  # without the first
    assert value(record, "images_per_s") == pytest.approx(4 / float(np.median(seconds)), rel=0.01)


@pytest.mark.parametrize("plugin", ["dense", "random"])
def test_the_metrics_are_what_the_outcomes_say(image: Measure, plugin: str) -> None:
    record = image(plugin, SPURIOUS)
    predicted, label, group = opened(record.outcomes)
    assert len(predicted) == 40 and len(set(predicted)) == 2 and np.bincount(group).tolist() == [10, 10, 10, 10]
    assert set(label[group < 2]) == {0} and set(label[group >= 2]) == {1}
    each = [float((predicted == label)[group == k].mean()) for k in range(4)]
    named = {name: m.value for name, m in record.metrics.items() if name.startswith("accuracy: ")}
    assert named == dict(zip((f"accuracy: {c} on {k}" for c in "38" for k in ("flower", "china")), each, strict=True))
    assert value(record, "accuracy") == value(record, "average_test") == pytest.approx(np.mean(predicted == label))
    assert value(record, "worst_group_accuracy") == min(each)
    assert value(record, "spurious_gap") == value(record, "accuracy") - min(each)
    # 20 training images of each class, 9 in 10 on the background that fits: groups of 18, 2, 2 and 18.
    assert value(record, "average_train") == pytest.approx(np.average(each, weights=[18, 2, 2, 18]))


def test_the_record_says_which_foreground_each_test_item_shows(image: Measure) -> None:
    outcomes = image("dense", SPURIOUS).outcomes
    assert outcomes is not None
    drawn = Registry().task("spurious")(test=40, epochs=10, lr=0.003, pretrain_epochs=0).draw(40, 0, {}).test
    assert drawn.foregrounds is not None
    assert numbers_of(outcomes.foreground, outcomes.n).tolist() == drawn.foregrounds.tolist()


def test_the_record_has_the_probability_of_the_label(image: Measure) -> None:
    record = image("random")
    assert record.outcomes is not None
    assert math.exp(-value(record, "test_loss")) < value(record, "p_label") < 1  # by Jensen's inequality
    assert (record.metrics["p_label"].unit, record.metrics["p_label"].n) == ("fraction", 40)


GROUPS = [f"{c} on {k}" for c in "38" for k in ("flower", "china")]


def test_groups_that_training_or_test_lack_break_nothing(image: Measure) -> None:
    record = image("dense", SPURIOUS.replace("test=40", "test=2,agreement=1"))
    metrics = record.metrics
    # 20 training images of each class, all on the background that fits; two test images, one of each class.
    assert [metrics[f"train_samples: {name}"].value for name in GROUPS] == [20, 0, 0, 20]
    there = [name for name in GROUPS if metrics[f"accuracy: {name}"].n]
    assert len(there) == 2 and sum(metrics[f"accuracy: {name}"].n for name in GROUPS) == 2
    assert all((metrics[f"accuracy: {name}"].value is None) == (name not in there) for name in GROUPS)
    for average in ("average_test", "average_train"):
        assert 0 <= value(record, average) <= 1


def test_the_oracle_selects_rightly_and_the_anti_oracle_wrongly(measured: Measure, image: Measure) -> None:
    for measure in (measured, image):
        assert value(measure("oracle"), "selection_auroc") == 1
        assert value(measure("anti_oracle"), "selection_auroc") == 0
        assert value(measure("dense"), "selection_auroc") == 0.5
        assert value(measure("dense"), "selection_recall") == 1


@pytest.mark.parametrize("plugin", ["dense", "random", "attn_topk:keep_rate=0.5", "attn_topk:macs=0.7"])
def test_the_macs_of_an_image_cell_follow_from_its_trajectory(image: Measure, plugin: str) -> None:
    record = image(plugin)
    registry = Registry()
    task = fill(registry.task("composite"), record.cell.task.params, "task")
    model = fill(registry.model("vit"), record.cell.model.params, "model")
    cost = model.build(task.draw(40, 0, {}), 0).cost
    macs = cost.macs(list(record.trajectory))
    dense = cost.macs([Step(64, 64)] * 3)
    assert value(record, "macs_dense") == dense
    assert value(record, "macs_ratio") == pytest.approx(macs / dense)
    assert value(record, "macs_ratio_planned") == value(record, "macs_ratio")


def test_the_trajectory_is_what_the_budget_asks_for(image: Measure) -> None:
    steps = image("attn_topk:keep_rate=0.5").trajectory
    assert [(s.tokens_in, s.tokens_out) for s in steps] == [(64, 64), (64, 32), (32, 16)]
    assert [s.scoring for s in steps] == ["", "class", "class"]
    steps = image("random:keep_rate=0.5").trajectory
    assert [(s.tokens_in, s.tokens_out) for s in steps] == [(32, 32)] * 3


def test_tokens_are_removed_where_the_cell_says(image: Measure) -> None:
    dense = image("dense")
    both, train, test = (image("random:keep_rate=0.25", where=where) for where in ("both", "train", "test"))
    assert len({record.cell_id for record in (dense, both, train, test)}) == 4
    losses = [value(record, "train_loss") for record in (dense, both, train, test)]
    assert losses[0] == losses[3] and losses[1] == losses[2] and losses[0] != losses[1]
    assert value(train, "macs_ratio") == 1 and train.trajectory == dense.trajectory
    assert value(both, "macs_ratio") == value(test, "macs_ratio") < 0.5
    assert value(train, "selection_recall") == 1 > value(test, "selection_recall")
    tested = [value(record, "test_loss") for record in (dense, both, train, test)]
    assert len(set(tested)) == 4


def test_strategies_that_keep_everything_give_what_dense_gives(image: Measure) -> None:
    """Data, initial weights and the order of the samples are then the same for every strategy."""
    dense = image("dense")
    for plugin in ("random", "oracle", "attn_topk"):
        record = image(f"{plugin}:keep_rate=1")
        assert record.outcomes == dense.outcomes
        same = ("train_loss", "test_loss", "steps", "macs")
        assert [value(record, m) for m in same] == [value(dense, m) for m in same]


def test_repetitions_differ(measured: Measure, image: Measure) -> None:
    for measure in (measured, image):
        losses = {value(measure("dense", repetition=k), "train_loss") for k in range(3)}
        assert len(losses) == 3


def test_a_cell_does_not_depend_on_global_generators(job_of: Any, tmp_path: Path) -> None:
    """The same cell gives the same twice whatever the global generators are at."""
    (job,) = job_of("random", COMPOSITE, n_train=40, model=VIT)
    records = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        records += [what_was_measured(record) for record in inline([job], Registry(), tmp_path)]
    assert records[0] == records[1]


def test_the_record_says_which_attention_was_seen(image: Measure) -> None:
    assert image("attn_topk").notes["attention"] == "class"
    assert image("attn_topk:attention=received").notes["attention"] == "received"
    assert "attention" not in image("random").notes


def test_a_plugin_file_that_changed_since_the_run_began_is_not_run(samples: Path, job_of: Any, tmp_path: Path) -> None:
    path = Path(shutil.copy(samples / "good.py", tmp_path / "mine.py"))
    (job,) = job_of(str(path), n_train=8)
    path.write_text(path.read_text().replace("norm(dim=-1)", "sum(dim=-1)"))
    (record,) = inline([job], Registry(), tmp_path)
    assert record.status == "failed" and "another revision" in reason(record)


def test_pictures_that_are_not_on_this_machine_are_the_reason(job_of: Any, tmp_path: Path) -> None:
    (job,) = job_of("random", COMPOSITE + ",images=folder-0123456789ab", n_train=40, model=VIT)
    (record,) = inline([job], Registry(), tmp_path)
    assert record.status == "failed" and "folder-0123456789ab" in reason(record)


def test_a_cell_that_runs_out_of_memory_says_so(job_of: Any, tmp_path: Path) -> None:
    (job,) = job_of(str(write_strategy(tmp_path / "greedy.py", "raise MemoryError")), n_train=8)
    (record,) = inline([job], Registry(), tmp_path)
    assert record.status == "oom"


def test_a_step_that_does_not_fit_the_memory_is_taken_in_parts(job_of: Any, tmp_path: Path) -> None:
    records = []
    for name, most in (("greedy", 6), ("fits", 20), ("never", 0)):
        body = f"if view.training and len(view.tokens) > {most}: raise torch.OutOfMemoryError"
        path = write_strategy(tmp_path / f"{name}.py", body, "import torch")
        records += inline(job_of(str(path), COMPOSITE + ",batch=20", n_train=40, model=VIT), Registry(), tmp_path)
    parts, whole, never = records
    assert parts.notes["memory"].startswith("batches in 4 parts") and "memory" not in whole.notes
    assert value(parts, "train_loss") == pytest.approx(value(whole, "train_loss"), rel=1e-5)
    assert value(parts, "test_loss") == pytest.approx(value(whole, "test_loss"), rel=1e-4)
    assert never.status == "oom"


@pytest.mark.parametrize(
    ("recipe", "shares"),
    [("epochs=2,batch=4", [0.25, 0.5, 0.75, 1.0]), ("epochs=4,validation=0.25,patience=2", [])],
    ids=["so many steps", "which may end sooner"],
)
def test_a_training_says_which_share_of_its_steps_is_done(
    job_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, shares: list[float]
) -> None:
    monkeypatch.setattr(run_cell, "REPORT_INTERVAL", 0.0)
    reports: list[float] = []
    jobs = job_of("dense", f"composite:{recipe},test=10,pretrain_epochs=0", n_train=8)
    context = Context(RunEnvironment(out=tmp_path, device="cpu"), on_progress=lambda _, done: reports.append(done))
    assert [record.status for record in run_cell.run_cells(jobs, Registry(), context)] == ["ok"]
    assert reports == [0.0, *shares]


@pytest.mark.parametrize("where", ["both", "train", "test"])
def test_a_strategy_of_training_alone_is_tested_dense_whatever_is_asked(measured: Measure, where: str) -> None:
    record, dense = measured("patch_dropout:keep_rate=0.5", where=where), measured("dense")
    control = measured("random:keep_rate=0.5", where="train")
    assert record.status == "ok" and record.cell.where == "train"
    assert record.metrics["macs_ratio"].value == record.metrics["macs_ratio_planned"].value == 1
    assert record.trajectory == dense.trajectory
    for name in ("train_loss", "test_loss"):
        assert record.metrics[name].value == control.metrics[name].value != dense.metrics[name].value


TASK = "composite:epochs=2,test=40,pretrain_epochs=1,pretrain_samples=40,batch=10"
UNTAUGHT = TASK.replace("pretrain_epochs=1,pretrain_samples=40", "pretrain_epochs=0")


def run(jobs: list[Job], out: Path, every: float = 0) -> Record:
    for job in jobs:  # one by one, like a run with a store
        (record,) = inline([job], Registry(), out, every)
        assert record.status == "ok", record.failure
    return record


@pytest.fixture(scope="module")
def jobs(job_of: Any) -> list[Job]:
    return job_of("dynamic_vit:keep_rate=0.5", TASK, n_train=40, model=VIT)  # type: ignore[no-any-return]


def test_what_is_learned_is_trained_and_kept_with_the_networks_weights(jobs: list[Job], tmp_path: Path) -> None:
    start, dense, job = jobs
    run([start, dense], tmp_path)
    prepared = prepare(job, Registry(), Context(RunEnvironment(out=tmp_path, device="cpu")))
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


def test_a_distilled_strategy_begins_as_its_teacher(jobs: list[Job], tmp_path: Path) -> None:
    """It begins as the dense network of its repetition which is its teacher."""
    start, dense, job = jobs
    trained = run([start, dense], tmp_path)
    assert "weights" in trained.notes and dense.cell == job.cell.init and start.cell == dense.cell.init
    cell = prepare(job, Registry(), Context(RunEnvironment(out=tmp_path, device="cpu")))
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
    # A network of other classes does not provide its output layer.
    other = prepare(dense, Registry(), Context(RunEnvironment(out=tmp_path, device="cpu")))
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


FEW = "theory:steps=4,test=4,tokens=20"


@pytest.mark.parametrize(
    ("plugin", "task", "options", "says"),
    [
        ("dynamic_vit", TASK, {"model": VIT, "where": "test"}, "must be trained with the network"),
        pytest.param("dynamic_vit", FEW, {}, "is trained with the network", marks=pytest.mark.theory),
        pytest.param("ats", FEW, {}, "keeps another number of tokens", marks=pytest.mark.theory),
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
