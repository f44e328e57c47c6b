"""The tiny networks, with data, on which strategies are checked. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sparsebench.measure.cost import OneLayerCost, Step
from sparsebench.models.actor import Pass, in_chunks, kept_only
from sparsebench.models.base import Network
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.tokens import gather
from sparsebench.tasks.base import Recipe

B = 4


@dataclass(frozen=True, eq=False)
class Case:
    """A network with samples.

    Attributes:
        inputs: (B, 3, height, width) images in [0, 1], or (B, L, d) tokens.
        labels: (B,) class numbers.
        relevance: (B, N) for oracles.
        recipe: how the network is trained.
    """

    name: str
    network: Network
    inputs: Tensor
    labels: Tensor
    relevance: Tensor
    recipe: Recipe

    @property
    def tokens(self) -> int:
        """N, the number of patch tokens."""
        return self.network.cost.tokens


def tiny(cls: Callable[..., Any] = VisionTransformer, **changes: Any) -> Any:
    """Return a timm model of 3 blocks, width 32, 4 x 4 patches of 8 x 8 pixels, with uneven attention."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
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
SIZES = ("3 x 5 patches", "1 patch", "one layer")
NAMES = (*ARCHITECTURES, "one layer")
USUAL = tuple(name for name in NAMES if "patch" not in name)
"""The networks with ordinary sizes, which most checks use."""


def build(name: str) -> Case:
    """Return a new case."""
    if name == "one layer":
        return _one_layer()
    return images_for(name, ARCHITECTURES[name]())


cached = cache(build)
"""`build`, with one case of each name for all checks."""


def images_for(name: str, vit: Any, n: int = B, precision: str = "float32") -> Case:
    """Return the case of a timm model with n random images."""
    network = DeepViT(vit, precision=precision)
    rng = torch.Generator().manual_seed(1)
    height, width = (side * patch for side, patch in zip(network.grid, network.patch, strict=True))
    return Case(
        name,
        network,
        torch.rand(n, 3, height, width, generator=rng),
        torch.arange(n) % 5,
        torch.rand(n, network.cost.tokens, generator=rng),
        Recipe("cross-entropy", "adamw", 1e-3, n, epochs=1, steps=1),
    )


@dataclass(frozen=True)
class _OneLayerCost(OneLayerCost):
    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one sample: removed tokens are neither queries nor keys nor values."""
        (step,) = steps
        L, n, d = step.tokens_in, step.tokens_out, self.d
        scoring = (2 * L * d * d + L * L * d if step.scoring else 0) + L * d * d * len(step.projected)
        return scoring + 4 * n * d * d + 2 * n * n * d + n * d + step.own


class _OneLayer(nn.Module):
    """F(X) = mean over the tokens x that stay of v^T relu(softmax(x W_Q (X W_K)^T) X W_V W_O), a margin."""

    grid = None
    attention_source = "received"

    def __init__(self, tokens: int, d: int, rng: torch.Generator):
        super().__init__()
        weights = (torch.randn(d, width, generator=rng) * d**-0.5 for width in (d, d, d, d, 1))
        self.W_Q, self.W_K, self.W_V, self.W_O, self.v = map(nn.Parameter, weights)
        self.cost = _OneLayerCost(tokens, d)

    @property
    def module(self) -> _OneLayer:
        return self

    def attention(self, X: Tensor) -> Tensor:
        return torch.softmax(X @ self.W_Q @ (X @ self.W_K).mT, dim=2)

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        if acting is not None:
            X = X.clone()  # a strategy that changes its view in place must not change the input of later checks
            fields: dict[str, Callable[[], Any]] = {
                "tokens": lambda: X,
                "queries": lambda: (X @ self.W_Q)[:, None],
                "keys": lambda: (X @ self.W_K)[:, None],
                "values": lambda: (X @ self.W_V)[:, None],
                "attention_maps": lambda: self.attention(X)[:, None],
                "attention": lambda: self.attention(X).mean(dim=1),
                "received_attention": lambda: self.attention(X).mean(dim=1),
                "pixels": lambda: None,
                "outputs": lambda: in_chunks(lambda tokens, _: self(tokens), len(X)),
            }
            index = kept_only(acting, self.cost, X.shape[1], fields, "a network of one layer reads plain tokens")
            X = X if index is None else gather(X, index)
        return (torch.relu(self.attention(X) @ (X @ self.W_V) @ self.W_O) @ self.v).mean(dim=1)[:, 0]


def _one_layer() -> Case:
    """Return a network of one layer on tokens without positions and pixels."""
    N, d, rng = 20, 16, torch.Generator().manual_seed(1)
    inputs = torch.randn(B, N, d, generator=rng)
    relevance = (torch.rand(B, N, generator=rng) < 0.4).float()
    recipe = Recipe("hinge", "sgd", 0.4, B, epochs=1, steps=1, fixed_selection=True)
    return Case("one layer", _OneLayer(N, d, rng), inputs, torch.arange(B) % 2, relevance, recipe)
