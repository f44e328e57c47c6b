"""Letters of any kind in names, whatever the shell: what is read and written is UTF-8."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from sparsebench import api
from sparsebench.records import store

PLUGIN = Path(__file__).resolve().parents[1] / "plugins" / "good.py"
PLAIN = {"LC_ALL": "C"}


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command in such a shell."""
    command = [sys.executable, "-m", "sparsebench", *arguments]
    return subprocess.run(command, capture_output=True, cwd=folder, env=os.environ | PLAIN, check=False)


SUITE = """
name = "bäume"
version = 1
title = "Bäume"
baselines = ["dense", "random"]
seeds = 1
budget = {macs = 0.5}
[[task]]
name = "composite"
model_params = {dim = 16, depth = 1, heads = 1}
params = {canvas = 16, foreground = 8, pretrain_epochs = 0, epochs = 1, test = 16}
n_train = [8]
"""


def test_a_suite_and_a_folder_may_have_any_letters(tmp_path: Path) -> None:
    (tmp_path / "süß.toml").write_text(SUITE, encoding="utf-8")
    dry = call("run", "--suite", "süß.toml", "--dry-run", folder=tmp_path)
    assert dry.returncode == 0 and b"composite" in dry.stdout
    done = call("run", "--suite", "süß.toml", "--out", "läuft", "--device", "cpu", "--jobs", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert "läuft/leaderboard.md".encode() in done.stderr + done.stdout
    assert {record.status for record in store.read(tmp_path / "läuft").values()} == {"ok"}
    html = (tmp_path / "läuft" / "leaderboard.html").read_text(encoding="utf-8")
    assert "Suite bäume, version 1" in html
    done = call("leaderboard", "läuft", folder=tmp_path)
    assert done.returncode == 0 and b"random" in done.stdout


@pytest.mark.parametrize(
    "letters",
    [
        pytest.param("bäume", id="UTF-8", marks=pytest.mark.slow),
        pytest.param(os.fsdecode(b"b\xe4ume"), id="other bytes"),
    ],
)
def test_pictures_and_plugins_of_any_name_are_the_same_cells_as_in_other_shells(tmp_path: Path, letters: str) -> None:
    rng = np.random.default_rng(0)
    for number in range(8):
        path = tmp_path / letters / "val" / ("a", "ä")[number % 2] / f"ü{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "gü.py").write_bytes(PLUGIN.read_bytes())
    asked = ["--suite", "folder", "--model", "timm:test_vit", "--weights", "mine.safetensors", "--device", "cpu"]
    named = ["--images", f"folder:{letters}", "--out", f"{letters}/out", "--jobs", "1"]
    done = call("run", "gü.py", *asked, *named, folder=tmp_path)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    records = store.read(tmp_path / letters / "out").values()
    assert {record.status for record in records} == {"ok"}
    assert {record.origin.plugin for record in records if record.label == "norm"} == {"file:gü.py"}
    again: list[object] = []
    api.run(
        str(tmp_path / "gü.py"), suite="folder", model="timm:test_vit", weights=tmp_path / "mine.safetensors",
        images=f"folder:{tmp_path / letters}", out=tmp_path / letters / "out", jobs=0, device="cpu",
        on_record=again.append,
    )  # fmt: skip
    assert again == []
