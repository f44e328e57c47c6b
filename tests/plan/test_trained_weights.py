"""Tests of trained weights on folders of pictures, from the request to records and boards."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from coded import write_noise, write_random_weights
from PIL import Image
from safetensors.torch import load_file, save_file

import sparsebench
from sparsebench.board.comparison import about, comparisons_of
from sparsebench.board.reading import frame_of
from sparsebench.errors import UserError
from sparsebench.inspection.compare import compare, rows
from sparsebench.inspection.pictures import Trainer
from sparsebench.inspection.speed import expect_tests
from sparsebench.models.vits import Timm
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Cell, Record
from sparsebench.records.table import row_of
from sparsebench.runner import run as runs
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.prepare import Context, prepare
from sparsebench.tasks.folder import Folder, cut_out
from sparsebench.tasks.sources.files import read_rgb

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ARCH, CANVAS = "test_vit", 32
TASK = f"folder:canvas={CANVAS}"
NAMES = ("n01440764", "n01443537", "n01484850")
TRAINS = "composite:epochs=1,test=10,pretrain_epochs=0"


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


@pytest.fixture(scope="module")
def files(pictures: Path, weights: Path) -> Files:
    return Files((f"folder:{pictures}",), weights=(weights,))


def planned(out: Path, files: Files, **options: Any) -> planner.Plan:
    options = {"suite": "folder", "tasks": (TASK,), "model": f"timm:{ARCH}"} | options
    return planner.plan(Request(**options), files, Registry(), out, "missing")


def executed(out: Path, files: Files, execution: Execution | None = None, **options: Any) -> dict[str, Record]:
    """Return the records that a run adds to a folder, by strategy."""
    before = set(store.read(out)) if out.exists() else set()
    options = {"suite": "folder", "tasks": (TASK,), "model": f"timm:{ARCH}", "plugins": ("attn_topk",)} | options
    runs.run_missing(Request(**options), files, execution or Execution("cpu", jobs=0), Registry(), out)
    return {record.cell.strategy.name: record for key, record in store.read(out).items() if key not in before}


@pytest.fixture(scope="module")
def both(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record], dict[str, Record]]:
    """Return a folder with the records of both precisions, and these."""
    out = tmp_path_factory.mktemp("both")
    return out, executed(out, files, plugins=("attn_topk", "oracle")), executed(out, files, precision="bfloat16")


@pytest.fixture(scope="module")
def records(both: Any) -> dict[str, Record]:
    return both[1]  # type: ignore[no-any-return]


def test_strategies_can_be_compared_on_it_though_nobody_knows_what_matters(files: Files, tmp_path: Path) -> None:
    request = Request(suite="folder", tasks=(TASK,), model=f"timm:{ARCH}", keep=(0.5,))
    comparison = compare(("attn_topk", "random"), request, Trainer(files, Execution("cpu", jobs=0), tmp_path), 2)
    assert list(comparison.stages) == [0, 2, 3]  # one of four patches is left at the end
    assert {(row["relevant_kept_a"], row["relevant_kept_b"]) for row in rows(comparison)} == {(None, None)}
    assert comparison.scene is not None and not comparison.scene.matters.any()


def answers(pictures: Path, weights: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the timm model's own (21,) predictions, and whether the label is among the first five."""
    cfg = {"file": str(weights), "num_classes": 1000}
    model = timm.create_model(ARCH, img_size=CANVAS, pretrained=True, pretrained_cfg_overlay=cfg).eval()
    paths = sorted((pictures / "val").rglob("*.png"))
    x = torch.from_numpy(np.stack([cut_out(read_rgb(p), CANVAS, 0.95) for p in paths])).permute(0, 3, 1, 2) / 255
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


def test_a_record_names_the_weights_but_no_path(records: dict[str, Record], weights: Path, pictures: Path) -> None:
    """A record has cost and speed and says which weights but no path and an oracle is unsupported."""
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
    oracle = records["oracle"]
    assert oracle.status == "unsupported" and oracle.failure is not None
    assert oracle.failure.reason == "the data of this cell has no relevance mask"


def test_a_cell_that_trains_begins_with_the_files_weights(weights: Path, tmp_path: Path) -> None:
    """A cell that trains begins with the file's weights and a fresh head."""
    plan = planned(tmp_path, Files(weights=(weights,)), suite="quick", tasks=(TRAINS,), n_train=(10,), seeds=2)
    heads = []
    for repetition in (0, 1):
        (job,) = (j for j in plan.jobs if j.cell.strategy.name == "dense" and j.cell.repetition == repetition)
        cell = prepare(job, Registry(), Context(RunEnvironment(out=tmp_path, device="cpu", locations=plan.locations)))
        state = cell.network.module.state_dict()
        assert cell.start.name == job.cell.model.params["weights"]
        for name, value in load_file(weights).items():
            assert name == "pos_embed" or name.startswith("head.") or torch.equal(value, state[name])
        heads.append(state["head.weight"])
    assert heads[0].shape == (10, 64) and not torch.equal(*heads)


