"""Parts of timm models: supported architectures, MACs of blocks, stems, pools, rotary position embeddings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, PatchEmbed
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    get_mixed_freqs,
)
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.models.actor import Pass
from sparsebench.models.attention import is_plain, masked_softmax
from sparsebench.models.base import stem_macs, stem_widths
from sparsebench.models.layer_macs import IMAGES, counted_per_row, has_weights, macs_per_row, unknown_macs
from sparsebench.strategy import tokens
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Plan, Shift
from sparsebench.strategy.tokens import Grouped

FORWARDS = (Block.forward, EvaBlock.forward, EvaBlockPostNorm.forward)
WAYS = ("forward", "forward_features", "forward_head")
PASSES = {getattr(cls, way) for cls in (VisionTransformer, Eva) for way in WAYS}
"""The forward methods whose order of parts is known here."""
POOLS = ("avg", "avgmax", "map")
"""The pools in which sizes of tokens matter."""
KINDS = (RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed)
SAME_IN_TIMM = (
    "if timm has the same network, such as vit_small_patch14_dinov2, build it with timm.create_model and load the "
    "weights with their names changed to timm's, where qkv is one matrix"
)
"""What to do with a network of another library."""
QKV = ("qkv", "q_proj", "k_proj", "v_proj")
COUNTED = ("mlp", "attn.proj", *(f"attn.{part}" for part in QKV))
"""The parts of a block whose MACs are counted."""


def coordinates(rope: Any, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the (N, 2) coordinates of the patches of a grid (rows, columns) in a rotary position embedding."""
    offset = getattr(rope, "grid_offset", 0.0)
    trained_grid = getattr(rope, "ref_feat_shape", None)
    if isinstance(rope, RotaryEmbeddingDinoV3):
        # From -1 to 1 over the image, at the middles of patches.
        extents = {"separate": grid, "max": (max(grid),) * 2, "min": (min(grid),) * 2}[rope.normalize_coords]
        middles = [torch.arange(n, dtype=torch.float32, device=device) + 0.5 + offset for n in grid]
        axes = [2 * (middle / extent) - 1 for middle, extent in zip(middles, extents, strict=True)]
    else:
        axes = [torch.arange(n, dtype=torch.float32, device=device) + offset for n in grid]
        if trained_grid is not None:
            axes = [axis / n * trained for axis, n, trained in zip(axes, grid, trained_grid, strict=True)]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 2)
    return places.flip(1) if rope.grid_indexing == "xy" else places


