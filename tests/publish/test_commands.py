"""sparsebench submit and sparsebench verify."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner, Result
from forge import PLUGIN, changed, improve, put
from PIL import Image
from safetensors.torch import save_file

from sparsebench import api
from sparsebench.cli import main


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


Tamper = Callable[..., Path]
FORGED = put(0.999, "metrics", "accuracy", "value")


def test_what_is_submitted_can_be_verified(out: Path, tmp_path: Path) -> None:
    made = call("submit", out, "--to", tmp_path / "to")
    assert made.exit_code == 0 and "17 records, reported: whole and consistent; nobody has run it again" in made.stderr
    assert made.stdout.startswith("git switch -c submit-norm-tiny-3-") and "pull request" in made.stdout
    found = call("verify", tmp_path / "to")
    assert found.exit_code == 0 and ": reported: whole and consistent; nobody has run it again\n" in found.stdout
    (one,) = json.loads(call("verify", tmp_path / "to", "--json", "--board", out).stdout)
    assert (one["badge"], one["strategy"], one["notes"], one["why"]) == ("reported", "norm", [], [])


def test_the_board_of_a_submission_has_its_badge(sound: Path, tampered: Tamper, out: Path) -> None:
    def badges(folder: Path) -> dict[str, Any]:
        rows = json.loads(call("leaderboard", folder, "--format", "json").stdout)
        return {row["strategy"]: row.get("badge") for row in rows}

    assert badges(sound) == {"norm": "reported", "dense": "", "random": "", "oracle": ""}
    assert badges(tampered(FORGED))["norm"] == "rejected"
    assert badges(out)["norm"] is None  # no submission, no column
    assert "reported" in call("leaderboard", sound, "--format", "html").stdout.split("</noscript>")[0]


def test_it_leaves_with_1_if_something_contradicts_itself(tampered: Tamper) -> None:
    result = call("verify", tampered(FORGED))
    assert result.exit_code == 1 and ": rejected: " in result.stdout and "accuracy is 0.999" in result.stdout


def test_what_a_stranger_wrote_moves_no_cursor(tampered: Tamper) -> None:
    result = call("verify", tampered(lambda raw: (put("norm(\x1b[2J\r\n)", "label")(raw), FORGED(raw))))
    assert result.exit_code == 1 and "\x1b" not in result.stdout
    assert "norm(\N{REPLACEMENT CHARACTER}[2J" in result.stdout


@pytest.mark.slow
def test_cells_are_replayed_with_the_file_of_the_submission(sound: Path) -> None:
    result = call("verify", sound, "--replay", 1, "--device", "cpu", "--yes")
    assert f"this runs the file {sound / 'plugin' / 'good.py'} as you, " in result.stderr
    assert result.exit_code == 0, result.output
    assert ": replayed: whole and consistent; cells drawn by chance, run again here, agree\n" in result.stdout
    assert "replayed 1 of " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "NONE"], "NONE is no folder"),
        (["verify", "TWO", "--replay", "1"], "one submission is replayed at a time; got 2 of them; name one"),
        (["verify", "EMPTY"], "no submissions in EMPTY; they lie in <strategy>/<version>/"),
        (["submit", "NONE", "--to", "TO"], "no records in NONE; run `sparsebench run --out` with this folder first"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, sound: Path, arguments: list[str], said: str) -> None:
    for name in "ab":
        shutil.copytree(sound, tmp_path / "two" / "norm" / name)
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": tmp_path / "empty", "NONE": tmp_path / "none", "TWO": tmp_path / "two", "TO": tmp_path / "to"}
    result = call(*(places.get(a, a) for a in arguments))
    for word, path in places.items():
        said = said.replace(word, str(path))
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: {said}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_forgery_that_agrees_with_itself_is_not_replayed_and_no_text_calls_it_checked(
    few: Path, tmp_path: Path
) -> None:
    folder = changed(few, tmp_path, lambda raw: improve(raw, 1))
    assert "nobody has run it again" in call("verify", folder).stdout
    result = call("verify", folder, "--replay", "all", "--device", "cpu", "--yes")
    assert result.exit_code == 1 and ": reported: " in result.stdout and "do not agree" in result.stdout
    assert "other outcomes here, on the same machine" in result.stdout
    assert not re.search("verified|checked", result.stdout)


def test_code_is_not_run_unasked(sound: Path) -> None:
    result = call("verify", sound, "--replay", 1)
    assert result.exit_code == 2 and "; give --yes if that is what you want" in result.stderr


def test_a_submission_can_be_read_as_a_run(sound: Path) -> None:
    assert "norm" in call("leaderboard", sound).stdout


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
    result = call("verify", own / "to", "--replay", 2, "--device", "cpu", "--yes", *words)
    assert result.exit_code == 2 and re.search(said, result.stderr), result.output
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_board_of_ones_own_weights_is_replayed(own: Path) -> None:
    words = ["--images", f"folder:{own / 'pictures'}", "--weights", own / "mine.safetensors", "--device", "cpu"]
    result = call("verify", own / "to", "--replay", 2, "--yes", *words)
    assert result.exit_code == 0 and ": replayed: " in result.stdout, result.output