@pytest.mark.parametrize("classes", [10, 1000])
def test_a_network_teaches_what_it_becomes_only_if_its_head_is_trained(tmp_path: Path, classes: int) -> None:
    path = tmp_path / "own.safetensors"
    save_file(timm.create_model(ARCH, num_classes=classes).state_dict(), path)
    trains = {"suite": "quick", "tasks": (TRAINS,), "n_train": (10,), "seeds": 1}
    plan = planned(tmp_path, Files(weights=(path,)), plugins=("dynamic_vit", "attn_topk"), **trains)
    jobs = {job.cell.strategy.name: job for job in plan.jobs}
    context = Context(RunEnvironment(out=tmp_path, device="cpu", locations=plan.locations))
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


@pytest.mark.parametrize(
    ("has_weights", "options", "says"),
    [
        (True, {"n_train": (4,)}, "'folder' trains nothing; .*leave --n-train out"),
        (True, {"where": "train"}, "on task 'folder'.*; got train; allowed: both, test"),
        (True, {"model": f"timm:arch={ARCH},precision=bfloat16", "precision": "float32"}, "has another precision"),
        (False, {}, "task 'folder' tests trained weights; give --pretrained or --weights"),
        (False, {"model": "vit"}, "model 'vit' has none"),
        (False, {"model": "vit", "pretrained": True}, "--pretrained: model 'vit' has no trained weights"),
    ],
)
def test_what_trains_or_has_no_weights_is_refused(
    files: Files, tmp_path: Path, has_weights: bool, options: Any, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        planned(tmp_path, files if has_weights else Files(files.images), **options)


def command(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    """Return the result of the command without network access, with the hub's cache in a folder."""
    line = [sys.executable, "-m", "sparsebench", "run", *map(str, arguments)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.slow
def test_fetched_weights_are_used_and_named(pictures: Path, weights: Path, tmp_path: Path) -> None:
    """What was fetched is used and named and what cannot be is one error."""
    ask = ["--suite", "folder", "--task", TASK, "--model", f"timm:{ARCH}", "--images", f"folder:{pictures}"]
    out = tmp_path / "out"
    done = command(*ask, "--pretrained", "--out", out, cache=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and not out.exists()
    assert line.startswith(f"Error: timm cannot download the trained weights of '{ARCH}'")
    assert line.endswith("check the network connection, or give --weights FILE.safetensors")
    repository = tmp_path / "hub" / f"models--timm--{ARCH}.r160_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    save_file(load_file(weights), snapshot / "model.safetensors")
    done = command(*ask, "--pretrained", "--out", out, "--jobs", 0, cache=tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    records = {record.cell.strategy.name: record for record in store.read(out).values()}
    predicted, _ = answers(pictures, weights)
    assert records["dense"].metrics["accuracy"].value == (predicted == np.arange(21) // 7).mean()
    assert {record.notes["initial_weights"] for record in records.values()} == {f"hf-hub:timm/{ARCH}.r160_in1k"}


def test_a_folder_has_one_name_whatever_else_is_asked_for(pictures: Path, weights: Path, tmp_path: Path) -> None:
    root = tmp_path / "three"
    for split, i in (("train", 0), ("test", 1)):
        for name in NAMES:
            (root / split / name).mkdir(parents=True)
            (root / split / name / "0.png").write_bytes((pictures / "val" / name / f"{i}.png").read_bytes())
    files = Files((f"folder:{root}",), weights=(weights,))
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
def test_nothing_is_trained_of_it_though_tokens_are_beside(files: Files, tmp_path: Path) -> None:
    weights = write_random_weights(tmp_path / "tiny.safetensors", "vit_tiny_patch16_224")  # the default model
    of_default = Files(files.images, weights=(weights,))
    plan = planned(tmp_path, of_default, tasks=(TASK, "theory"), suite="quick", model=None)
    trained = {(job.cell.task.name, job.cell.n_train > 0) for job in plan.jobs}
    assert trained == {("folder", False), ("theory", True)}
    assert {job.cell.where for job in planned(tmp_path, files, where="test").jobs} == {"both", "test"}


@pytest.mark.parametrize(
    ("arch", "own"),
    [
        ("deit_tiny_patch16_224", (224, 0.9, "short", "bicubic")),
        ("deit3_small_patch16_384", (384, 1.0, "short", "bicubic")),
        ("vit_small_patch16_224.dino", (224, 0.9, "short", "bicubic")),
        ("vit_base_patch16_224_miil.in21k_ft_in1k", (224, 0.875, "short", "bilinear")),
    ],
)
def test_pictures_are_cut_as_the_model_s_weights_want_it_unless_it_is_said(arch: str, own: tuple[Any, ...]) -> None:
    cfg = timm.get_pretrained_cfg(arch)
    assert (cfg.input_size[1], cfg.crop_pct, cfg.interpolation) == (own[0], own[1], own[3])
    keys = ("canvas", "crop", "resize", "filter")
    task = Folder(images="folder-0").with_cut(Timm(arch=arch).cut())
    assert tuple(task.model_dump()[key] for key in keys) == own
    task = Folder(images="folder-0", canvas=32, crop=0.5, resize="squash", filter="bilinear")
    assert task.with_cut(Timm(arch=arch).cut()) == task


def test_the_cells_have_the_model_s_numbers(files: Files, tmp_path: Path) -> None:
    for job in planned(tmp_path, files, tasks=("folder:crop=0.8",)).jobs:
        params = job.cell.task.params
        assert (params["canvas"], params["crop"], params["resize"], params["filter"]) == (160, 0.8, "short", "bicubic")


# ---- precisions and batches


def test_a_test_in_bfloat16_is_another_cell_with_other_losses(both: Any, files: Files, tmp_path: Path) -> None:
    _, single, halved = both
    as_model = executed(tmp_path, files, model=f"timm:arch={ARCH},precision=bfloat16")
    for name, record in halved.items():
        assert record.cell_id != single[name].cell_id and record.cell.precision == "bfloat16"
        loss, other = (one.metrics["test_loss"].value for one in (single[name], record))
        assert loss != other and loss == pytest.approx(other, rel=0.05)
        assert other == as_model[name].metrics["test_loss"].value


def test_no_board_mixes_two_precisions(both: Any) -> None:
    out, single, halved = both
    shown = dict(sparsebench.leaderboard(out)[["strategy", "accuracy"]].itertuples(index=False))
    of = [{name: one.metrics["accuracy"].value for name, one in part.items() if name in shown} for part in both[1:]]
    assert len(shown) == len(halved) == len(single) - 1 and shown in of
    table = sparsebench.leaderboard(out, by="task")
    assert len(table) == 2 * len(shown) and sum("precision=bfloat16" in name for name in set(table["model"])) == 1
    lines = sorted(about(one) for one in comparisons_of(frame_of(sparsebench.load_records(out))))
    assert ["in bfloat16" in line for line in lines].count(True) == 1 == len(lines) - 1


def test_networks_of_a_suite_are_tested_in_bfloat16_and_trained_as_ever(tmp_path: Path) -> None:
    def cells(**options: Any) -> list[Any]:
        request = Request(suite="embedded", tasks=("composite",), seeds=1, **options)
        return [job.cell for job in planner.plan(request, Files(), Registry(), tmp_path, "missing").jobs]

    single, halved = cells(), cells(precision="bfloat16")
    assert {cell.precision for cell in single} == {"float32"} and {cell.precision for cell in halved} == {"bfloat16"}
    assert {cell.init.id for cell in single} == {cell.init.id for cell in halved}
    assert not {cell.id for cell in single} & {cell.id for cell in halved}


HUNGRY = """
import torch
from sparsebench import Keep, Strategy, hookimpl

class Hungry(Strategy):
    name = "hungry"
    site = "attention"
    needs = frozenset({"tokens"})

    def plan(self, view, keep):
        if len(view.index) > 6:
            raise torch.OutOfMemoryError("too many")
        return Keep.top(view.tokens[..., 0], keep)

@hookimpl
def sparsebench_strategies():
    return [Hungry]
"""


def test_a_requested_batch_is_halved_without_memory(records: dict[str, Record], files: Files, tmp_path: Path) -> None:
    """A batch that is asked for is tried and said and halved where there is no memory."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    named = ("attn_topk", str(tmp_path / "hungry.py"))
    batched = executed(tmp_path / "out", files, Execution("cpu", jobs=0, batch=20), plugins=named)
    assert batched.pop("hungry").notes["test_batch"] == "5; the device had no memory for 20"
    for name, record in batched.items():
        assert record.cell_id == records[name].cell_id and record.notes["test_batch"] == "20"
        assert record.outcomes == records[name].outcomes and "test_batch" not in records[name].notes


# ---- the suite imagenet

BUDGETS = {0.85, 0.7, 0.6, 0.5, 0.4, 0.3}


@pytest.fixture(scope="module")
def two(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the pictures, and two checkpoints."""
    other = tmp_path_factory.mktemp("other") / "other.safetensors"
    save_file(timm.create_model(ARCH).state_dict(), other)
    return Files(files.images, weights=(*files.weights, other))


def cells(files: Files, out: Path, *plugins: str, **options: Any) -> list[Cell]:
    options = {"suite": "imagenet", "tasks": ("folder:choose_on=test",), "plugins": plugins} | options
    return [job.cell for job in planned(out, files, **options).jobs]


def names(cells: list[Cell]) -> set[str]:
    return {cell.strategy.name for cell in cells}


def test_each_checkpoint_is_tested_with_the_baselines_at_each_budget(two: Files, tmp_path: Path) -> None:
    budgets = defaultdict(list)
    for cell in cells(two, tmp_path):
        budgets[cell.strategy.name, cell.network].append(cell.budget.macs)
    assert {name for name, _ in budgets} == {"dense", "random", "random_inside"} and len(budgets) == 6
    assert {name: set(each) for (name, _), each in budgets.items()} == {
        "dense": {1.0}, "random": BUDGETS, "random_inside": BUDGETS
    }  # fmt: skip
    assert all(len(each) == len(set(each)) for each in budgets.values())


def test_all_are_those_without_training_and_below_dense(files: Files, tmp_path: Path) -> None:
    """All are those that need no training and cost no more than dense and others are named."""
    tested = names(cells(files, tmp_path, "all"))
    every = {entry.cls.name: entry.cls for entry in Registry().strategies()}
    out = {
        "a_vit", "cropr", "diffrate_search", "dtem", "dynamic_vit", "patch_merger", "sinkhorn", "sit", "tnt",
        "token_learner", "patch_dropout", "fisher_mask", "oracle", "anti_oracle", "perturbation",
    }  # fmt: skip
    assert set(every) - tested == out & set(every)
    assert all(every[name].trained is False and not every[name].fits() for name in tested)
    assert names(cells(files, tmp_path, "all", "perturbation")) - tested == {"perturbation"}


def test_each_folder_of_pictures_is_a_test_of_its_own(two: Files, tmp_path: Path) -> None:
    for name in ("n01440764", "n02007558"):
        (tmp_path / "other" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), "green").save(tmp_path / "other" / name / "one.png")
    several = Files((*two.images, f"folder:{tmp_path / 'other'}", *two.images), weights=two.weights)
    every = cells(several, tmp_path / "out", tasks=("folder:among=folders,choose_on=test",))
    sets = [cell.task.params["images"] for cell in every]
    assert len(set(sets)) == 2 and {sets.count(name) for name in sets} == {2 * 13}, "a folder given twice is one"
    assert {cell.task.params["among"] for cell in every} == {"folders"}
    for wrong, options, says in (
        (Files(("cifar10", "digits")), {"suite": "quick-scratch", "tasks": ("composite",)}, "take one set.*got 2 sets"),
        (Files(two.images, "photos", weights=two.weights), {}, "--backgrounds is not used by any task.*; got folder"),
    ):
        with pytest.raises(UserError, match=says):
            cells(wrong, tmp_path / "out", **options)


def test_it_is_in_bfloat16_on_a_gpu_unless_it_is_asked_for_otherwise(files: Files, tmp_path: Path) -> None:
    def precisions(**options: Any) -> set[str]:
        return {cell.precision for cell in cells(files, tmp_path, **options)}

    assert precisions() == {"float32"} and precisions(on_gpu=True) == {"bfloat16"}
    assert precisions(on_gpu=True, precision="float32") == {"float32"}
    assert precisions(precision="bfloat16") == {"bfloat16"}


def test_a_folder_with_results_of_other_weights_is_named(
    pictures: Path, weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = load_file(weights)
    save_file(state | {"head.bias": state["head.bias"] + 1}, others := tmp_path / "retrained.safetensors")
    for path in (weights, others):
        assert "other weights" not in caplog.text
        sparsebench.run(suite="folder", tasks=TASK, model=f"timm:{ARCH}", images=f"folder:{pictures}", weights=path,
                        out=tmp_path / "out", device="cpu", jobs=0)  # fmt: skip
    assert "also has results of other weights, own.safetensors" in caplog.text


@pytest.mark.filterwarnings("ignore:.*the closest possible")  # four tokens miss most budgets
def test_the_expected_time_of_a_test_follows_the_macs_of_its_strategy(files: Files, tmp_path: Path) -> None:
    plan = planned(tmp_path, files, plugins=("tome:per_block=1", "perturbation", "attn_topk"), macs=(0.9, 0.5))
    expected, _ = expect_tests(plan, Registry(), "cpu")
    dense = next(job for job in plan.todo if job.label == "dense")
    model, shares = timm.create_model(ARCH, img_size=CANVAS), []
    for job in plan.todo:
        budget = {} if job is dense else job.cell.budget.model_dump(exclude_unset=True)
        shares.append((expected.seconds(job) or 0) / (expected.seconds(dense) or 0))
        with sparsebench.apply(model, job.label, **budget) as sparse:
            assert shares[-1] == pytest.approx(sparse.macs_ratio), (job.label, budget)
    assert min(shares) < 0.6 and max(shares) > 1
