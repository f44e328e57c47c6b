"""Tests of given trained weights on the tasks composite and spurious, whose relevant tokens are known."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from coded import ARCH, write_random_weights

from sparsebench.board.comparison import comparisons_of
from sparsebench.board.reading import frame_of
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.records.table import row_of
from sparsebench.runner import run as runs
from sparsebench.tasks.images import Composite

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = "composite:canvas=48,foreground=32,test=12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of two networks for ten classes, and one for two classes and one for 1000."""
    folder = tmp_path_factory.mktemp("weights")
    for seed, (name, classes) in enumerate({"a": 10, "b": 10, "pair": 2, "imagenet": 1000}.items()):
        write_random_weights(folder / f"{name}.safetensors", ARCH, classes, seed)
    return folder


def planned(weights: Path | tuple[Path, ...], task: str, **options: Any) -> planner.Plan:
    options = {"tasks": (task,), "model": f"timm:{ARCH}", "plugins": ("attn_topk",)} | options
    return planner.plan(Request(**options), Files(weights=weights), Registry(), Path("nowhere"), "missing")


@pytest.fixture(scope="module")
def records(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Return the records of two networks on small composites, with the oracle and a strategy that fits."""
    out = tmp_path_factory.mktemp("out")
    request = Request(tasks=(SMALL,), model=f"timm:{ARCH}", plugins=("fisher_mask",), macs=(0.6,))
    files = Files(weights=(folder / "a.safetensors", folder / "b.safetensors"))
    runs.run_missing(request, files, Execution("cpu", jobs=0), Registry(), out)
    return list(store.read(out).values())


def test_each_file_is_a_network_of_the_frozen_track(records: list[Record]) -> None:
    assert {record.status for record in records} == {"ok"}
    (comparison,) = comparisons_of(frame_of(map(row_of, records)))
    assert comparison.track == "frozen"
    assert len(comparison.networks) == 2


def test_the_dense_network_predicts_as_timms(records: list[Record], folder: Path) -> None:
    test = Composite(canvas=48, foreground=32, test=12, patch=16).draw(256, 0, {}).test
    labels = set()
    for name in ("a", "b"):
        cfg = {"file": str(folder / f"{name}.safetensors"), "num_classes": 10}
        model = timm.create_model(ARCH, img_size=48, pretrained=True, pretrained_cfg_overlay=cfg, num_classes=10).eval()
        mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        with torch.no_grad():
            logits = model((torch.from_numpy(test.inputs) / 255 - mean) / std)
        labels.add(float((logits.argmax(1).numpy() == test.labels).mean()))
    dense = {record.metrics["accuracy"].value for record in records if record.cell.strategy.name == "dense"}
    assert dense == labels


def test_relevant_tokens_are_known(records: list[Record]) -> None:
    oracles = [record for record in records if record.cell.strategy.name == "oracle"]
    assert [record.metrics["selection_recall"].value for record in oracles] == [1, 1]


def test_a_strategy_fits_on_training_images(records: list[Record]) -> None:
    notes = [record.notes for record in records if record.cell.strategy.name == "fisher_mask"]
    assert ["256 training images" in note["fit"] for note in notes] == [True, True]


@pytest.mark.parametrize(
    ("task", "canvas", "foreground"),
    [("composite", 192, 64), ("composite:foreground=96,placement=tiles", 192, 96), ("composite:canvas=96", 96, 64)],
)
def test_sizes_that_are_not_given_follow_from_the_patches(
    folder: Path, task: str, canvas: int, foreground: int
) -> None:
    params = planned(folder / "a.safetensors", task).jobs[0].cell.task.params
    assert (params["canvas"], params["foreground"], params["patch"]) == (canvas, foreground, 16)


def test_a_spurious_network_has_two_classes(folder: Path) -> None:
    jobs = planned(folder / "pair.safetensors", "spurious").jobs
    assert {job.cell.track for job in jobs} == {"frozen"}
    assert not any(job.cell.init for job in jobs)


@pytest.mark.parametrize(
    ("name", "task", "options", "says"),
    [
        ("imagenet", "composite", {}, "imagenet.safetensors has a head of 1000 classes.* has 10"),
        ("a", "spurious", {}, "a.safetensors has a head of 10 classes.* has 2"),
        ("a", "composite:foreground=200", {}, "the foreground is larger than the canvas"),
        ("a", "composite:placement=grid,canvas=100", {}, "patch must divide the canvas"),
        ("a", "composite:patch=8,placement=grid", {}, "patch=8 in the task, 16 in the model"),
        ("a", "composite:epochs=3", {}, "tests trained networks; got epochs"),
        ("a", "composite", {"model": "vit"}, "--weights: model 'vit' has no trained weights"),
        ("a", "composite", {"where": "train"}, "got train; allowed: both, test"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, name: str, task: str, options: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        planned(folder / f"{name}.safetensors", task, **options)


def test_without_weights_the_option_is_named() -> None:
    with pytest.raises(UserError, match="--weights FILE"):
        planned((), "composite")


def test_with_samples_to_train_on_the_weights_are_a_start(folder: Path) -> None:
    jobs = planned(folder / "imagenet.safetensors", "composite:pretrain_epochs=0", n_train=(8,)).jobs
    assert {job.cell.track for job in jobs} == {"scratch"}
