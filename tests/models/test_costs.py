"""What a network costs by its parameters is what the network that is built says of itself."""

from typing import Any

import numpy as np
import pytest
import torch
from token_sets import Sets

from sparsebench.errors import UserError
from sparsebench.measure.cost import Step
from sparsebench.models.vits import Timm, Vit
from sparsebench.tasks.images import Composite


def steps_of(cost: Any, seed: int) -> list[Step]:
    """Return a random trajectory, legal or not."""
    rng = np.random.default_rng(seed)
    scorings = rng.choice(["", "class", "received", "mean"], cost.depth)
    return [
        Step(float(rng.integers(1, 40)), float(rng.integers(1, 40)), bool(rng.integers(2)), s, "qv", 3.5, 1.25)
        for s in scorings
    ]


@pytest.mark.parametrize(
    ("canvas", "classes", "sizes"),
    [
        (32, 10, {"dim": 64, "depth": 3, "heads": 4, "patch": 4}),
        (24, 2, {"dim": 12, "depth": 1, "heads": 3, "patch": 8}),
        (56, 100, {"dim": 96, "depth": 5, "heads": 2, "patch": 7}),
        (32, 7, {"dim": 16, "depth": 2, "heads": 2, "patch": 16, "attention": "positional"}),
        (64, 10, {"dim": 96, "depth": 3, "heads": 3, "patch": 8, "stem": "conv"}),
    ],
)
def test_a_small_vit_costs_what_it_says(canvas: int, classes: int, sizes: dict[str, Any]) -> None:
    from sparsebench.models.deep import DeepViT
    from sparsebench.models.small_vit import PositionalDeepViT, small_vit

    with torch.device("meta"):
        vit = small_vit(canvas, classes, **sizes)
    built = (PositionalDeepViT if "attention" in sizes else DeepViT)(vit).cost
    closed = Vit(**sizes).cost(Composite(canvas=canvas, foreground=8), classes)
    assert closed == built
    for seed in range(5):
        steps = steps_of(built, seed)
        assert closed.macs(steps) == built.macs(steps)


@pytest.mark.parametrize("arch", ["deit_tiny_patch16_224", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_models_are_made_without_numbers(arch: str) -> None:
    import timm

    from sparsebench.models.deep import DeepViT

    with torch.device("meta"):
        built = DeepViT(timm.create_model(arch, img_size=64, num_classes=7)).cost
    assert Timm(arch=arch).cost(Composite(canvas=64), 7) == built


def test_what_cannot_be_built_is_a_user_error() -> None:
    with pytest.raises(UserError, match="has no canvas"):
        Vit().cost(Sets(), 2)
    with pytest.raises(UserError, match="unknown timm model"):
        Timm(arch="no_such_model").cost(Composite(), 2)
    with pytest.raises(UserError, match="not supported"):
        Timm(arch="resnet18").cost(Composite(canvas=224), 2)
