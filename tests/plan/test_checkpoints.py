"""Weight files of users, from the option --weights to the records. Each file is a network."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from running import execute
from safetensors.torch import save_file

import sparsebench
from sparsebench.cli import main
from sparsebench.deploy.apply import timm_model
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.record import Record, numbers_of
from sparsebench.records.store import merge
from sparsebench.tasks.folder import cut_out
from sparsebench.tasks.sources.files import read_rgb

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ARCH, SIDE, CLASSES, EACH = "test_vit", 32, ("a", "b", "c"), 8
WRAPPERS = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "backbone.", "net.vit.")
LUMA = (0.299, 0.587, 0.114)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, i in itertools.product(CLASSES, range(EACH)):
        (root / name).mkdir(exist_ok=True)
        # Large flat areas, so that predictions of small networks differ between pictures.
        pixels = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8).repeat(20, axis=0).repeat(20, axis=1)
        Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def network(seed: int = 0, **changes: Any) -> Any:
    """Return a small timm model whose predictions differ between pictures."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(ARCH, **{"img_size": SIDE, "num_classes": len(CLASSES)} | changes).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def saved(path: Path, state: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@torch.no_grad()
def answers(model: Any, pictures: Path) -> list[int]:
    """Return the class that the network without a strategy predicts for each picture."""
    paths = sorted(pictures.glob("*/*.png"))
    side = model.patch_embed.img_size[0]
    x = torch.from_numpy(np.stack([cut_out(read_rgb(p), side, 0.95) for p in paths])).permute(0, 3, 1, 2) / 255
    if model.in_chans == 1:
        x = (x * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    if model.in_chans == 1:
        mean, std = mean.mean(), std.mean()
    return model((x - mean) / std).argmax(1).tolist()  # type: ignore[no-any-return]


def files_for(pictures: Path, *weights: Path, key: str | None = None) -> planner.Files:
    return planner.Files((f"folder:{pictures}",), weights=weights, weights_key=key)


def planned(out: Path, files: planner.Files, task: str = "folder", **options: Any) -> planner.Plan:
    request = Request(**{"suite": "folder", "tasks": (task,), "model": f"timm:{ARCH}", "plugins": ("dense",)} | options)
    return planner.plan(request, files, Registry(), out, "missing")


def executed(out: Path, files: planner.Files, task: str = "folder") -> dict[str, Record]:
    """Return the records of the dense network by the names of its weights."""
    execute(planned(out, files, task, alone=True), Registry(), out)
    return {str(record.cell.model.params["weights"]): record for record in store.read(out).values()}


def predicted(record: Record) -> list[int]:
    assert record.status == "ok" and record.outcomes is not None, record.failure
    return numbers_of(record.outcomes.predicted, record.outcomes.n).tolist()  # type: ignore[no-any-return]


def file_names(out: Path) -> dict[str, str]:
    """Return the readable names of weight files."""
    return {name: file for name, file in manifests.file_names(out).items() if name.startswith("weights-")}


def shown(out: Path, files: planner.Files) -> dict[str, list[int]]:
    """Return the predictions of networks, by the names of their files."""
    records = executed(out, files)
    return {file: predicted(records[name]) for name, file in file_names(out).items()}


def invoke(pictures: Path, *words: object) -> Any:
    first = ["run", "--suite", "folder", "--model", f"timm:{ARCH}", "--images", f"folder:{pictures}", "--dry-run"]
    return CliRunner().invoke(main, [*first, *map(str, words)])


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pth.tar"])
def test_names_are_read_without_what_wrappers_put_before_them(pictures: Path, tmp_path: Path, suffix: str) -> None:
    right = {}
    for number, before in enumerate(WRAPPERS if suffix == ".pth" else WRAPPERS[-2:]):
        model, file = network(number), f"{number}{suffix}"
        right[file] = answers(model, pictures)
        state = {before + name: value for name, value in model.state_dict().items()}
        if number:  # a block that was compiled separately
            state = {name.replace("blocks.0.", "blocks.0._orig_mod."): value for name, value in state.items()}
        saved(tmp_path / "nets" / file, state)
    assert len(set(map(tuple, right.values()))) > len(right) // 2
    assert shown(tmp_path / "out", files_for(pictures, tmp_path / "nets")) == right


def states(**changes: Any) -> Any:
    """Return the weights of a small model, without and with a prefix in their names."""
    state = network(**changes).state_dict()
    return state, {f"model.{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        (lambda: states()[1] | {"other.weight": torch.zeros(2)}, [], "own.pth holds the weights of another architec"),
        (lambda: states()[1] | {"norm.weight": torch.zeros(64)}, [], "own.pth holds the weights of another architec"),
        (lambda: states()[0] | {"module.norm.bias": torch.zeros(64)}, [], "unexpected: module.norm.bias"),
        (
            lambda: {"model": states()[0], "at": Path()},
            [],
            "is not a checkpoint with only weights; got pathlib",
        ),
        (
            lambda: {"a": states()[0], "b": states()[0]},
            [],
            "several state dicts; got a, b; name one with --weights-key",
        ),
        (lambda: {"a": states()[0], "b": states()[0]}, ["--weights-key", "ema"], "no weights under 'ema'; got a, b"),
        (lambda: states(in_chans=4)[0], [], "got a network of 4 channels; allowed: 3, 1"),
        (lambda: states(img_size=(32, 64))[0], [], "8 position embeddings: neither a square"),
        (lambda: states(img_size=(32, 64))[0], ["--task", "folder:canvas=32"], "8 position embeddings: neither a"),
    ],
)
def test_weights_that_cannot_be_taken_are_refused_in_a_line(
    pictures: Path, tmp_path: Path, content: Any, words: list[str], text: str
) -> None:
    done = invoke(pictures, "--weights", saved(tmp_path / "own.pth", content()), *words)
    assert done.exit_code == 2 and text in done.output and len(done.output.splitlines()) == 1