def rotations(rope: Any, places: Tensor, block: int) -> Tensor:
    """Return the (B, 1 or H, M, 2 D) sines and cosines of a block's rotations, as timm's functions take them.

    Args:
        rope: the embedding.
        places: (B, M, 2) coordinates, see `coordinates`.
        block: number of the block; mixed embeddings differ between blocks.
    """
    if isinstance(rope, RotaryEmbeddingMixed):
        x, y = places[:, None].unbind(3)
        return get_mixed_freqs(rope.freqs[:, block], x, y)
    periods: Any = getattr(rope, "periods", None)
    if periods is not None:
        bands = 2 * math.pi / periods
    elif rope.bands is not None:
        bands = rope.bands
    else:  # timm before 1.0.31 keeps only the rotations of the grid
        bands = rope._compute_bands(device=places.device)
    angles = (places[..., None] * bands).flatten(2)[:, None]
    half = getattr(rope, "rotate_half", False)
    angles = torch.cat([angles, angles], dim=-1) if half else angles.repeat_interleave(2, -1)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Rotations:
    """The rotations of one forward pass.

    A token that is one patch has exactly the rotation of this patch. A merged, fused or mixed token has the rotation at
    the mean coordinates of its patches, weighted by sizes, or by the weights of a `Mix`.

    Args:
        vit: the timm model.
        grid: (rows, columns) of the patches.
        table: the model's rotary embeddings of all patches, or None without rotary embeddings.
    """

    def __init__(self, vit: Any, grid: tuple[int, int], table: Any):
        self.rope, self.grid = getattr(vit, "rope", None), grid
        self.tables: Sequence[Tensor] | None = None
        if isinstance(self.rope, RotaryEmbeddingMixed) and table is not None:
            self.tables = table  # each block has its own
        elif table is not None:
            self.tables = [table] * len(vit.blocks)
        self.start = 0
        self.places: Tensor | None = None

    def of(self, block: int, acting: Pass | None = None) -> dict[str, Tensor]:
        """Return the keyword argument with which a block rotates the current tokens; without a pass, all tokens."""
        if self.tables is None:
            return {}
        table = self.tables[block]  # (N, 2 D) for all patches, or (H, N, 2 D)
        if acting is None or (not acting.decisions and acting.index.shape[1] == table.shape[-2]):
            return {"rope": table}
        if acting.whole:
            rows = table[..., acting.index, :]
            return {"rope": rows[:, None] if table.ndim == 2 else rows.transpose(0, 1)}
        rope: Any = self.rope
        if rope.training and rope.aug_active:
            raise UnsupportedError(
                "this model perturbs its rotary positions in training, so positions of merged tokens are unknown"
            )
        return {"rope": rotations(rope, self._follow(acting), block).to(table.dtype)}

    def _follow(self, acting: Pass) -> Tensor:
        """Return the (B, M, 2) mean coordinates of the current tokens."""
        if self.places is None:
            places = coordinates(self.rope, self.grid, acting.index.device)
            self.places = places.expand(len(acting.index), *places.shape)
        for decision in acting.decisions[self.start :]:
            self.places = places_after(decision.plan, self.places, decision.sizes)
        self.start = len(acting.decisions)
        return self.places


def places_after(plan: Plan, places: Tensor, sizes: Tensor) -> Tensor:
    """Return the (B, M, 2) mean coordinates after a plan, from (B, N, 2) coordinates and (B, N) sizes before it."""
    if isinstance(plan, Mask | Shift):
        return places
    if isinstance(plan, Merge):
        plan = replace(Grouped.of(plan), weight=None)
    elif isinstance(plan, Mix):
        weight = plan.weight.abs()
        plan = Mix(weight / weight.sum(dim=2, keepdim=True).clamp(min=1e-12))
    elif isinstance(plan, Keep) and plan.fuse is not None:
        others = sizes.scatter(1, plan.index, 0.0)
        plan = replace(plan, fuse=others / others.sum(dim=1, keepdim=True).clamp(min=1e-12))
    return tokens.apply(tokens.without_features(plan), places, sizes)


def refuse(vit: Any) -> None:
    """Raise UnsupportedError for architectures in which dropping tokens would give wrong results silently."""
    name = type(vit).__name__
    if not isinstance(vit, VisionTransformer | Eva):
        hint = "" if type(vit).__module__.startswith("timm.") else f"; {SAME_IN_TIMM}"
        raise UnsupportedError(
            f"{name} is not a timm VisionTransformer or Eva; tokens can be dropped only in these{hint}"
        )
    obstacles = itertools.chain(_changes(vit), _unknown_rotations(vit), _unknown_parts(vit))
    obstacle = next(obstacles, None)
    if obstacle is not None:
        raise UnsupportedError(f"{name}: {obstacle}")


def _changes(vit: Any) -> Iterator[str]:
    """Yield how a model differs from timm's order of parts, in which they are called here."""
    ways = WAYS if vit.global_pool in POOLS else WAYS[:2]
    changed = [way for way in ways if getattr(type(vit), way) not in PASSES or way in vars(vit)]
    if changed:
        yield f"it overrides `{'`, `'.join(changed)}`, so the order of its parts is unknown"
    if any("forward" in vars(block) for block in vit.blocks):
        yield "a block has its own `forward`"
    if getattr(vit, "grad_checkpointing", False):
        yield "gradient checkpointing is on; call set_grad_checkpointing(False)"


