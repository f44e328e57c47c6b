"""Cells that are run again: which are drawn, whose code runs and where, and what it takes for the badge."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from click.testing import CliRunner, Result
from coded import write_pictures
from forge import JUDGE, PEEKS, PLUGIN, changed, improve, judged, moved, put, said, sourced
from running import inline, run_without_board
from safetensors.torch import save_file

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plan.request import Files
from sparsebench.plugin.registry import Registry
from sparsebench.publish.replay import replay
from sparsebench.publish.submission import Verdict, manifest_of, read_records, submit, verify

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def replayed(folder: Path, number: int | None = None, seed: int | None = None) -> Verdict:
    verdict = verify(folder)
    replay(folder, verdict, number, Files(), "cpu", seed)
    return verdict


def call(folder: Path, *words: Any) -> Result:
    return CliRunner().invoke(main, [str(word) for word in ("verify", folder, "--device", "cpu", *words)])


@pytest.mark.slow
def test_cells_that_are_run_again_agree(few: Path) -> None:
    """Cells that are run again here come out the same with the file of the submission."""
    result = call(few, "--replay", "all", "--yes")
    assert f"this runs the file {few / 'plugin' / 'good.py'} with your user rights, " in result.stderr
    assert result.exit_code == 0, result.output
    assert (
        ": replayed: complete and consistent; randomly drawn cells agree when they are run again here\n"
        in result.stdout
    )
    assert "replayed 5 of 5 cells (1 of 1 cells of the strategy), with --replay-seed " in result.stdout
    assert "another machine" not in result.stdout


@pytest.mark.slow
def test_half_of_the_drawn_cells_are_its_own_and_no_content_moves_the_draw(sound: Path, tmp_path: Path) -> None:
    """Whoever forges can try seconds until cells are drawn that are sound, if the draw hangs on them."""
    records = {record.cell_id: record for record in read_records(sound)}
    elsewhere = changed(sound, tmp_path, lambda raw: (put(1e6, "seconds")(raw), moved(raw)), None)
    draws = []
    for folder, seed in ((sound, 1), (elsewhere, 1), (sound, 2)):
        verdict = replayed(folder, 4, seed)
        assert verdict.badge == "replayed", verdict.why
        about, _, drawn = verdict.notes[0].partition(f", with --replay-seed {seed}: ")
        assert about == "replayed 4 of 17 cells (2 of 4 cells of the strategy)"
        draws.append(drawn.split(", "))
        own = [records[one].cell.task.name for one in draws[-1] if records[one].label == "norm"]
        places = [re.search("4 of them .* another machine .* within 0.00 points", note) for note in verdict.notes[1:]]
        assert all(places) and len(places) == (folder == elsewhere)
        assert len(draws[-1]) == 4 and sorted(own) == ["composite", "spurious"]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.slow
def test_what_a_cell_starts_from_is_run_first_through_two_levels(tmp_path: Path) -> None:
    """A trained strategy of sparsebench, which starts from dense, which starts from a network that was pretrained."""
    task = "composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40"
    run_without_board("dynamic_vit", tasks=task, n_train=(20,), seeds=1, out=tmp_path / "out")
    folder = Path(submit(tmp_path / "out", tmp_path / "to").folder)
    verdict = replayed(folder, 1)
    assert verdict.badge == "replayed" and "(1 of 1 cells of the strategy)" in verdict.notes[0], verdict


@pytest.mark.slow
def test_a_task_in_the_file_of_the_strategy_is_replayed_on_any_pictures(tmp_path: Path) -> None:
    """The cells of the baselines too, and those that start from another network."""
    task = Path(__file__).resolve().parents[1] / "plugins" / "brings_task.py"
    (tmp_path / "both.py").write_text(PLUGIN.read_text() + task.read_text())
    write_pictures(tmp_path / "pictures", {"a": 5}, each=6)
    asked: dict[str, Any] = {"tasks": "small:pretrain_epochs=1,pretrain_samples=40", "n_train": (8,), "seeds": 1}
    asked |= {"backgrounds": str(tmp_path / "pictures"), "macs": 0.6}
    run_without_board(str(tmp_path / "both.py"), **asked, out=tmp_path / "out")
    folder = Path(submit(tmp_path / "out", tmp_path / "to").folder)
    result = call(folder, "--replay", "all", "--yes", "--backgrounds", tmp_path / "pictures")
    assert result.exit_code == 0 and ": replayed: " in result.stdout, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLUGIN.read_text(), "other outcomes here, on the same machine"),
        (JUDGE + PLUGIN.read_text(), "other outcomes here, on the same machine"),  # what compares never imports it
        (PLUGIN.read_text().replace("view):", f"view):{PEEKS}"), "does not conform: check "),
        (PLUGIN.read_text() + "\nraise SystemExit(0)\n", ""),
    ],
    ids=["other numbers", "replaces the judge", "reads the answers", "leaves"],
)
def test_a_file_with_other_numbers_is_not_replayed(few: Path, tmp_path: Path, text: str, said: str) -> None:
    folder = sourced(few, tmp_path, text, lambda raw: improve(raw, 10))
    badge, out = judged(folder, "--replay", "all", "--yes", "--device", "cpu")
    assert badge == "reported" and said in out, out
    assert not re.search("verified|checked", out)


@pytest.mark.parametrize(
    ("origin", "error"),
    [
        ({"plugin": "far", "distribution": "far-away", "version": "2.0"},
         r"'norm' is not installed; got no .* far-away 2\.0; install"),
        ({"plugin": "attn_topk", "distribution": "sparsebench"}, "unknown strategy; got 'norm'"),
    ],
)  # fmt: skip
def test_an_installed_strategy_must_be_here(few: Path, tmp_path: Path, origin: dict[str, str], error: str) -> None:
    made = manifest_of(few).plugin.model_copy(update=origin)
    folder = said(changed(few, tmp_path, put(made.model_dump(), "origin")), plugin=made, file="")
    with pytest.raises(UserError, match=error):
        replayed(folder)


def test_a_strategy_of_another_kind_than_its_record_says_is_not_run(job_of: Any, tmp_path: Path) -> None:
    (job,) = job_of(str(PLUGIN), n_train=4)
    (record,) = inline([job.model_copy(update={"kind": "oracle"})], Registry(), tmp_path)
    assert record.failure is not None and record.failure.reason == "'norm' is deployable here, and oracle in its job"


def test_what_is_rejected_is_not_run_and_nothing_is_unasked(few: Path, tmp_path: Path) -> None:
    verdict = replayed(changed(few, tmp_path, put(0.999, "metrics", "accuracy", "value")))
    assert verdict.badge == "rejected" and not verdict.notes
    result = call(few, "--replay", 1)
    assert result.exit_code == 2 and "; give --yes to confirm" in result.stderr


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a submission for pictures and weights of one's own, which lie beside it."""
    root = tmp_path_factory.mktemp("own")
    write_pictures(root / "pictures" / "val", {"a": 5, "b": 6}, each=4)
    for seed, name in enumerate(("mine", "other")):
        torch.manual_seed(seed)
        save_file(timm.create_model("test_vit", num_classes=2).state_dict(), root / f"{name}.safetensors")
    pictures, weights = f"folder:{root / 'pictures'}", root / "mine.safetensors"
    (root / "snapshot").mkdir()  # as timm stores a model
    (root / "snapshot" / "config.json").write_text('{"architecture": "test_vit", "pretrained_cfg": {}}')
    shutil.copy(root / "other.safetensors", root / "snapshot")
    asked: dict[str, Any] = {"suite": "folder", "model": "timm:test_vit", "images": pictures, "weights": weights}
    run_without_board(str(PLUGIN), **asked, out=root / "out")
    submit(root / "out", root / "to")
    return root