def averaged(model: Any) -> dict[str, Any]:
    return dict(torch.optim.swa_utils.AveragedModel(model).state_dict())


@pytest.mark.parametrize(
    ("nest", "key"),
    [
        (lambda a, b: {"state_dict": a, "epoch": 3}, None),
        (lambda a, b: {"model_state": a, "best": 0.7}, None),
        (lambda a, b: {"anything": a, "epoch": 3}, None),
        (lambda a, b: {"model": {"state_dict": a}}, None),
        (lambda a, b: {"state_dict": a, "state_dict_ema": b}, None),
        (lambda a, b: {"state_dict": b, "state_dict_ema": a}, "state_dict_ema"),
        (lambda a, b: {"teacher": a, "student": b}, "teacher"),
        (lambda a, b: {f"{key}.{name}": x for key, of in (("a", a), ("b", b)) for name, x in of.items()}, "a"),
    ],
)
def test_weights_in_a_checkpoint_are_found_or_named_by_their_key(
    pictures: Path, tmp_path: Path, nest: Any, key: str | None
) -> None:
    one, other = network(1), network(2)
    files = files_for(pictures, saved(tmp_path / "own.pth", nest(one.state_dict(), other.state_dict())), key=key)
    (record,) = executed(tmp_path / "out", files).values()
    assert predicted(record) == answers(one, pictures) != answers(other, pictures)
    assert record.cell.model.params.get("weights_key", "") == (key or "")


