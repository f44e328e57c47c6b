"""Cells that start from the trained weights of another one, or test its network."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import VIT, Measure, reason, value
from running import inline
from safetensors.torch import load_file, save, save_file

from sparsebench.inspection.pictures import load_cell
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner.environment import RunEnvironment

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


@pytest.fixture(scope="module")
def pretrained(job_of: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job, Record]:
    """Return the folder with initial weights, the job that starts from them, and its record."""
    out = tmp_path_factory.mktemp("pretrained")
    task = "composite:epochs=1,test=40,pretrain_epochs=1,pretrain_samples=80"
    first, job = job_of("random", task, n_train=40, model=VIT)
    start, record = inline([first, job], Registry(), out)
    assert start.status == record.status == "ok" and start.cell_id == first.cell.id
    assert start.notes["weights"] == record.notes["initial_weights"]
    return out, job, record


def changed(pretrained: tuple[Path, Job, Record], tmp_path: Path, chosen: Callable[[str], bool]) -> Record:
    """Return the record of a cell after the chosen initial weights were changed."""
    out, job, _ = pretrained
    path = store.weights_path(tmp_path, job.after)
    path.parent.mkdir(parents=True)
    state = load_file(store.weights_path(out, job.after))
    assert any(map(chosen, state))
    save_file({name: w + 0.5 if chosen(name) else w for name, w in state.items()}, path)
    (record,) = inline([job], Registry(), tmp_path)
    return record


def test_training_starts_from_the_initial_weights(pretrained: tuple[Path, Job, Record], tmp_path: Path) -> None:
    # The next layer norm would remove a constant that is added to each channel.
    record = changed(pretrained, tmp_path, lambda name: name == "blocks.0.mlp.fc1.bias")
    assert value(record, "train_loss") != value(pretrained[2], "train_loss")


def test_the_output_layer_is_fresh(pretrained: tuple[Path, Job, Record], tmp_path: Path) -> None:
    record = changed(pretrained, tmp_path, lambda name: name.startswith("head."))
    for metric in ("train_loss", "test_loss", "accuracy"):
        assert value(record, metric) == value(pretrained[2], metric)


OTHER = {"nothing": save({}), "another shape": save({"pos_embed": torch.zeros(1, 2, 3)})}


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "did not succeed"), (0, "is torn"), (5, "is torn"), (1000, "is torn"), (-1, "is torn"),
     ("nothing", "another network's"), ("another shape", "another network's")],
)  # fmt: skip
def test_a_cell_without_valid_initial_weights_is_skipped(
    pretrained: tuple[Path, Job, Record], tmp_path: Path, content: int | str | None, says: str
) -> None:
    """A cell whose initial weights are missing torn or another network's is skipped."""
    out, job, _ = pretrained
    whole, path = store.weights_path(out, job.after).read_bytes(), store.weights_path(tmp_path, job.after)
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(OTHER[content] if isinstance(content, str) else whole[:content])
    (record,) = inline([job], Registry(), tmp_path)
    assert record.status == "skipped" and says in reason(record) and job.after in reason(record)
    assert "the same command" in reason(record) and record.failure is not None
    assert (record.failure.kind, record.failure.traceback) == ("NotReadyError", "")


def test_records_name_the_weights_by_their_content(
    pretrained: tuple[Path, Job, Record], measured: Measure, tmp_path: Path
) -> None:
    out, job, record = pretrained
    content = store.weights_path(out, job.after).read_bytes()
    assert record.notes["initial_weights"] == hashlib.sha256(content).hexdigest()
    other = changed(pretrained, tmp_path, lambda name: name == "pos_embed")
    assert other.notes["initial_weights"] != record.notes["initial_weights"]
    assert not {"weights", "initial_weights"} & set(measured("random").notes)


TASK = "composite:epochs=2,test=40,pretrain_epochs=1,pretrain_samples=80"
PLUGINS = ("random", "attn_topk", "tome")
TIMED = {"images_per_s"}


def jobs_of(where: str = "test", more: str = "", **options) -> list[Job]:
    fields = {"plugins": PLUGINS, "model": VIT, "n_train": (40,), "seeds": 1, "where": where, "alone": True} | options
    return expand(Request(suite="quick-scratch", tasks=(TASK + more,), **fields), Registry())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Job], dict[str, Record]]:
    """Return the folder, the jobs and the records, by label, of three strategies on one network."""
    out, jobs = tmp_path_factory.mktemp("one"), jobs_of()
    return out, jobs, {record.label: record for record in inline(jobs, Registry(), out)}


def same(first: Record, second: Record) -> bool:
    numbers = [{k: v for k, v in record.metrics.items() if k not in TIMED} for record in (first, second)]
    left_out = ("timed", "weights")
    notes = [{k: v for k, v in record.notes.items() if k not in left_out} for record in (first, second)]
    return numbers[0] == numbers[1] and notes[0] == notes[1] and first.outcomes == second.outcomes


def test_one_network_is_trained_however_many_strategies_test_it(run) -> None:
    _, jobs, records = run
    tests = [job for job in jobs if job.network]
    assert [job.label for job in tests] == list(PLUGINS) and len(jobs) == len(PLUGINS) + 2
    (training,) = {job.network for job in tests}
    dense = records["dense"]
    assert dense.cell_id == training and dense.cell.where == "both" and "weights" in dense.notes
    assert all(record.status == "ok" for record in records.values())
    assert {records[name].metrics["train_loss"] for name in PLUGINS} == {dense.metrics["train_loss"]}
    assert not any("weights" in records[name].notes for name in PLUGINS)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_record_is_that_of_a_network_of_its_own_to_the_bit(run, tmp_path: Path, name: str) -> None:
    _, jobs, records = run
    first, job = jobs[0], next(job for job in jobs if job.label == name)
    own = job.model_copy(update={"network": "", "after": first.cell.id})
    *_, record = inline([first, own], Registry(), tmp_path)
    assert record.cell_id == records[name].cell_id and same(record, records[name])


def test_a_strategy_that_learns_early_has_its_own_training() -> None:
    """What learns on the way or ends by validation has a training of its own."""
    for more in (",watch=1", ",patience=1,validation=0.5"):
        assert not any(job.network for job in jobs_of(more=more, alone=False))
    assert not any(job.network for where in ("both", "train") for job in jobs_of(where))


def test_weights_that_say_nothing_of_their_training_are_a_clear_failure(run, tmp_path: Path) -> None:
    out, jobs, _ = run
    job = jobs[-1]
    path = store.weights_path(tmp_path, job.network)
    path.parent.mkdir(parents=True)
    save_file(load_file(store.weights_path(out, job.network)), path)
    (record,) = inline([job], Registry(), tmp_path)
    assert record.status == "failed" and "say nothing of their training" in reason(record)


def test_the_network_that_is_looked_at_is_the_one_that_is_tested(run) -> None:
    out, jobs, _ = run
    from sparsebench.runner.prepare import Context

    weights = load_file(store.weights_path(out, jobs[-1].network))
    network = load_cell(jobs[-1], Registry(), Context(RunEnvironment(out=out, device="cpu"))).network
    assert all(torch.equal(value, weights[name]) for name, value in network.module.state_dict().items())