def files(own: Path, *names: str) -> list[Any]:
    every = {"images": ("--images", f"folder:{own / 'pictures'}")}
    every |= {name: ("--weights", own / f"{name}.safetensors") for name in ("mine", "other")}
    every["snapshot"] = ("--weights", own / "snapshot")
    return [word for name in names for word in every[name]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["images"], r"was run with weights-\w{12}; got no such file.*; give .* with --weights"),
        (["images", "other"], r"was run with weights-\w{12}; got weights-\w{12}; give .* with --weights"),
        (["images", "snapshot"], r"was run with weights-\w{12}; got weights-\w{12}; give .* with --weights"),
        (["mine"], r"was run with folder-\w{12}; got no such file.*; give .* with --images"),
    ],
)
def test_a_replay_names_the_files_that_it_needs(own: Path, given: list[str], said: str) -> None:
    result = call(own / "to", "--replay", 2, "--yes", *files(own, *given))
    assert result.exit_code == 2 and re.search(said, result.stderr), result.output
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_cells_with_a_file_of_classes_are_not_said_to_disagree(own: Path, tmp_path: Path) -> None:
    """A replay has no such file, which is no fault of the submission."""
    (tmp_path / "classes.txt").write_text("b\na\n")
    asked: dict[str, Any] = {"suite": "folder", "tasks": f"folder:classes={tmp_path / 'classes.txt'}"}
    asked |= {"images": f"folder:{own / 'pictures'}", "model": "timm:test_vit", "weights": own / "mine.safetensors"}
    run_without_board(str(PLUGIN), **asked, seeds=1, out=tmp_path / "out")
    folder = Path(submit(tmp_path / "out", tmp_path / "to").folder)
    result = call(folder, "--replay", 1, "--yes", *files(own, "images", "mine"))
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert re.search(r"cell \w{16} cannot be replayed: .*classes.* a file.*", result.stderr)


@pytest.mark.slow
def test_a_board_of_ones_own_weights_is_replayed(own: Path) -> None:
    result = call(own / "to", "--replay", 2, "--yes", *files(own, "images", "mine"))
    assert result.exit_code == 0 and ": replayed: " in result.stdout, result.output
