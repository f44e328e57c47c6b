"""The tiny networks, with data, on which strategies are checked. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from sparsebench.models.base import Network
from sparsebench.models.deep import DeepViT
from sparsebench.models.shipped import Shallow
from sparsebench.tasks.base import Recipe
from sparsebench.tasks.theory import Theory

B = 4


@dataclass(frozen=True, eq=False)
class Case:
    """A network with samples of its own.

    Attributes:
        inputs: (B, 3, height, width) images in [0, 1], or (B, L, d) tokens.
        labels: (B,) class numbers.
        relevance: (B, N) for oracles.
        recipe: how it would be trained.
    """

    name: str
    network: Network
    inputs: Tensor
    labels: Tensor
    relevance: Tensor
    recipe: Recipe

    @property
    def tokens(self) -> int:
        """N, its patch tokens."""
        return self.network.cost.tokens


def tiny(cls: Callable[..., Any] = VisionTransformer, **changes: Any) -> Any:
    """Return a timm model of 3 blocks, width 32, 4 x 4 patches of 8 x 8 pixels, with uneven attention."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(**(sizes | changes)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape) * 0.2)
    return model


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "class token": tiny,
    "no class token": partial(tiny, class_token=False, global_pool="avg"),
    "distilled": partial(tiny, VisionTransformerDistilled),
    "4 registers": partial(tiny, reg_tokens=4),
    "LayerScale and qk_norm": partial(tiny, init_values=0.5, qk_norm=True, depth=2),
    "3 x 5 patches": partial(tiny, img_size=(24, 40), depth=2),
    "1 patch": partial(tiny, img_size=8, depth=2),
    "36 patches": partial(tiny, img_size=48, depth=2),
}
PREFIXES = ("no class token", "class token", "distilled", "4 registers")
SIZES = ("3 x 5 patches", "1 patch", "shallow")
NAMES = (*ARCHITECTURES, "shallow")
LARGE = ("36 patches",)
USUAL = tuple(name for name in NAMES if name not in (*SIZES[:2], *LARGE))
"""Those whose sizes surprise nobody, which most checks use."""


def build(name: str) -> Case:
    """Return a new case."""
    if name == "shallow":
        return _shallow()
    return images_for(name, ARCHITECTURES[name]())


cached = cache(build)
"""The case of that name that all checks share."""


def images_for(name: str, vit: Any, n: int = B, precision: str = "float32") -> Case:
    """Return the case of a timm model with n random images."""
    network, rng = DeepViT(vit, precision=precision), torch.Generator().manual_seed(1)
    height, width = (side * patch for side, patch in zip(network.grid, network.patch, strict=True))
    return Case(
        name,
        network,
        torch.rand(n, 3, height, width, generator=rng),
        torch.arange(n) % 5,
        torch.rand(n, network.cost.tokens, generator=rng),
        Recipe("cross-entropy", "adamw", 1e-3, n, epochs=1, steps=1),
    )


def _shallow() -> Case:
    task = Theory(tokens=20, d=16, relevant=0.4, confusion=0.1, test=2)
    data = task.draw(B, 0, {})
    network = Shallow(m=16).build(data, 0)
    split = data.train
    assert split.relevance is not None
    inputs, labels, relevance = (
        torch.from_numpy(np.ascontiguousarray(x)) for x in (split.inputs, split.labels, split.relevance)
    )
    return Case("shallow", network, inputs, labels, relevance, task.recipe())