def _unknown_rotations(vit: Any) -> Iterator[str]:
    """Yield why the rotations of the remaining tokens are unknown, if so."""
    rope = getattr(vit, "rope", None)
    if rope is not None and type(rope) not in KINDS:
        yield f"it has rotary position embeddings of type {type(rope).__name__}"
    grid_type = getattr(rope, "grid_type", "index")  # timm before 1.0.31 has only "index"
    if isinstance(rope, RotaryEmbeddingCat) and grid_type != "index":
        yield f"the grid of its rotary position embeddings is '{grid_type}', not 'index'"


def _unknown_parts(vit: Any) -> Iterator[str]:
    """Yield why the number of tokens or the MACs of parts other than blocks are unknown, if so."""
    if not isinstance(vit.patch_drop, nn.Identity | None):
        yield "it drops patches itself (patch_drop_rate > 0)"
    pool = vit.attn_pool
    is_known = type(pool) is AttentionPoolLatent and pool.pos_embed is None and pool.pool == "token"
    if pool is not None and not is_known:
        yield f"its MACs are unknown, because it pools with {type(pool).__name__}"

    embed = vit.patch_embed
    if type(embed) not in (PatchEmbed, ConvStem):
        yield f"its patch embedding is {type(embed).__name__}, not a projection"
    if not any(isinstance(part, nn.Conv2d) for part in embed.modules()):
        yield "its patch embedding has no Conv2d"
    if embed.grid_size is None or embed.dynamic_img_pad:
        yield "its images may have any size (dynamic_img_pad), so the number of tokens is not fixed"
    sizes = (embed.grid_size or (), embed.patch_size, embed.img_size or ())
    if any(n * side != pixels for n, side, pixels in zip(*sizes, strict=False)):
        yield f"{embed.img_size} pixels cannot be divided into patches of {embed.patch_size}"


def vit_cost(vit: Any) -> VitCost:
    """Return the cost model of a timm VisionTransformer or Eva.

    Raises:
        UnsupportedError: the MACs of a block or of a layer are unknown.
    """
    like = next(vit.parameters())
    blocks = [_block_cost(f"blocks.{number}", block, vit.embed_dim, like) for number, block in enumerate(vit.blocks)]
    _check_others(vit)
    head = macs_per_row("head", vit.head, vit.num_features, like, IMAGES)
    head += macs_per_row("head_dist", getattr(vit, "head_dist", None), vit.num_features, like, IMAGES)
    tokens_, prefix = vit.patch_embed.num_patches, vit.num_prefix_tokens
    heads = vit.blocks[0].attn.num_heads
    token_macs, pool_macs = (0, 0) if vit.attn_pool is None else _pool_macs(vit.attn_pool, like)
    if includes_prefix(vit):
        pool_macs += prefix * token_macs
    class_rows = (vit.cls_token is not None) + (getattr(vit, "dist_token", None) is not None)
    ends = (_patch_macs(vit, like), head + pool_macs)
    return VitCost(
        tokens_,
        prefix,
        class_rows,
        *ends,
        tuple(blocks),
        vit.embed_dim,
        heads,
        pooled=token_macs,
        reads_patches=vit.global_pool in POOLS,
        classes=vit.num_classes,
    )


def _block_cost(name: str, block: Any, width: int, like: Tensor) -> BlockCost:
    """Return the cost of a block whose tokens have this width; `name` and `like` as in `macs_per_row`."""
    attn: Any = getattr(block, "attn", None)
    if not is_plain(attn) or not hasattr(block, "mlp"):
        problem = f"blocks of type {type(block).__name__} with attention of type {type(attn).__name__}"
        raise UnsupportedError(f"MACs of {problem}, or with a gate, are unknown")
    inner = attn.num_heads * attn.head_dim
    if getattr(attn, "q_bias", None) is not None:  # timm multiplies by the layer's weight and does not call the layer
        if not isinstance(attn.qkv, nn.Linear):
            raise unknown_macs(f"{name}.attn.qkv", attn.qkv, "this attention needs a Linear")
        qkv = attn.qkv.weight.numel()
    else:
        qkv = sum(macs_per_row(f"{name}.attn.{part}", getattr(attn, part, None), width, like) for part in QKV)
    proj = macs_per_row(f"{name}.attn.proj", attn.proj, inner, like)
    mlp = macs_per_row(f"{name}.mlp", block.mlp, width, like)
    return BlockCost(qkv, proj, mlp, inner)