def test_a_training_s_checkpoint_with_its_optimizer_and_average_is_read(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = network(1), network(2)
    optimizer = torch.optim.AdamW(one.parameters())
    one(torch.zeros(1, 3, SIDE, SIDE)).sum().backward()
    optimizer.step()
    content = {"model": one.state_dict(), "model_ema": averaged(other), "optimizer": optimizer.state_dict(), "epoch": 3}
    path = saved(tmp_path / "own.pth", content)
    (first,) = executed(tmp_path / "first", files_for(pictures, path)).values()
    (line,) = caplog.messages
    assert "own.pth: 'model' is used, and not model_ema" in line and "--weights-key" in line
    caplog.clear()
    (second,) = executed(tmp_path / "second", files_for(pictures, path, key="model_ema")).values()
    assert not caplog.messages
    assert (predicted(first), predicted(second)) == (answers(one, pictures), answers(other, pictures))
    assert first.cell_id != second.cell_id


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_another_precision_becomes_float32_and_a_line_says_it(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    model = network().to(getattr(torch, kind))
    path = saved(tmp_path / "own.safetensors", model.state_dict())
    (record,) = executed(tmp_path / "out", files_for(pictures, path)).values()
    assert not {"weights_key", "in_chans"} & set(record.cell.model.params)  # at their defaults
    assert caplog.messages == [f"--weights {path}: {kind} becomes float32"]
    assert predicted(record) == answers(model.float(), pictures)


@pytest.mark.parametrize(
    ("made", "task", "side", "text"),
    [
        (48, "folder", 48, None),
        (32, "folder:canvas=64", 64, "task 'folder' has 64 x 64: its position embeddings are resampled"),
        (48, "composite:pretrain_epochs=0", 32, "task 'composite' has 32 x 32"),
    ],
)
def test_pictures_have_the_size_of_the_weights_or_the_task(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, made: int, task: str, side: int, text: str | None
) -> None:
    """Pictures have the size that the weights are made for or the task asks for and a line says it."""
    model = network(img_size=made)
    path = saved(tmp_path / "own.pth", model.state_dict())
    if task.startswith("folder"):
        (record,) = executed(tmp_path / "out", files_for(pictures, path), task).values()
        model.set_input_size((side, side))
        assert predicted(record) == answers(model, pictures)
        sides = {record.cell.task.params["canvas"]}
    else:
        plan = planned(tmp_path / "out", planner.Files(weights=(path,)), task, suite="quick", n_train=(10,))
        sides = {job.cell.task.params["canvas"] for job in plan.jobs}
    assert sides == {side} and len(caplog.messages) == bool(text)
    assert all(f"own.pth is made for {made} x {made} pixels, and {text}" in line for line in caplog.messages)


@pytest.mark.parametrize("suite", ["folder", "imagenet"])
def test_the_option_image_size_makes_the_cells_of_the_parameter_canvas(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, suite: str
) -> None:
    files = files_for(pictures, saved(tmp_path / "own.pth", network().state_dict()))
    others = "folder:choose_on=test"

    def cells(task: str, **more: Any) -> set[str]:
        return {job.cell.id for job in planned(tmp_path / "out", files, task, suite=suite, **more).jobs}

    made = cells(others, image_size=64)
    assert any("made for 32 x 32 pixels, and task 'folder' has 64 x 64" in line for line in caplog.messages)
    assert made == cells(f"{others},canvas=64") == cells(f"{others},canvas=64", image_size=64)
    assert cells(others) == cells(others, image_size=SIDE)  # the size of the weights
    assert made.isdisjoint(cells(others))
    with pytest.raises(UserError, match=r"--image-size 64, and canvas=32"):
        cells(f"{others},canvas=32", image_size=64)
    with pytest.raises(UserError, match=r"40.* cannot be divided into patches"):
        cells(others, image_size=40)


def test_the_image_size_of_a_composite_is_its_canvas_and_other_tasks_have_none(tmp_path: Path) -> None:
    weights = saved(tmp_path / "own.pth", network(num_classes=10, img_size=64).state_dict())
    for more in ({"tasks": "composite"}, {"tasks": ()}):
        options = {"suite": "probe", "plugins": "attn_topk", "image_size": 80} | more
        jobs = planned(tmp_path / "out", planner.Files(weights=weights), **options).jobs
        assert {job.cell.task.params["canvas"] for job in jobs} == {80}
        assert {job.cell.task.params["foreground"] for job in jobs} == {64}
    with pytest.raises(UserError, match=r"no task of this run has images.*--image-size 64"):
        planned(tmp_path / "out", planner.Files(), "theory", suite="quick", model=None, image_size=64)


def test_rotary_positions_of_another_size_are_said(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = timm.create_model("vit_small_patch16_rope_224", num_classes=len(CLASSES))
    assert model.pos_embed is None
    files = files_for(pictures, saved(tmp_path / "own.safetensors", model.state_dict()))
    options = {"model": "timm:vit_small_patch16_rope_224", "alone": True}
    planned(tmp_path / "out", files, **options)
    assert not caplog.messages
    planned(tmp_path / "out", files, image_size=32, **options)
    assert "made for 224 x 224 pixels, and task 'folder' has 32 x 32: its rotary positions" in caplog.text


OBLONG = {"input_size": (3, 32, 64), "num_classes": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.95}


@torch.no_grad()
def test_an_architecture_s_own_oblong_is_exported_as_it_is(tmp_path: Path) -> None:
    model = network(img_size=(32, 64))
    config = {"architecture": ARCH, "num_classes": 3, "pretrained_cfg": OBLONG}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = timm_model(f"timm:local-dir:{tmp_path}", saved(tmp_path / "own.pth", model.state_dict()))
    x = torch.randn(2, 3, 32, 64)
    assert torch.equal(again(x), model(x))


def test_weights_for_oblong_pictures_need_an_explicit_square(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights for oblong pictures are tested on squares only where that is asked for."""
    for module in (timm.models._factory, sparsebench.models.timm_models):
        monkeypatch.setattr(module, "load_model_config_from_hf", lambda name, **_: (OBLONG, ARCH, {}))
    files = files_for(pictures, saved(tmp_path / "own.pth", network(img_size=(32, 64)).state_dict()))
    with pytest.raises(UserError, match=r"for 32 x 64 pixels.*--image-size SIDE"):
        planned(tmp_path / "out", files, model="timm:hf-hub:somebody/oblong")
    planned(tmp_path / "out", files, "folder:canvas=32", model="timm:hf-hub:somebody/oblong")
    assert "made for 32 x 64 pixels, and task 'folder' has 32 x 32" in caplog.text


def test_a_network_of_one_channel_is_tested_on_grey_pictures(pictures: Path, tmp_path: Path) -> None:
    model = network(in_chans=1)
    path = saved(tmp_path / "own.pth", model.state_dict())
    frame = sparsebench.run(
        ("patch_variance", "gradient_energy", "noise"), suite="folder", model=f"timm:{ARCH}", weights=path,
        images=f"folder:{pictures}", out=tmp_path / "out", jobs=0,
    )  # fmt: skip
    assert {"patch_variance", "gradient_energy", "noise"} <= set(frame["strategy"])
    records = list(store.read(tmp_path / "out").values())
    assert {record.status for record in records} == {"ok"}
    (dense,) = (record for record in records if record.cell.strategy.name == "dense")
    assert predicted(dense) == answers(model, pictures) and dense.cell.model.params["in_chans"] == 1


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder with three networks, and other files that often lie beside checkpoints."""
    for seed in (1, 2, 3):
        saved(tmp_path / "nets" / f"net-{seed}.pth", network(seed).state_dict())
    (tmp_path / "nets" / "args.yaml").write_text("lr: 1")
    (tmp_path / "nets" / ".hidden").write_text("")
    return tmp_path / "nets"


def test_each_file_of_weights_is_a_network_by_its_name(pictures: Path, tmp_path: Path, three: Path) -> None:
    """Whether a folder, a pattern or each file is named."""
    every, planned_cells = sorted(three.glob("*.pth")), []
    for weights in ((three,), (three / "net-*.pth",), tuple(every)):
        done = invoke(pictures, *(word for path in weights for word in ("--weights", path)))
        assert done.exit_code == 0 and "3 networks: net-1.pth, net-2.pth, net-3.pth" in done.output
        plan = planned(tmp_path / "out", files_for(pictures, *weights))
        planned_cells.append({job.cell.id for job in plan.jobs})
    assert planned_cells[0] == planned_cells[1] == planned_cells[2]
    right = {path.name: answers(network(seed), pictures) for seed, path in enumerate(every, 1)}
    assert shown(tmp_path / "out", files_for(pictures, three)) == right


def test_files_that_changed_since_an_earlier_plan_have_other_names(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "pictures")
    weights = saved(tmp_path / "net.pth", network(1).state_dict())
    files, named = files_for(root, weights), []
    for change in range(3):
        if change == 1:
            saved(weights, network(2).state_dict())
        if change == 2:
            next(root.rglob("*.png")).unlink()
        plan = planned(tmp_path / "out", files)
        cell = plan.jobs[0].cell
        named.append({cell.model.params["weights"], cell.task.params["images"]})
        assert named[-1] <= plan.locations.keys()
    assert [len(one & two) for one, two in itertools.pairwise(named)] == [1, 1]


def test_python_takes_several_paths_or_one_or_none(pictures: Path, tmp_path: Path, three: Path) -> None:
    every = sorted(map(str, three.glob("*.pth")))
    options: dict[str, Any] = {"suite": "folder", "model": f"timm:{ARCH}", "images": f"folder:{pictures}", "jobs": 0}
    sparsebench.run((), weights=every[:2], out=tmp_path / "out", **options)
    assert sorted(file_names(tmp_path / "out").values()) == ["net-1.pth", "net-2.pth"]
    with pytest.raises(UserError, match="task 'folder' tests trained weights"):
        sparsebench.run((), weights=None, out=tmp_path / "none", **options)
    with pytest.raises(UserError, match=r"task 'composite' trains.*got 3 files of weights; allowed: one"):
        sparsebench.run((), weights=every, tasks="composite", n_train=10, out=tmp_path / "none", model=f"timm:{ARCH}")
    with pytest.raises(UserError, match=r"weights: .* path.*; got 3"):
        sparsebench.run((), weights=[3], out=tmp_path / "none", **options)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--weights", "NETS/args*"], "matches no weight file; got args.yaml"),
        (["--weights", "EMPTY"], "holds no weight file; got nothing"),
        (["--weights-key", "model_ema"], "--weights-key needs a weight file; give --weights"),
    ],
)
def test_what_names_no_weights_is_refused(
    pictures: Path, three: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"NETS": str(three), "EMPTY": str(tmp_path / "empty")}
    done = invoke(pictures, *(re.sub("NETS|EMPTY", lambda found: places[found[0]], word) for word in words))
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize("form", ["a copy", "module.", "backbone.", "float64", "under a key"])
def test_equal_weights_are_one_network(
    pictures: Path, three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """Equal weights are one network and what is left out of a folder is said."""
    first, copy = three / "net-1.pth", three / "z.pth"
    state = network(1).state_dict()
    again = {
        "module.": {f"module.{name}": value for name, value in state.items()},
        "backbone.": {name if name.startswith("head.") else f"backbone.{name}": state[name] for name in state},
        "float64": {name: value.double() for name, value in state.items()},
        "under a key": {"state_dict": state, "epoch": 3},
    }
    if form in again:
        torch.save(again[form], copy)
    else:
        copy.write_bytes(first.read_bytes())
    plan = planned(tmp_path / "out", files_for(pictures, three))
    assert len({job.cell.model.params["weights"] for job in plan.jobs}) == 3
    assert caplog.messages == [
        f"--weights {three}: 4 files are used; left out: args.yaml",
        f"--weights {copy}: the same weights as {first}: they are one network",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"img_size": 48}, "net-1.pth for 32 x 32 pixels of 3 channels and 3 classes, z.pth for 48 x 48"),
        ({"in_chans": 1}, "z.pth for 32 x 32 pixels of 1 channels"),
        ({"num_classes": 5}, ": there are 3 class folders, and the head has 5 classes"),
        ({"depth": 5}, "z.pth holds the weights of another architecture than test_vit: missing: blocks.5"),
    ],
)
def test_networks_of_one_board_are_alike_or_a_file_is_named(
    pictures: Path, three: Path, changes: dict[str, Any], text: str
) -> None:
    saved(three / "z.pth", network(**changes).state_dict())
    done = invoke(pictures, "--weights", three)
    assert done.exit_code == 2 and text in done.output and len(done.output.splitlines()) == 1


