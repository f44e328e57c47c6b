"""Cells that act in the test only: their network is trained once, and they are what they are with one of their own."""

from pathlib import Path

import pytest
import torch
from measured import VIT, reason
from running import inline
from safetensors.torch import load_file, save_file

from sparsebench.deploy.pictures import trained_cell
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Job, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record

TASK = "composite:epochs=2,test=40,pretrain_epochs=1,pretrain_samples=80"
PLUGINS = ("random", "attn_topk", "tome")
TIMED = {"images_per_s"}


def jobs_of(where: str = "test", more: str = "", **options) -> list[Job]:
    given = {"plugins": PLUGINS, "model": VIT, "n_train": (40,), "seeds": 1, "where": where, "alone": True} | options
    return expand(Request(suite="quick-scratch", tasks=(TASK + more,), **given), Registry())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Job], dict[str, Record]]:
    """Return the folder, the jobs and the records, by label, of three strategies on one network."""
    out, jobs = tmp_path_factory.mktemp("one"), jobs_of()
    return out, jobs, {record.label: record for record in inline(jobs, Registry(), out)}


def same(one: Record, other: Record) -> bool:
    numbers = [{k: v for k, v in record.metrics.items() if k not in TIMED} for record in (one, other)]
    left_out = ("timed", "weights", "tested_weights")
    notes = [{k: v for k, v in record.notes.items() if k not in left_out} for record in (one, other)]
    return numbers[0] == numbers[1] and notes[0] == notes[1] and one.outcomes == other.outcomes


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


def test_what_learns_on_the_way_or_ends_by_validation_has_a_training_of_its_own() -> None:
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
    network = trained_cell(jobs[-1], Registry(), Context(Setting(out=out, device="cpu"))).network
    assert all(torch.equal(value, weights[name]) for name, value in network.module.state_dict().items())