def _patch_macs(vit: Any, like: Tensor) -> int:
    """Return the MACs of the patch embedding per patch."""
    embed = vit.patch_embed
    if isinstance(embed, ConvStem):
        return stem_macs(vit.embed_dim, embed.patch_size[0])
    if type(embed.proj) is nn.Conv2d:
        return embed.proj.weight.numel()
    shape = (input_channels(embed), *embed.img_size)
    inputs = [like.new_zeros(images, *shape) for images in (1, 2, 3)]
    return counted_per_row("patch_embed.proj", embed.proj, inputs, embed.num_patches)


def input_channels(embed: Any) -> int:
    """Return the number of channels that a patch embedding takes."""
    return next(part.in_channels for part in embed.modules() if isinstance(part, nn.Conv2d))


def _check_others(vit: Any) -> None:
    """Raise UnsupportedError if a layer that `vit_cost` does not count, such as a norm, has weights of products."""
    places = {name: getattr(vit, name, None) for name in ("patch_drop", "pos_drop", "norm_pre", "norm", "fc_norm")}
    places |= {f"blocks.{number}": block for number, block in enumerate(vit.blocks)}
    for place, part in places.items():
        for name, layer in [] if part is None else part.named_modules(prefix=place):
            is_counted = any(f"{name}.".startswith(f"{place}.{counted}.") for counted in COUNTED)
            if not is_counted and has_weights(layer):
                raise UnsupportedError(
                    f"MACs of its layer `{name}` ({type(layer).__name__}) are not counted at this place"
                )


def _pool_macs(part: AttentionPoolLatent, like: Tensor) -> tuple[int, int]:
    """Return the MACs of an attention pool per token and per image."""
    width = part.num_heads * part.head_dim
    q = macs_per_row("attn_pool.q", part.q, part.latent_dim, like)
    proj = macs_per_row("attn_pool.proj", part.proj, width, like)
    mlp = macs_per_row("attn_pool.mlp", part.mlp, part.out_features, like)
    kv = macs_per_row("attn_pool.kv", part.kv, width, like)
    return kv + 2 * part.latent_len * width, part.latent_len * (q + proj + mlp)


