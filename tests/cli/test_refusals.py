"""Errors of the operating system, a full output, and non-ASCII names in shells with any locale."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from measured import TINY
from PIL import Image
from safetensors.torch import save_file

from sparsebench import api
from sparsebench.cli import main
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

LIST = [sys.executable, "-m", "sparsebench", "list", "suites"]
LONG = "a" * 300
QUICK = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


def shell(command: Sequence[str], redirection: str = "") -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--suite", TINY, "--n-train", "4", "--out", LONG],
        ["run", "--suite", "quick-scratch", "--out", "abcdefg/" * 700],
        ["leaderboard", LONG],
        ["status", LONG],
    ],
)  # fmt: skip
def test_a_path_that_is_too_long_is_one_line(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("Error: system error: File name too long, 'a") and len(done.stderr) < 400


@pytest.mark.integration
def test_a_full_standard_output_is_one_line() -> None:
    done = shell(LIST, ">/dev/full")
    assert done.returncode == 2
    assert done.stderr in {
        f"Error: {where}system error: No space left on device\n" for where in ("", "standard output: ")
    }


@pytest.mark.integration
def test_a_closed_standard_output_is_no_mistake() -> None:
    done = shell(LIST, ">&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.integration
@pytest.mark.parametrize("words", [["list"], ["export", str(QUICK)]], ids=["list", "export"])
def test_a_reader_that_has_enough_is_no_mistake(words: list[str]) -> None:
    done = shell(["sh", "-c", '"$@" | head -c 1', "sh", *LIST[:3], *words])
    assert "Traceback" not in done.stderr and "Error" not in done.stderr and len(done.stdout) == 1


PLUGIN = Path(__file__).resolve().parents[1] / "plugins" / "good.py"
PLAIN = {"LC_ALL": "C"}


def call(*arguments: str, folder: Path) -> bytes:
    """Return the output of a command that succeeds, run with the locale C."""
    command = [sys.executable, "-m", "sparsebench", *arguments]
    done = subprocess.run(command, capture_output=True, cwd=folder, env=os.environ | PLAIN, check=False)
    assert done.returncode == 0, done.stderr.decode("latin-1")
    return done.stderr + done.stdout


def call_here(*arguments: str, folder: Path) -> bytes:
    """Return the output of a command that succeeds, run in this process, which takes a fifth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return done.output_bytes


SUITE = """
name = "bäume"
version = 1
title = "Bäume"
baselines = ["dense", "random"]
seeds = 1
budget = {macs = 0.5}
[[task]]
name = "folder"
model = "timm"
n_train = [0]
"""


OTHER = os.fsdecode(b"b\xe4ume")


@pytest.mark.parametrize(
    ("run", "letters", "workers"),
    [
        pytest.param(call, "bäume", "1", id="UTF-8", marks=pytest.mark.slow),
        pytest.param(call, OTHER, "1", id="other bytes, and a worker", marks=pytest.mark.slow),
        pytest.param(call_here, OTHER, "0", id="other bytes"),
    ],
)
def test_names_of_any_letters_are_the_same_cells_as_in_other_shells(
    tmp_path: Path, run: Callable[..., bytes], letters: str, workers: str
) -> None:
    rng = np.random.default_rng(0)
    for number in range(8):
        path = tmp_path / letters / "val" / ("a", "ä")[number % 2] / f"ü{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "gü.py").write_bytes(PLUGIN.read_bytes())
    (tmp_path / "süß.toml").write_text(SUITE, encoding="utf-8")
    out = tmp_path / letters / "läuft"
    chosen = ["--suite", "süß.toml", "--model", "timm:test_vit", "--weights", "mine.safetensors", "--device", "cpu"]
    paths = ["--images", f"folder:{letters}", "--out", f"{letters}/läuft", "--jobs", workers]
    output = run("run", "gü.py", *chosen, *paths, folder=tmp_path)
    assert "läuft/leaderboard.md".encode() in output
    assert "Suite bäume, version 1" in (out / "leaderboard.html").read_text(encoding="utf-8")
    records = store.read(out).values()
    assert {record.status for record in records} == {"ok"}
    assert {record.origin.plugin for record in records if record.label == "norm"} == {"file:gü.py"}
    again: list[object] = []
    api.run(
        str(tmp_path / "gü.py"), suite=str(tmp_path / "süß.toml"), model="timm:test_vit", jobs=0, device="cpu", out=out,
        weights=tmp_path / "mine.safetensors", images=f"folder:{tmp_path / letters}", on_record=again.append,
    )  # fmt: skip
    assert again == []
