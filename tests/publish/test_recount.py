from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import sparsebench
from sparsebench.errors import UserError
from sparsebench.measure.cost import PositionalCost, Step
from sparsebench.models.base import Model
from sparsebench.models.vits import Timm, Vit
from sparsebench.publish.recount import MOST_NETWORKS, Networks, differences
from sparsebench.records import store
from sparsebench.records.cell import Part
from sparsebench.records.record import Metric, Record, TokenStep
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.groups import Waterbirds
from sparsebench.tasks.images import Composite, Plain, Spurious
from sparsebench.tasks.theory import Theory

TEN = np.arange(40) % 10


@pytest.fixture
def dense(sound: Path) -> Record:
    """Return a record of a small ViT without a strategy."""
    return next(
        r for r in store.read(sound).values() if r.cell.task.name == "composite" and r.cell.strategy.name == "dense"
    )


def of(record: Record, task: Task, model: Model, steps: list[Step] | None = None) -> Record:
    """Return the record as that model's would be, with that trajectory or a dense one."""
    cost = Networks().cost(task, model, 10)
    steps = cost.dense() if steps is None else steps
    macs, all_ = float(cost.macs(steps)), float(cost.macs(cost.dense()))
    assert record.outcomes is not None
    made = {"macs": (macs, "MACs"), "macs_dense": (all_, "MACs"), "macs_ratio": (macs / all_, "fraction")}
    metrics = {name: Metric(value=value, unit=unit, n=record.outcomes.n) for name, (value, unit) in made.items()}
    return record.model_copy(
        update={
            "metrics": record.metrics | metrics,
            "trajectory": tuple(TokenStep(**vars(step)) for step in steps),
            "cell": record.cell.model_copy(update={"model": Part.of(model)}),
        }
    )


def test_models_of_timm_are_recounted(dense: Record) -> None:
    task, model = Composite(canvas=32), Timm(arch="vit_tiny_patch16_224")
    assert list(differences(of(dense, task, model), TEN, task, model, Networks())) == []
    other = Timm(arch="vit_small_patch16_224")
    (wrong, *_) = differences(of(dense, task, model), TEN, task, other, Networks())
    assert wrong.startswith("macs is ")


def test_the_models_that_are_made_are_few_and_not_too_large() -> None:
    networks = Networks()
    with pytest.raises(UserError, match="4096 pixels"):
        networks.cost(Composite(canvas=8192), Timm(), 10)
    networks._timm |= dict.fromkeys([("x", i, 10) for i in range(MOST_NETWORKS)])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"no more than {MOST_NETWORKS}"):
        networks.cost(Composite(), Timm(), 10)


def test_what_removes_tokens_in_training_only_is_dense_in_the_test(dense: Record) -> None:
    task, model = Composite(), Vit(dim=16, depth=2, heads=2)
    fewer = of(dense, task, model, [Step(64, 32, True), Step(32, 32)])
    cell = fewer.cell.model_copy(update={"where": "train"})
    wrong = " ".join(differences(fewer.model_copy(update={"cell": cell}), TEN, task, model, Networks()))
    assert "tokens are removed in training only" in wrong


def test_whoever_asks_for_all_macs_plans_all(dense: Record) -> None:
    task, model = Composite(), Vit(dim=16, depth=2, heads=2)
    record = of(dense, task, model)
    less = {"macs_ratio_planned": record.metrics["macs_ratio"].model_copy(update={"value": 0.5})}
    wrong = list(
        differences(record.model_copy(update={"metrics": record.metrics | less}), TEN, task, model, Networks())
    )
    assert wrong == ["macs_ratio_planned is 0.5, and its trajectory comes to 1.0"]


@pytest.mark.parametrize(
    ("task", "labels", "classes"),
    [
        (Theory(classes=4, patterns=6), [0, 1], (4,)),
        (Composite(), [0, 1], (10,)),  # digits
        (Composite(images="cifar100"), [0, 1], (100,)),
        (Composite(images="folder-0"), [0, 1, 2, 0, 1, 2], (3,)),
        (Plain(), [0, 1, 7, 0], (8,)),
        (Spurious(), [0, 0], (2,)),
        (Waterbirds(images="waterbirds-0"), [0], (2,)),
        (Folder(images="folder-0", labels="imagenet"), [3], (1000,)),
        (Folder(images="folder-0", labels="folders"), [0, 3], (4,)),
        (Folder(images="folder-0"), [0, 3], (4, 1000)),
    ],
)
def test_the_number_of_classes_is_the_tasks_or_the_labels(task: Task, labels: list[int], classes: object) -> None:
    assert task.class_counts(np.array(labels)) == classes


@pytest.mark.parametrize("task", [Composite(images="folder-0"), Folder(images="folder-0", test=2)])
def test_it_is_not_guessed_from_too_few_labels(task: Task) -> None:
    with pytest.raises(UserError, match="how many classes"):
        task.class_counts(np.array([0, 1]))


def test_a_model_of_a_plugin_says_what_it_costs() -> None:
    class Linear(sparsebench.Model):
        name: ClassVar[str] = "linear"
        inputs: ClassVar[Any] = "tokens"

        def cost(self, task: sparsebench.Task, classes: int) -> sparsebench.CostModel:
            return PositionalCost(7, 11)

    assert Networks().cost(Theory(), Linear(), 2) == PositionalCost(7, 11)
    with pytest.raises(UserError, match="what model 'silent' costs is not known"):
        Networks().cost(Theory(), type("Silent", (sparsebench.Model,), {"name": "silent", "inputs": "tokens"})(), 2)


def test_tokens_that_rest_come_back_and_no_more_than_there_were(dense: Record) -> None:
    """Where a strategy lets a block pass in between, all tokens take part in it."""
    task, model = Composite(canvas=32), Vit(depth=3)
    few, all_ = Step(16, 16, rested=48), Step(64, 64)
    resting = of(dense, task, model, [few, all_, few])
    assert list(differences(resting, TEN, task, model, Networks())) == []
    gone = of(dense, task, model, [Step(16, 16), all_, few])
    assert "its token counts do not fall from the model's 64" in list(differences(gone, TEN, task, model, Networks()))
    more = of(dense, task, model, [few, all_, Step(32, 32, rested=48)])
    assert "its token counts do not fall from the model's 64" in list(differences(more, TEN, task, model, Networks()))
