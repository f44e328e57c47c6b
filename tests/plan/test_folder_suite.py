"""Trained weights tested as they are: from the request to the records."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from coded import write_noise, write_random_weights
from running import execute
from safetensors.torch import load_file, save_file

from sparsebench.deploy.compare import compare, rows
from sparsebench.deploy.pictures import Trainer
from sparsebench.errors import UserError
from sparsebench.models.vits import Timm
from sparsebench.plan import plan as planner
from sparsebench.plan.request import How, Request, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.records.table import row_of
from sparsebench.runner.prepare import Context, prepare
from sparsebench.tasks.folder import Folder, cut_out
from sparsebench.tasks.sources.files import read_rgb

ARCH, CANVAS = "deit_tiny_patch16_224", 32
TASK = f"folder:canvas={CANVAS}"
NAMES = ("n01440764", "n01443537", "n01484850")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of noise in three classes of ImageNet, seven pictures each."""
    root = tmp_path_factory.mktemp("pictures")
    write_noise(root / "val", NAMES)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a model with 1000 classes, in timm's own size."""
    return write_random_weights(tmp_path_factory.mktemp("weights") / "own.safetensors", ARCH)


def planned(out: Path, files: planner.Files, **options: Any) -> planner.Plan:
    options = {"suite": "folder", "tasks": (TASK,), "model": f"timm:{ARCH}"} | options
    return planner.plan(Request(**options), files, Registry(), out, "missing")


def executed(out: Path, files: planner.Files, **options: Any) -> dict[str, Record]:
    """Return the records of a run, by strategy."""
    execute(planned(out, files, **options), Registry(), out)
    return {record.cell.strategy.name: record for record in store.read(out).values()}