def test_files_of_one_name_differ_by_folder_and_content(pictures: Path, tmp_path: Path) -> None:
    """Files of one name are told apart by their folders and by their content."""
    a, b, c = (saved(tmp_path / part / "best.pth", network(i).state_dict()) for i, part in enumerate("abc"))
    executed(tmp_path / "two", files_for(pictures, a, b))
    assert sorted(file_names(tmp_path / "two").values()) == ["a/best.pth", "b/best.pth"]
    records = executed(tmp_path / "one", files_for(pictures, a)) | executed(tmp_path / "one", files_for(pictures, c))
    names = file_names(tmp_path / "one")
    assert names == {name: f"best.pth ({name})" for name in records}
    merge([tmp_path / "two", tmp_path / "one"], tmp_path / "all")
    merged = file_names(tmp_path / "all")
    assert sorted(name.partition(" ")[0] for name in merged.values()) == ["a/best.pth", "b/best.pth", "best.pth"]


def test_an_overwritten_file_is_not_taken_for_the_first(pictures: Path, tmp_path: Path) -> None:
    """A file that is written over while cells run is not taken for the first."""
    path = saved(tmp_path / "last.pth", network(1).state_dict())
    plan = planned(tmp_path / "out", files_for(pictures, path))
    saved(path, network(2).state_dict())
    execute(plan, Registry(), tmp_path / "out")
    (record, *_) = store.read(tmp_path / "out").values()
    assert record.status == "failed" and record.failure is not None
    assert "last.pth changed while the run was under way" in record.failure.reason


def test_an_export_takes_one_network_as_its_weights_say(tmp_path: Path, three: Path) -> None:
    one, other = network(1, in_chans=4, img_size=48), network(2, in_chans=4, img_size=48)
    content = {"model": one.state_dict(), "model_ema": averaged(other)}
    path, x = saved(tmp_path / "own.pth", content), torch.randn(1, 4, 48, 48)
    words = ["export", f"timm:{ARCH}", "--plugin", "tome:macs=1", "--weights", str(path), "--weights-key", "model_ema"]
    done = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "own.pt2")])
    assert done.exit_code == 0, done.output
    program = torch.export.load(tmp_path / "own.pt2").module()
    torch.testing.assert_close(program(x), other(x), atol=1e-4, rtol=1e-4)
    words[5] = str(three)
    done = CliRunner().invoke(main, [*words[:6], "-o", str(tmp_path / "other.pt2")])
    assert done.exit_code == 2 and "--weights must be one file; got 3 files" in done.output
