"""A row of the ledger measured again, with weights and pictures, from the command to what it prints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file

from sparsebench.cli import main
from sparsebench.records import store

NAMES = ("n01440764", "n01443537", "n01484850")
ROW = {
    "id": "mine", "paper": "P", "method": "M", "model": "timm:test_vit", "canvas": 32,
    "plugin": "attn_topk:keep_rate=0.5,convention=compound-ceil", "weights": "off the shelf", "source": "S",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options that name random weights and 21 pictures of noise in three classes of ImageNet."""
    root, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for name in NAMES:
        (root / "val" / name).mkdir(parents=True)
        for i in range(7):
            pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "val" / name / f"{i}.png")
    torch.manual_seed(1)
    save_file(timm.create_model("test_vit").state_dict(), root / "own.safetensors")
    return ["--weights", str(root / "own.safetensors"), "--images", str(root)]


def checked(folder: Path, words: list[str], **more: Any) -> Any:
    row = ROW | more
    text = "[[claim]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    out = ["--out", str(folder / "out"), "--jobs", "0", "--device", "cpu"]
    return CliRunner().invoke(main, ["claims", "--file", str(folder / "mine.toml"), "--check", "mine", *out, *words])


def test_a_row_is_measured_again_and_says_whether_its_claim_holds(tmp_path: Path, files: list[str]) -> None:
    high = checked(tmp_path, files, top1=99.5)
    records = {record.cell.strategy.name: record for record in store.read(tmp_path / "out").values()}
    assert set(records) == {"dense", "attn_topk"}
    assert records["attn_topk"].cell.budget.label == "keep 0.5 compound-ceil"
    value = records["attn_topk"].metrics["accuracy"].value
    assert value is not None and value < 0.5
    assert high.exit_code == 1 and "outside the interval" in high.stdout and "on 21 images" in high.stdout
    assert f"claimed 99.5 %; measured {100 * value:.2f} % [" in high.stdout
    same = checked(tmp_path, files, top1=round(100 * value + 0.1, 1))
    assert same.exit_code == 0 and "lies in the interval" in same.stdout
    assert len(store.read(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "row mine claims no accuracy"),
        ({"top1": 70, "plugin": ""}, "row mine has no settings that can be typed here"),
        ({"top1": 70, "plugin": "dynamic_vit:keep_rate=0.7"}, "'dynamic_vit' is learned with the network"),
        ({"top1": 70, "model": "timm:deit_small_patch16_224"}, "holds the weights of another architecture"),
    ],
)
def test_a_row_that_cannot_be_measured_is_one_clear_line(
    tmp_path: Path, files: list[str], more: dict[str, Any], says: str
) -> None:
    done = checked(tmp_path, files, **more)
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.output


def test_files_that_are_missing_are_one_clear_line(tmp_path: Path, files: list[str]) -> None:
    none = checked(tmp_path, [], top1=70)
    assert none.exit_code == 2 and "--check needs the network and the pictures" in none.stderr
    nowhere = checked(tmp_path, ["--weights", str(tmp_path / "x.safetensors"), *files[2:]], top1=70)
    assert nowhere.exit_code == 2 and nowhere.stderr.count("\n") == 1, nowhere.output
    alone = CliRunner().invoke(main, ["claims", *files])
    assert alone.exit_code == 2 and "add --check ROW" in alone.stderr
