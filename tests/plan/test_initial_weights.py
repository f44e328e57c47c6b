"""Cells that start from the trained weights of another one."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import VIT, Measure, reason, value
from running import inline
from safetensors.torch import load_file, save, save_file

from sparsebench.plan.request import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record


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
    """Return the record that comes out when the chosen initial weights are others."""
    out, job, _ = pretrained
    path = store.weights_path(tmp_path, job.after)
    path.parent.mkdir(parents=True)
    state = load_file(store.weights_path(out, job.after))
    assert any(map(chosen, state))
    save_file({name: w + 0.5 if chosen(name) else w for name, w in state.items()}, path)
    (record,) = inline([job], Registry(), tmp_path)
    return record


def test_training_starts_from_the_initial_weights(pretrained: tuple[Path, Job, Record], tmp_path: Path) -> None:
    # What adds the same number to each channel would be taken away by the next layer norm.
    record = changed(pretrained, tmp_path, lambda name: name == "blocks.0.mlp.fc1.bias")
    assert value(record, "train_loss") != value(pretrained[2], "train_loss")


def test_the_output_layer_is_fresh(pretrained: tuple[Path, Job, Record], tmp_path: Path) -> None:
    record = changed(pretrained, tmp_path, lambda name: name.startswith("head."))
    for metric in ("train_loss", "test_loss", "accuracy"):
        assert value(record, metric) == value(pretrained[2], metric)


OTHER = {"nothing": save({}), "another shape": save({"pos_embed": torch.zeros(1, 2, 3)})}


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "is not there"), (0, "is torn"), (5, "is torn"), (1000, "is torn"), (-1, "is torn"),
     ("nothing", "another network's"), ("another shape", "another network's")],
)  # fmt: skip
def test_a_cell_whose_initial_weights_are_missing_torn_or_another_networks_is_skipped(
    pretrained: tuple[Path, Job, Record], tmp_path: Path, content: int | str | None, says: str
) -> None:
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
