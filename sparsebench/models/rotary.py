"""Rotary position embeddings of the tokens of the moment: each keeps its own, merged ones have their mean place's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from torch import Tensor

from sparsebench.errors import UnsupportedError
from sparsebench.strategy import tokens
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Plan, Rest, Shift
from sparsebench.strategy.tokens import Grouped, Padded

if TYPE_CHECKING:
    from sparsebench.models.actor import Pass

KINDS = (RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed)


def obstacle(rope: Any) -> str:
    """Return why the rotations of a single token cannot be had of it, or "" where they can."""
    if type(rope) not in KINDS:
        return f"rotary position embeddings of type {type(rope).__name__} are bound to the full token grid"
    grid = getattr(rope, "grid_type", "index")  # timm before 1.0.31 has no other
    if isinstance(rope, RotaryEmbeddingCat) and grid != "index":
        return f"the grid of its rotary position embeddings is '{grid}', and only 'index' is known here"
    return ""


def rope_tables(vit: Any, grid: tuple[int, int]) -> list[Tensor | None]:
    """Return what each block of a model rotates all patches by, as in a test; None where it has no such embedding."""
    rope = getattr(vit, "rope", None)
    table: Any = None if rope is None else rope.get_embed(shape=list(grid))
    return [table[n] if isinstance(rope, RotaryEmbeddingMixed) else table for n in range(len(vit.blocks))]


def coordinates(rope: Any, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return (N, 2), where the patches of a grid (rows, columns) lie for a rotary position embedding, in its units."""
    first = 0.5 if isinstance(rope, RotaryEmbeddingDinoV3) else 0.0
    axes = [torch.arange(n, device=device) + first + getattr(rope, "grid_offset", 0.0) for n in grid]
    if isinstance(rope, RotaryEmbeddingDinoV3):
        over = {"separate": grid, "max": (max(grid),) * 2, "min": (min(grid),) * 2}[rope.normalize_coords]
        axes = [2 * (axis / n) - 1 for axis, n in zip(axes, over, strict=True)]
    elif (reference := getattr(rope, "ref_feat_shape", None)) is not None:
        axes = [axis / n * trained for axis, n, trained in zip(axes, grid, reference, strict=True)]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 2)
    return places.flip(1) if rope.grid_indexing == "xy" else places


def rotations(rope: Any, places: Tensor, block: int) -> Tensor:
    """Return what a block rotates tokens by: sines and cosines, (B, 1 or H, M, 2 D), as timm's functions take them.

    Args:
        rope: the embedding.
        places: (B, M, 2), see `coordinates`.
        block: which block, which mixed embeddings tell apart.
    """
    if isinstance(rope, RotaryEmbeddingMixed):
        x, y = (places[:, None, :, axis, None] for axis in (0, 1))
        frequencies = rope.freqs[:, block].float()
        angles = x * frequencies[0, :, None] + y * frequencies[1, :, None]
    elif isinstance(rope, RotaryEmbeddingDinoV3):
        periods: Any = rope.periods
        angles = (2 * math.pi * places[..., None] / periods).flatten(2)[:, None]
    else:
        angles = (places[..., None] * rope.bands).flatten(2)[:, None]
    half = getattr(rope, "rotate_half", False)
    sines = [torch.cat([x, x], dim=-1) if half else x.repeat_interleave(2, -1) for x in (angles.sin(), angles.cos())]
    return torch.cat(sines, dim=-1)


class Rotations:
    """The rotations of one forward pass.

    A token that is one patch keeps that patch's rotation, to the bit. Where tokens are merged, fused or mixed each has
    the rotation of the mean place of what it stands for, weighted by sizes, or by the weights of a `Mix`.

    Args:
        rope: timm's module.
        grid: (rows, columns) of the patches.
    """

    def __init__(self, rope: Any, grid: tuple[int, int]):
        self.rope, self.grid = rope, grid
        self.followed = 0
        self.places: Tensor | None = None
        self.sizes: Tensor | None = None

    def of(self, acting: Pass, table: Tensor, block: int) -> Tensor:
        """Return what a block rotates the tokens by that are there now.

        Args:
            acting: the pass.
            table: what timm gives the block: (N, 2 D) for all patches, or (H, N, 2 D).
            block: which block.
        """
        if not acting.decisions and acting.index.shape[1] == table.shape[-2]:
            return table
        if acting.whole:
            rows = table[..., acting.index, :]
            return rows[:, None] if table.ndim == 2 else rows.transpose(0, 1)
        if self.rope.training and self.rope.aug_active:
            raise UnsupportedError("this model moves its rotary positions in training, and merged tokens have no place")
        return rotations(self.rope, self._follow(acting), block).to(table.dtype)

    def _follow(self, acting: Pass) -> Tensor:
        """Return (B, M, 2), the mean places of the tokens that are there now."""
        if self.places is None or self.sizes is None:
            B, N = acting.decisions[0].before.shape
            self.places = coordinates(self.rope, self.grid, acting.index.device).expand(B, N, 2)
            self.sizes = torch.ones_like(self.places[..., 0])
        for decision in acting.decisions[self.followed :]:
            self.places = places_after(decision.plan, self.places, self.sizes)
            self.sizes = tokens.sizes_after(decision.plan, self.sizes)
        self.followed = len(acting.decisions)
        return self.places


def places_after(plan: Plan, places: Tensor, sizes: Tensor) -> Tensor:
    """Return (B, M, 2), the mean places of what a plan makes of tokens at (B, N, 2) with sizes (B, N)."""
    if isinstance(plan, Mask | Shift | Rest):
        return places
    if isinstance(plan, Merge):
        return tokens.apply(replace(Grouped.of(plan), weight=None), places, sizes)
    if isinstance(plan, Mix):
        weight = plan.weight.abs().to(places.dtype)
        return weight @ places / weight.sum(dim=2, keepdim=True).clamp(min=1e-12)
    kept = tokens.gather(places, plan.index.clamp(min=0) if isinstance(plan, Padded) else plan.index)
    if plan.fuse is None:
        return kept
    assert isinstance(plan, Keep)
    left = sizes.scatter(1, plan.index, 0.0)
    fused = left[:, None] @ places / left.sum(dim=1)[:, None, None].clamp(min=1e-12)
    return torch.cat([kept, fused], dim=1)
