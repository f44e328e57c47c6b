"""Small Vision Transformers for small images, with timm's attention or one of positions alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from timm.layers import Attention, PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from sparsebench import seeds
from sparsebench.measure.selection import neighbour_agreement
from sparsebench.models.actor import Pass
from sparsebench.models.attention import PositionalAttention, Positions
from sparsebench.models.deep import DeepViT
from sparsebench.models.shown import SplitPass
from sparsebench.models.timm_parts import ConvStem


class PositionalDeepViT(DeepViT):
    """A timm VisionTransformer whose attention is positional, as `small_vit` makes it; it shows what positions learn.

    Args:
        vit: the model.
        order: (N,) the place in plain order of the patch that each position shows; None for plain order.
        precision: see `DeepViT`.
    """

    shows: ClassVar = {"neighbour_agreement": "fraction", "neighbour_agreement_shuffled": "fraction"}
    shuffles: ClassVar[int] = 20

    def __init__(self, vit: Any, order: np.ndarray | None = None, *, precision: str = "float32"):
        super().__init__(vit, precision=precision)
        self.order = np.arange(self.cost.tokens) if order is None else order
        self.positions: Positions = vit.blocks[0].attn.positions

    @contextmanager
    def _install(self, pixels: Callable[[], Tensor], acting: Pass) -> Iterator[None]:
        self.positions.acting = acting
        try:
            with super()._install(pixels, acting):
                yield
        finally:
            self.positions.acting = None

    def similarity(self) -> np.ndarray:
        """Return (N, N) float64, (P W_Q)(P W_K)^T / sqrt(d_h) of the first block, patches only, mean over heads."""
        attn = self.module.blocks[0].attn
        with torch.no_grad():
            q, k = attn.queries_keys()
            similarity = (q * attn.scale @ k.transpose(-2, -1)).mean(dim=1)[0, self.prefix :, self.prefix :]
        return similarity.double().cpu().numpy()

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return the neighbour agreement of the first block, and its mean over `shuffles` shuffled orders."""
        similarity = self.similarity()
        null = [
            neighbour_agreement(similarity, self.grid, seeds.generator("shuffled positions", i).permutation(self.order))
            for i in range(self.shuffles)
        ]
        return {
            "neighbour_agreement": neighbour_agreement(similarity, self.grid, self.order),
            "neighbour_agreement_shuffled": float(np.mean(null)),
        }

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """Return the similarity of the first block, row by row, positions as the images show them."""
        return {"similarity": tuple(self.similarity().flatten().tolist())}


def small_vit(
    canvas: int, classes: int, *, attention: str = "content", stem: str = "linear", **sizes: int
) -> VisionTransformer:
    """Return a timm VisionTransformer for small images: patch, dim, depth, heads, with random weights.

    Its attention is "content", as timm has it, or "positional". The random weights are the same for both. Its patches
    are made by a "linear" projection or by "conv"olutions.
    """
    positional = attention == "positional"
    vit = VisionTransformer(
        img_size=canvas,
        patch_size=sizes["patch"],
        embed_dim=sizes["dim"],
        depth=sizes["depth"],
        num_heads=sizes["heads"],
        num_classes=classes,
        embed_layer=ConvStem if stem == "conv" else PatchEmbed,
        attn_layer=PositionalAttention if positional else Attention,
    )
    if positional:
        positions = Positions(vit)
        for block in vit.blocks:
            attn: Any = block.attn
            attn.positions = positions
    return vit