class ConvStem(PatchEmbed):
    """A patch embedding of 3x3 convolutions with stride 2, batch normalisation and GELU, then a 1x1 convolution.

    With it a small Vision Transformer learns from far fewer images (Xiao et al. 2021, "Early convolutions help
    transformers see better"). The receptive field of a token exceeds its patch by less than one patch on each side. The
    arguments are those of timm's PatchEmbed.
    """

    proj: Any

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        dim, layers = self.proj.out_channels, []
        for C, wider in itertools.pairwise(stem_widths(dim, self.patch_size[0])):
            layers += [nn.Conv2d(C, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.GELU()]
        self.proj = nn.Sequential(*layers, nn.Conv2d(dim, dim, 1))


def check_block(block: Any) -> None:
    """Raise UnsupportedError for a block whose attention and MLP cannot be run separately."""
    if type(block).forward not in FORWARDS:
        raise UnsupportedError(
            f"blocks of type {type(block).__name__} cannot be split between attention and MLP; use a strategy with the "
            "site input or block"
        )


def branch_input(block: Any, part: int, x: Tensor) -> Tensor:
    """Return the input of a part of a block, from the tokens before it: part 1 is the attention, 2 the MLP."""
    return x if isinstance(block, EvaBlockPostNorm) else getattr(block, f"norm{part}")(x)


def branch_output(block: Any, part: int, x: Tensor) -> Tensor:
    """Return what the block adds to its tokens, from the output of a part, see `branch_input`."""
    if isinstance(block, EvaBlockPostNorm):
        x = getattr(block, f"norm{part}")(x)
    elif isinstance(block, EvaBlock):
        gamma = getattr(block, f"gamma_{part}")
        x = x if gamma is None else gamma * x
    else:
        x = getattr(block, f"ls{part}")(x)
    dropped: Tensor = getattr(block, f"drop_path{part}")(x)
    return dropped


def pool(vit: Any, acting: Pass, x: Tensor) -> Tensor:
    """Pool the (B, P + N, C) tokens of a model, with a weight for each token: its size times its weight as a key.

    An attention pool multiplies its attention by these weights before the normalisation.
    """
    P, present = vit.num_prefix_tokens, acting.sizes > 0
    sizes = acting.sizes * acting.weights() if acting.masked else acting.sizes
    pooled = x[:, P:]
    if includes_prefix(vit):
        pooled = x
        sizes = F.pad(sizes, (P, 0), value=1)
        present = F.pad(present, (P, 0), value=True)
    if vit.attn_pool is not None:
        return attention_pool(vit.attn_pool, pooled, sizes)
    plain = vit.pool(x)
    equal = (sizes == sizes[:, :1]).all()
    result = (pooled * sizes[:, :, None]).sum(dim=1) / sizes.sum(dim=1, keepdim=True).clamp(min=1e-6)
    if isinstance(vit, ClassAndMean) and vit.pools_class:
        result = torch.cat([x[:, 0], result], dim=1)
    if vit.global_pool != "avg":
        result = 0.5 * (result + pooled.masked_fill(~present[:, :, None], -torch.inf).amax(dim=1))
    return torch.where(equal, plain, result.to(plain.dtype))  # `if` would wait for the device


class ClassAndMean(VisionTransformer):
    """A timm VisionTransformer whose head reads the class token beside the mean of the patches.

    DINOv2's linear classifiers read both (Oquab et al. 2023, "DINOv2: Learning Robust Visual Features without
    Supervision"). The arguments are those of timm's VisionTransformer, with a class token.

    Attributes:
        pools_class: whether the class token is read; otherwise the network pools the mean of the patches alone.
    """

    pools_class = True

    def __init__(self, *, num_classes: int = 0, **more: Any):
        super().__init__(global_pool="avg", fc_norm=False, num_classes=0, **more)
        self.num_features = self.head_hidden_size = 2 * self.embed_dim
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one with random weights."""
        super().reset_classifier(0, global_pool)
        self.num_classes = num_classes
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes).to(self.cls_token)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Return (B, 2 C): the class token, and the mean of the patches; without `pools_class` this mean, (B, C)."""
        mean = super().pool(x, pool_type)
        return torch.cat([x[:, 0], mean], dim=1) if self.pools_class else mean


def includes_prefix(vit: Any) -> bool:
    """Return whether class and register tokens are pooled too: always in the attention pool of an Eva."""
    return getattr(vit, "pool_include_prefix", vit.attn_pool is not None)


def attention_pool(part: Any, x: Tensor, sizes: Tensor) -> Tensor:
    """Return the output of timm's AttentionPoolLatent for (B, T, C) tokens that represent (B, T) `sizes` tokens."""
    B, T, _ = x.shape
    q = part.q(part.latent.expand(B, -1, -1)).reshape(B, part.latent_len, part.num_heads, part.head_dim)
    k, v = part.kv(x).reshape(B, T, 2, part.num_heads, part.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q = part.q_norm(q.transpose(1, 2))
    k = part.k_norm(k)
    A = masked_softmax(q * part.scale @ k.transpose(-2, -1), sizes, None, eps=0.0).to(v.dtype)
    out = part.proj_drop(part.proj((A @ v).transpose(1, 2).flatten(2)))
    return (out + part.mlp(part.norm(out)))[:, 0]
