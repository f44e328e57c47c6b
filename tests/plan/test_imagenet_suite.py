"""The suite imagenet: which strategies at which budgets and in which precision it tests."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell

ARCH = "deit_tiny_patch16_224"
BUDGETS = {0.85, 0.7, 0.6, 0.5, 0.4, 0.3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return two pictures of two classes, and two checkpoints."""
    root = tmp_path_factory.mktemp("imagenet")
    for name in ("n01440764", "n01443537"):
        (root / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), "red" if name.endswith("64") else "blue").save(root / "pictures" / name / "one.png")
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_file(timm.create_model(ARCH).state_dict(), root / f"{seed}.safetensors")
    return Files((f"folder:{root / 'pictures'}",), weights=(root / "0.safetensors", root / "1.safetensors"))


def cells(files: Files, out: Path, *plugins: str, **options: Any) -> list[Cell]:
    request = Request(suite="imagenet", model=f"timm:{ARCH}", plugins=plugins, **options)
    return [job.cell for job in planner.plan(request, files, Registry(), out, "missing").jobs]


def names(found: list[Cell]) -> set[str]:
    return {cell.strategy.name for cell in found}


def test_each_checkpoint_is_tested_with_the_baselines_at_each_budget(files: Files, tmp_path: Path) -> None:
    budgets = defaultdict(list)
    for cell in cells(files, tmp_path):
        budgets[cell.strategy.name, cell.network].append(cell.budget.macs)
    assert {name for name, _ in budgets} == {"dense", "random", "random_inside"} and len(budgets) == 6
    assert {name: set(each) for (name, _), each in budgets.items()} == {
        "dense": {1.0}, "random": BUDGETS, "random_inside": BUDGETS
    }  # fmt: skip
    assert all(len(each) == len(set(each)) for each in budgets.values())


@pytest.fixture(scope="module")
def found(files: Files, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the strategies that `all` stands for."""
    return names(cells(files, tmp_path_factory.mktemp("all"), "all"))


def test_all_are_those_that_need_no_training_and_cost_no_more_than_dense(found: set[str]) -> None:
    registry = Registry()
    every = {one.cls.name: one.cls for one in registry.strategies()}
    out = {"a_vit", "diffrate_search", "dynamic_vit", "patch_merger", "sinkhorn", "sit", "tnt", "token_learner",
           "patch_dropout", "fisher_mask", "oracle", "anti_oracle", "perturbation"}  # fmt: skip
    assert set(every) - found == out & set(every)
    assert all(every[name].trained is False and not every[name].fits() for name in found)


def test_what_is_named_beside_all_is_tested(files: Files, found: set[str], tmp_path: Path) -> None:
    assert names(cells(files, tmp_path, "all", "perturbation")) - found == {"perturbation"}


def test_each_folder_of_pictures_is_a_test_of_its_own(files: Files, tmp_path: Path) -> None:
    for name in ("n01440764", "n02007558"):
        (tmp_path / "other" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), "green").save(tmp_path / "other" / name / "one.png")
    several = Files((*files.images, f"folder:{tmp_path / 'other'}", *files.images), weights=files.weights)
    every = cells(several, tmp_path / "out", tasks=("folder:among=folders",))
    sets = [cell.task.params["images"] for cell in every]
    assert len(set(sets)) == 2 and {sets.count(name) for name in sets} == {2 * 13}, "a folder given twice is one"
    assert {cell.task.params["among"] for cell in every} == {"folders"}
    with pytest.raises(UserError, match="take one set of pictures; got 2 sets"):
        planner.plan(
            Request(suite="quick-scratch", tasks=("composite",), model="vit:depth=2"),
            Files(("cifar10", "digits")),
            Registry(),
            tmp_path / "out",
            "missing",
        )


def test_pictures_that_no_task_takes_are_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--backgrounds is taken by no task of this run; got folder"):
        cells(Files(files.images, "photos", weights=files.weights), tmp_path)


def test_it_is_in_bfloat16_on_a_gpu_unless_it_is_asked_for_otherwise(files: Files, tmp_path: Path) -> None:
    def precisions(**options: Any) -> set[str]:
        return {cell.precision for cell in cells(files, tmp_path, **options)}

    assert precisions() == {"float32"} and precisions(on_gpu=True) == {"bfloat16"}
    assert precisions(on_gpu=True, precision="float32") == {"float32"}
    assert precisions(precision="bfloat16") == {"bfloat16"}
