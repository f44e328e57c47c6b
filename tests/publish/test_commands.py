"""sparsebench submit and sparsebench verify."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from forging import PLUGIN, Tamper, flip
from PIL import Image
from safetensors.torch import save_file

from sparsebench import api
from sparsebench.cli import main
from sparsebench.publish.folder import RECORDS


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_what_is_submitted_can_be_verified(out: Path, tmp_path: Path) -> None:
    made = call("submit", out, "--to", tmp_path / "to")
    assert made.exit_code == 0 and "17 records, recounted" in made.stderr
    assert made.stdout.startswith("git switch -c submit-norm-tiny-3-") and "pull request" in made.stdout
    found = call("verify", tmp_path / "to")
    assert found.exit_code == 0 and ": recounted\n" in found.stdout and "as reported: " in found.stdout
    (one,) = json.loads(call("verify", tmp_path / "to", "--json", "--board", out).stdout)
    assert (one["badge"], one["strategy"], one["notes"]) == ("recounted", "norm", [])


def test_the_board_of_a_submission_says_how_far_it_was_followed(sound: Path, tampered: Tamper, out: Path) -> None:
    def badges(folder: Path) -> dict[str, Any]:
        rows = json.loads(call("leaderboard", folder, "--format", "json").stdout)
        return {row["strategy"]: row.get("verified") for row in rows}

    assert badges(sound) == {"norm": "recounted", "dense": "", "random": "", "oracle": ""}
    assert badges(tampered(flip("predicted")))["norm"] == "reported"
    assert badges(out)["norm"] is None  # no submission, no column
    assert "recounted" in call("leaderboard", sound, "--format", "html").stdout.split("</noscript>")[0]


def test_it_leaves_with_1_if_something_contradicts_itself(tampered: Tamper) -> None:
    result = call("verify", tampered(flip("predicted")))
    assert result.exit_code == 1 and ": reported\n" in result.stdout and "not the next badge: cell" in result.stdout


def test_what_a_stranger_wrote_moves_no_cursor(tampered: Tamper) -> None:
    def paint(raw: dict[str, Any]) -> None:
        raw["label"] = "norm(\x1b[2J\r\n)"
        raw["metrics"]["accuracy"]["value"] = 0.123

    result = call("verify", tampered(paint))
    assert (
        result.exit_code == 1 and "\x1b" not in result.stdout and "norm(\N{REPLACEMENT CHARACTER}[2J" in result.stdout
    )


@pytest.mark.slow
def test_cells_are_replayed_with_the_plugin(sound: Path) -> None:
    result = call("verify", sound, "--replay", 1, "--plugin", PLUGIN, "--device", "cpu", "--yes")
    assert f"this runs the file {PLUGIN} as you, " in result.stderr
    assert result.exit_code == 0, result.output
    assert ": replayed\n" in result.stdout and "replayed 1 of " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "NONE"], "NONE is no folder"),
        (["verify", "TWO", "--replay", "1"], "one submission is replayed at a time; got 2 of them; name one"),
        (
            ["verify", "SOUND", "--replay", "1", "--yes"],
            "strategy 'norm' came from a file; give that with --plugin FILE.py",
        ),
        (["submit", "NONE", "--to", "TO"], "no records in NONE; run `sparsebench run --out` with this folder first"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, sound: Path, arguments: list[str], said: str) -> None:
    for name in "ab":
        shutil.copytree(sound, tmp_path / "two" / "norm" / name)
    places = {"NONE": tmp_path / "none", "TWO": tmp_path / "two", "SOUND": sound, "TO": tmp_path / "to"}
    result = call(*(places.get(a, a) for a in arguments))
    for word, path in places.items():
        said = said.replace(word, str(path))
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {said}")
    assert len(result.stderr.splitlines()) == 1 + ("--yes" in arguments)


def test_code_is_not_run_unasked(sound: Path) -> None:
    result = call("verify", sound, "--replay", 1, "--plugin", PLUGIN)
    assert result.exit_code == 2 and "; give --yes if that is what you want" in result.stderr


def test_a_submission_can_be_read_as_a_run(sound: Path) -> None:
    assert "norm" in call("leaderboard", sound).stdout and (sound / RECORDS).is_file()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a submission for pictures and weights of one's own, which lie beside it."""
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for number in range(8):
        (root / "pictures" / "val" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        pixels.save(root / "pictures" / "val" / "ab"[number % 2] / f"{number}.png")
    for seed, name in enumerate(("mine", "other")):
        torch.manual_seed(seed)
        save_file(timm.create_model("test_vit", num_classes=2).state_dict(), root / f"{name}.safetensors")
    pictures, weights = f"folder:{root / 'pictures'}", root / "mine.safetensors"
    asked: dict[str, Any] = {"suite": "folder", "model": "timm:test_vit", "images": pictures, "weights": weights}
    api.run(str(PLUGIN), **asked, out=root / "out", jobs=0, device="cpu")
    made = call("submit", root / "out", "--to", root / "to")
    assert made.exit_code == 0 and "/folder-1-" in made.stderr, made.output
    return root


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["images"], r"was run with weights-\w{12}; got none that is named so; give what it was run with by --weights"),
        (["images", "other"], r"was run with weights-\w{12}; got weights-\w{12}; give .* by --weights"),
        (["mine"], r"was run with folder-\w{12}; got none that is named so; give what it was run with by --images"),
    ],
)
def test_a_replay_names_the_files_that_it_needs(own: Path, given: list[str], said: str) -> None:
    files = {
        "images": ("--images", f"folder:{own / 'pictures'}"),
        "mine": ("--weights", own / "mine.safetensors"),
        "other": ("--weights", own / "other.safetensors"),
    }
    words = [word for name in given for word in files[name]]
    result = call("verify", own / "to", "--replay", 2, "--plugin", PLUGIN, "--device", "cpu", "--yes", *words)
    assert result.exit_code == 2 and re.search(said, result.stderr), result.output
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_board_of_ones_own_weights_is_replayed(own: Path) -> None:
    words = ["--images", f"folder:{own / 'pictures'}", "--weights", own / "mine.safetensors", "--device", "cpu"]
    result = call("verify", own / "to", "--replay", 2, "--plugin", PLUGIN, "--yes", *words)
    assert result.exit_code == 0 and ": replayed\n" in result.stdout, result.output