@pytest.fixture(scope="module")
def records(pictures: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    out = tmp_path_factory.mktemp("records")
    files = planner.Files((f"folder:{pictures}",), weights=(weights,))
    return executed(out, files, plugins=("attn_topk", "oracle"))


def test_strategies_can_be_compared_on_it_though_nobody_knows_what_matters(
    pictures: Path, weights: Path, tmp_path: Path
) -> None:
    files = planner.Files((f"folder:{pictures}",), weights=(weights,))
    request = Request(suite="folder", tasks=(TASK,), model=f"timm:{ARCH}", keep=(0.5,))
    trainer = Trainer(files, How("cpu", jobs=0), tmp_path)
    found = compare(("attn_topk", "random"), request, trainer, 2)
    assert list(found.stages) == [0, 3, 6]  # of four patches one is left then
    assert {(row["relevant_kept_a"], row["relevant_kept_b"]) for row in rows(found)} == {(None, None)}
    assert found.scene is not None and not found.scene.matters.any()


def answers(pictures: Path, weights: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what the bare timm model answers: (21,) classes, and whether the label is among the first five."""
    cfg = {"file": str(weights), "num_classes": 1000}
    model = timm.create_model(ARCH, img_size=CANVAS, pretrained=True, pretrained_cfg_overlay=cfg).eval()
    paths = sorted((pictures / "val").rglob("*.png"))
    x = torch.from_numpy(np.stack([cut_out(read_rgb(p), CANVAS, 0.9) for p in paths])).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        logits = model((x - mean) / std)
    labels = torch.arange(21) // 7
    return logits.argmax(1).numpy(), (logits.topk(5).indices == labels[:, None]).any(1).numpy()


def test_the_dense_model_answers_as_timm_s(records: dict[str, Record], pictures: Path, weights: Path) -> None:
    predicted, among_five = answers(pictures, weights)
    dense = records["dense"]
    assert dense.status == "ok", dense.failure
    assert len(set(predicted)) > 3
    assert dense.metrics["accuracy"].value == (predicted == np.arange(21) // 7).mean()
    assert dense.metrics["accuracy_top5"].value == among_five.mean()


def test_a_record_has_cost_and_speed_and_says_which_weights_but_no_path(
    records: dict[str, Record], weights: Path, pictures: Path
) -> None:
    for record in records.values():
        assert row_of(record)["track"] == "frozen"
        assert not any(str(path) in record.model_dump_json() for path in (weights.parent, pictures))
    for name in ("dense", "random", "attn_topk"):
        record = records[name]
        assert record.status == "ok", record.failure
        assert record.cell.n_train == 0 and record.notes["initial_weights"] == record.cell.model.params["weights"]
        assert {"accuracy", "accuracy_top5", "macs", "macs_ratio", "images_per_s"} <= set(record.metrics)
        assert record.metrics["selection_auroc"].value is None and record.metrics["selection_recall"].n == 0
    assert records["attn_topk"].metrics["macs_ratio"].value == pytest.approx(0.7, abs=0.1)


def test_an_oracle_is_unsupported(records: dict[str, Record]) -> None:
    oracle = records["oracle"]
    assert oracle.status == "unsupported" and oracle.failure is not None
    assert oracle.failure.reason == "the data of this cell has no relevance mask"


def test_a_cell_that_trains_begins_with_the_file_s_weights_and_a_fresh_head(weights: Path, tmp_path: Path) -> None:
    task = "composite:epochs=1,test=10,pretrain_epochs=0"
    plan = planned(tmp_path, planner.Files(weights=(weights,)), suite="quick", tasks=(task,), n_train=(10,), seeds=2)
    heads = []
    for repetition in (0, 1):
        (job,) = (j for j in plan.jobs if j.cell.strategy.name == "dense" and j.cell.repetition == repetition)
        cell = prepare(job, Registry(), Context(Setting(out=tmp_path, device="cpu", locations=plan.locations)))
        state = cell.network.module.state_dict()
        assert cell.initial == job.cell.model.params["weights"]
        for name, value in load_file(weights).items():
            assert name == "pos_embed" or name.startswith("head.") or torch.equal(value, state[name])
        heads.append(state["head.weight"])
    assert heads[0].shape == (10, 192) and not torch.equal(*heads)


@pytest.mark.parametrize("classes", [10, 1000])
def test_a_network_teaches_what_it_becomes_only_if_its_head_is_trained(tmp_path: Path, classes: int) -> None:
    path = tmp_path / "own.safetensors"
    save_file(timm.create_model(ARCH, num_classes=classes).state_dict(), path)
    task, files = "composite:epochs=1,test=10,pretrain_epochs=0", planner.Files(weights=(path,))
    plugins = "dynamic_vit", "attn_topk"
    plan = planned(tmp_path, files, suite="quick", tasks=(task,), n_train=(10,), seeds=1, plugins=plugins)
    jobs = {job.cell.strategy.name: job for job in plan.jobs}
    context = Context(Setting(out=tmp_path, device="cpu", locations=plan.locations))
    assert prepare(jobs["attn_topk"], Registry(), context).teacher is None
    taught = jobs["dynamic_vit"]
    assert taught.cell.init == jobs["dense"].cell
    bare = taught.model_copy(update={"cell": taught.cell.model_copy(update={"init": None})})
    cell = prepare(bare, Registry(), context)
    assert (cell.teacher is not None) == (classes == 10)
    if cell.teacher is None:
        return
    pictures = torch.from_numpy(cell.data.train.inputs[:3])
    before = cell.network(pictures).detach().clone()
    with torch.no_grad():
        for weight in cell.network.module.parameters():
            weight.add_(0.1)
    assert torch.equal(cell.teacher.tell(pictures).logits, before)


def test_nothing_is_trained(pictures: Path, weights: Path, tmp_path: Path) -> None:
    files = planner.Files((f"folder:{pictures}",), weights=(weights,))
    for suite in ("folder", "quick"):
        assert {job.cell.n_train for job in planned(tmp_path, files, suite=suite).jobs} == {0}
    assert {job.cell.where for job in planned(tmp_path, files, where="test").jobs} == {"both", "test"}


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        (True, {"n_train": (4,)}, "'folder' trains nothing; .*leave --n-train out"),
        (True, {"where": "train"}, "on task 'folder'.*; got train; allowed: both, test"),
        (False, {}, "task 'folder' tests trained weights; give --pretrained or --weights"),
        (False, {"model": "vit"}, "model 'vit' has none"),
        (False, {"model": "vit", "pretrained": True}, "--pretrained: model 'vit' has no trained weights"),
    ],
)
def test_what_trains_or_has_no_weights_is_refused(
    pictures: Path, weights: Path, tmp_path: Path, given: bool, options: Any, says: str
) -> None:
    files = planner.Files((f"folder:{pictures}",), weights=(weights,) * given)
    with pytest.raises(UserError, match=says):
        planned(tmp_path, files, **options)


def command(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    """Return what the command line does where the hub's cache is that folder and there is no network."""
    line = [sys.executable, "-m", "sparsebench", "run", *map(str, arguments)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.slow
def test_what_cannot_be_fetched_is_one_error_with_the_next_step(pictures: Path, tmp_path: Path) -> None:
    ask = ["--suite", "folder", "--task", TASK, "--model", f"timm:{ARCH}", "--images", f"folder:{pictures}"]
    done = command(*ask, "--pretrained", "--out", tmp_path / "out", cache=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert line.startswith(f"Error: timm cannot fetch the trained weights of '{ARCH}'")
    assert line.endswith("check the network, or give --weights FILE.safetensors")


@pytest.mark.slow
def test_what_was_fetched_is_used_and_named(pictures: Path, weights: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / f"models--timm--{ARCH}.fb_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    save_file(load_file(weights), snapshot / "model.safetensors")
    ask = ["--suite", "folder", "--task", TASK, "--model", f"timm:{ARCH}", "--images", f"folder:{pictures}"]
    out = tmp_path / "out"
    done = command(*ask, "--pretrained", "--out", out, "--jobs", 0, cache=tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    found = {record.cell.strategy.name: record for record in store.read(out).values()}
    predicted, _ = answers(pictures, weights)
    assert found["dense"].metrics["accuracy"].value == (predicted == np.arange(21) // 7).mean()
    assert {record.notes["initial_weights"] for record in found.values()} == {f"hf-hub:timm/{ARCH}.fb_in1k"}


def test_a_folder_has_one_name_whatever_else_is_asked_for(pictures: Path, weights: Path, tmp_path: Path) -> None:
    root = tmp_path / "three"
    for split, i in (("train", 0), ("test", 1)):
        for name in NAMES:
            (root / split / name).mkdir(parents=True)
            (root / split / name / "0.png").write_bytes((pictures / "val" / name / f"{i}.png").read_bytes())
    files = planner.Files((f"folder:{root}",), weights=(weights,))
    composite = f"composite:canvas={CANVAS},pretrain_epochs=0,foreground=16"
    ids = []
    for tasks in ((TASK,), (TASK, composite), (composite,)):
        trained = {"n_train": (4,)} if TASK not in tasks else {"suite": "real"}
        plan = planned(tmp_path / "out", files, tasks=tasks, **trained)
        ids.append({job.cell.task.params["images"] for job in plan.jobs})
    assert len(ids[0]) == len(ids[2]) == 1 and ids[1] == ids[0] | ids[2] and len(ids[1]) == 2
    assert {ids[0].pop(): root / "test", ids[2].pop(): root}.items() <= planned(
        tmp_path / "out", files, tasks=(TASK, composite), suite="real"
    ).locations.items()


@pytest.mark.theory
def test_tokens_beside_a_folder_do_not_ask_for_a_part_to_train_on(
    pictures: Path, weights: Path, tmp_path: Path
) -> None:
    files = planner.Files((f"folder:{pictures}",), weights=(weights,))
    plan = planned(tmp_path, files, tasks=(TASK, "theory"), suite="quick", model=None)
    assert {job.cell.task.name for job in plan.jobs} == {"folder", "theory"}


@pytest.mark.parametrize(
    ("arch", "own"),
    [
        ("deit_tiny_patch16_224", (224, 0.9, "short", "bicubic")),
        ("deit3_small_patch16_384", (384, 1.0, "short", "bicubic")),
        ("vit_small_patch16_224.dino", (224, 0.9, "short", "bicubic")),
        ("vit_base_patch16_224_miil.in21k_ft_in1k", (224, 0.875, "short", "bilinear")),
    ],
)
def test_pictures_are_cut_as_the_model_s_weights_want_it_and_the_cells_say_so(arch: str, own: tuple[Any, ...]) -> None:
    cfg = timm.get_pretrained_cfg(arch)
    assert (cfg.input_size[1], cfg.crop_pct, cfg.interpolation) == (own[0], own[1], own[3])
    keys = ("canvas", "crop", "resize", "filter")
    task = Folder(images="folder-0").with_cut(Timm(arch=arch).cut())
    assert tuple(task.model_dump()[key] for key in keys) == own
    said = Folder(images="folder-0", canvas=32, crop=0.5, resize="squash", filter="bilinear")
    assert said.with_cut(Timm(arch=arch).cut()) == said


def test_the_cells_have_the_model_s_numbers(pictures: Path, weights: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path, planner.Files((f"folder:{pictures}",), weights=(weights,)), tasks=("folder:crop=0.8",))
    for job in plan.jobs:
        found = job.cell.task.params
        assert (found["canvas"], found["crop"], found["resize"], found["filter"]) == (224, 0.8, "short", "bicubic")
