"""Chosen schedules on a user's network: the command `schedules`, `apply`, and runs on folders of pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from commands import call
from PIL import Image
from running import run_without_board
from safetensors.torch import save_file
from torch import Tensor

import sparsebench
from sparsebench import UserError
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ARCH = "test_vit"
SIDE = 64


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a small ViT for two classes, at 64 pixels."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(timm.create_model(ARCH, num_classes=2, img_size=SIDE).state_dict(), path)
    return path


def write_pictures(folder: Path, each: int, seed: int = 0) -> None:
    """Write pictures of noise of two classes, in the size of the network."""
    rng = np.random.default_rng(seed)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def pixels_of(folder: Path) -> Tensor:
    """Return the pictures of a folder, normalised as for the network."""
    arrays = [np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))]
    return (torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5


def network(weights: Path) -> torch.nn.Module:
    return timm.create_model(ARCH, num_classes=2, img_size=SIDE, checkpoint_path=str(weights)).eval()


def arguments(weights: Path, root: Path, out: Path) -> list[str]:
    task = "folder:crop=1,labels=names"
    return [
        *("--model", f"timm:{ARCH}", "--weights", str(weights), "--images", f"folder:{root}"),
        *("--task", task, "--out", str(out), "--jobs", "0"),
    ]


def test_the_command_and_apply_choose_the_same_counts(weights: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 8)
    write_pictures(tmp_path / "val", 2, seed=1)
    printed = call("schedules", "attn_topk", "--macs", ".6,.4", *arguments(weights, tmp_path, tmp_path / "out"))
    assert printed.exit_code == 0, printed.output
    for macs in (0.6, 0.4):
        model = network(weights)
        images = pixels_of(tmp_path / "train")
        sparse = sparsebench.apply(model, "attn_topk", macs=macs, schedule="auto", images=images)
        assert sparse.spec in printed.output.splitlines()
        outputs = sparse(images[:3])
        sparse.remove()
        again = sparsebench.apply(model, sparse.spec)
        assert torch.equal(again(images[:3]), outputs)
        assert again.macs_ratio == pytest.approx(macs, rel=0.02)


def test_a_choice_needs_pictures_and_is_for_one_strategy_at_a_time(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="images=PIXELS"):
        sparsebench.apply(network(weights), "attn_topk", macs=0.5, schedule="auto")
    write_pictures(tmp_path / "val", 2)
    refused = call("schedules", "attn_topk:macs=0.5", *arguments(weights, tmp_path, tmp_path / "out"))
    assert refused.exit_code == 2 and "--macs" in refused.output
    one = call("schedules", "patch_variance", "--macs", ".5", *arguments(weights, tmp_path, tmp_path / "out"))
    assert one.exit_code == 0 and "at the input" in one.output and "patch_variance:macs=0.5" in one.output


def run(weights: Path, root: Path, out: Path, task: str) -> None:
    run_without_board(
        "attn_topk:schedule=auto", suite="folder", tasks=f"folder:crop=1,labels=names{task}", macs=0.5,
        model=f"timm:{ARCH}", weights=weights, images=f"folder:{root}", out=out,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("train", "task", "source"),
    [(True, "", "folder train"), (False, ",test=4", "test does not use"), (False, ",choose_on=test", "test pictures")],
)
def test_schedules_are_chosen_on_pictures_that_the_test_does_not_use(
    weights: Path, tmp_path: Path, train: bool, task: str, source: str
) -> None:
    write_pictures(tmp_path / "val", 4)
    if train:
        write_pictures(tmp_path / "train", 3, seed=1)
    run(weights, tmp_path, tmp_path / "out", task)
    choices = {record.label: record.schedule for record in store.read(tmp_path / "out").values() if record.schedule}
    assert choices.keys() == {"attn_topk", "random_inside"}
    images = {True: 6, False: 8 if "choose_on" in task else 4}[train]
    for choice in choices.values():
        assert source in choice.source
        assert {candidate.images for candidate in choice.candidates} == {images}


def test_a_run_without_such_pictures_ends_before_its_first_cell(weights: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "val", 2)
    with pytest.raises(UserError, match="choose_on=test") as error:
        run(weights, tmp_path, tmp_path / "out", "")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_token_counts_are_shown_before_a_run_and_in_the_description_of_a_strategy(tmp_path: Path) -> None:
    options = ["--suite", "embedded", "--task", "composite:test=20", "--seeds", "1", "--jobs", "0"]
    planned = call("run", "attn_topk:macs=0.5", *options, "--dry-run", "--out", tmp_path / "out")
    assert planned.exit_code == 0, planned.output
    run_without_board("attn_topk:macs=0.5", suite="embedded", tasks="composite:test=20", seeds=1, out=tmp_path / "out")
    (record,) = (each for each in store.read(tmp_path / "out").values() if each.label == "attn_topk")
    blocks = (1, 2, 4)
    counts = ", ".join(f"{record.trajectory[block].tokens_out:g}" for block in blocks)
    assert f"composite, attn_topk, macs 0.5: {counts} of 64 tokens after blocks 1, 2, 4" in planned.output
    shown = call("show", "attn_topk")
    assert "after blocks 3, 6, 9" in shown.output and "after block" not in call("show", "patch_variance").output


def test_compare_uses_the_schedules_of_a_run(tmp_path: Path) -> None:
    options = {"suite": "embedded", "tasks": "composite:test=40", "macs": 0.3, "seeds": 1, "jobs": 0}
    run_without_board("divprune:schedule=auto", out=tmp_path, **options)
    (record,) = (each for each in store.read(tmp_path).values() if each.label == "divprune")
    assert record.schedule is not None
    words = ["divprune:schedule=auto", "patch_variance", "--suite", "embedded", "--task", "composite:test=40"]
    printed = call("compare", *words, "--macs", "0.3", "--out", tmp_path, "--jobs", "0", "--json")
    rows = json.loads(printed.stdout)["rows"]
    assert rows[-1]["kept_a"] == record.schedule.best.counts[-1]
