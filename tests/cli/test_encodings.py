"""Shells without UTF-8: what is read and written is UTF-8 all the same, and names of files are what they are."""

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
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
WITHOUT = "'encoding' argument not specified"
STRICT = ["-X", "warn_default_encoding", "-W", "ignore::EncodingWarning", "-W", f"error:{WITHOUT}:EncodingWarning"]


def call(*arguments: str, folder: Path, strict: bool = False, **shell: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in such a shell; where it is strict a text without an encoding is an error."""
    command = [sys.executable, *(STRICT if strict else ()), "-m", "sparsebench", *arguments]
    return subprocess.run(command, capture_output=True, cwd=folder, env=os.environ | (shell or PLAIN), check=False)


SUITE = """
name = "bäume"
version = 1
title = "Bäume"
baselines = ["dense", "random"]
seeds = 1
budget = {macs = 0.5}
[[task]]
name = "theory"
params = {steps = 2, test = 16, tokens = 20}
n_train = [8]
"""


@pytest.mark.parametrize(
    "words",
    [["list"], ["list", "suites"], ["show", "quick"], ["env"], ["status", "nirgends-ü"], ["run", "nichts-ü.py"]],
    ids=" ".join,
)
def test_commands_need_no_utf8(tmp_path: Path, words: list[str]) -> None:
    for shell in (PLAIN, {"PYTHONIOENCODING": "latin-1"}):
        done = call(*words, folder=tmp_path, strict=True, **shell)
        said = done.stderr.decode("latin-1")
        assert "Traceback" not in said and "Warning" not in said
        assert done.returncode == (2 if "ü" in words[-1] else 0), said
        assert len(said.splitlines()) == (done.returncode == 2)


def test_a_suite_and_a_folder_may_have_any_letters(tmp_path: Path) -> None:
    (tmp_path / "süß.toml").write_text(SUITE, encoding="utf-8")
    dry = call("run", "--suite", "süß.toml", "--dry-run", folder=tmp_path, strict=True)
    assert dry.returncode == 0 and b"theory" in dry.stdout
    done = call("run", "--suite", "süß.toml", "--out", "läuft", "--device", "cpu", "--jobs", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert "läuft/leaderboard.md".encode() in done.stderr + done.stdout
    assert {record.status for record in store.read(tmp_path / "läuft").values()} == {"ok"}
    html = (tmp_path / "läuft" / "leaderboard.html").read_text(encoding="utf-8")
    assert "Suite bäume, version 1." in html
    done = call("leaderboard", "läuft", folder=tmp_path)
    assert done.returncode == 0 and b"random" in done.stdout


@pytest.mark.parametrize("letters", ["bäume", os.fsdecode(b"b\xe4ume")], ids=["UTF-8", "other bytes"])
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
