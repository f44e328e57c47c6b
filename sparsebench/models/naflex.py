"""NaFlexViTs of timm for images of one size: timm's VisionTransformer with the same blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.transformers_models import LIMIT, check_size, difference, in_float64, pair

EMBEDS = "embeds."
"""The beginning of the names of the weights that a NaFlexViT has in place of those of a VisionTransformer."""
SHARED = ("blocks", "norm_pre", "norm", "fc_norm", "attn_pool", "head_drop", "head")


class FixedNaFlex(VisionTransformer):
    """A NaFlexViT for images of one size, without masks.

    All layers after the embedding are those of the NaFlexViT. Its position embeddings are resampled once, as it does
    it in each call (Dehghani et al. 2023, "Patch n' Pack").

    Args:
        naflex: the NaFlexViT, which stays as it is.
        size: (height, width) of the images in pixels.

    Raises:
        UnsupportedError: it has parts that a VisionTransformer does not have.
    """

    def __init__(self, naflex: Any, size: tuple[int, int]):
        _refuse(naflex)
        embeds = naflex.embeds
        super().__init__(
            img_size=size,
            patch_size=embeds.patch_size,
            in_chans=embeds.in_chans,
            num_classes=0,
            embed_dim=naflex.embed_dim,
            depth=0,
            global_pool="avg",
            class_token=embeds.has_class_token,
            reg_tokens=embeds.num_reg_tokens,
            no_embed_class=True,
            pos_embed="none" if embeds.pos_embed_type == "none" else "learn",
            pre_norm=embeds.proj.bias is None,
        )
        for name in SHARED:
            setattr(self, name, getattr(naflex, name))
        self.patch_embed.norm, self.pos_drop = embeds.norm, embeds.pos_drop
        self.num_classes, self.global_pool = naflex.num_classes, naflex.global_pool
        self.pool_include_prefix = naflex.pool_include_prefix
        self.grad_checkpointing = naflex.grad_checkpointing
        self.pretrained_cfg = getattr(naflex, "pretrained_cfg", None)

        # In a tuple it is no part of this module.
        self._embeds = (copy.deepcopy(embeds).to("meta"),)
        self.to(next(naflex.parameters())).train(naflex.training)
        self.load_state_dict(self.from_naflex(naflex.state_dict()))

    def from_naflex(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a NaFlexViT with the names of this network; weights with these names as they are."""
        parts = {key.removeprefix(EMBEDS): value for key, value in weights.items() if key.startswith(EMBEDS)}
        state = {key: value for key, value in weights.items() if not key.startswith(EMBEDS)}
        if not parts:
            return state
        embeds = copy.deepcopy(self._embeds[0])
        embeds.load_state_dict(parts, assign=True)
        state |= {f"patch_embed.{key}": value for key, value in parts.items() if key.startswith(("proj.", "norm."))}
        state |= {key: parts[key] for key in ("cls_token", "reg_token") if key in parts}
        state["patch_embed.proj.weight"] = self._projection(embeds)
        if embeds.pos_embed_type != "none":
            state["pos_embed"] = self._positions(embeds)
        return state

    def _projection(self, embeds: Any) -> Tensor:
        """Return the (width, channels, height, width of a patch) weights of the projection of pixels."""
        weight, (height, width) = embeds.proj.weight.detach(), embeds.patch_size
        if not embeds.is_linear:
            return weight
        if getattr(embeds, "channels_last", True):  # timm before 1.0.31 has only this order
            return weight.reshape(-1, height, width, embeds.in_chans).permute(0, 3, 1, 2)
        return weight.reshape(-1, embeds.in_chans, height, width)

    @torch.no_grad()
    def _positions(self, embeds: Any) -> Tensor:
        """Return the (1, N, width) position embeddings of the patches, resampled by the NaFlexViT's own function."""
        factorized = embeds.pos_embed_type == "factorized"
        table = embeds.pos_embed_y if factorized else embeds.pos_embed
        add_to = embeds._apply_factorized_pos_embed if factorized else embeds._apply_learned_pos_embed
        grid = self.patch_embed.grid_size
        positions = table.new_zeros(1, grid[0] * grid[1], table.shape[-1])
        add_to(positions, grid)
        return positions


def _refuse(naflex: Any) -> None:
    """Raise UnsupportedError for parts that a VisionTransformer does not have."""
    if naflex.rope is not None:
        raise UnsupportedError("NaFlexVit: it has rotary positions, which a VisionTransformer does not have")
    if naflex.embeds.norm_input is not None:
        raise UnsupportedError("NaFlexVit: it normalises the pixels of each patch before the projection")
    if naflex.patch_drop is not None:
        raise UnsupportedError("NaFlexVit: it drops patches itself (patch_drop_rate > 0)")


def of_one_size(model: Any, size: tuple[int, int]) -> Any:
    """Return a NaFlexViT as a VisionTransformer for images of (height, width) pixels; another model as it is."""
    return FixedNaFlex(model, size) if isinstance(model, NaFlexVit) else model


@torch.no_grad()
def convert(model: NaFlexVit, size: int | tuple[int, int] | None = None) -> tuple[FixedNaFlex, str]:
    """Return a NaFlexViT as a VisionTransformer, and a line about it. Their outputs are compared on two random images.

    Args:
        model: the NaFlexViT.
        size: side or (height, width) of the images; by default that of timm's configuration of the model.

    Raises:
        UserError: the size is unknown or not a multiple of the patch size, or the outputs differ.
        UnsupportedError: see `FixedNaFlex`.
    """
    name = type(model).__name__
    height, width = pair(_size_of(model) if size is None else size)
    check_size(name, (height, width), pair(model.embeds.patch_size))
    fixed = FixedNaFlex(model, (height, width))

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.in_chans, height, width, generator=generator, dtype=torch.float64)
    with in_float64(model) as device:
        expected = model(images.to(device))
    with in_float64(fixed) as device:
        actual = fixed(images.to(device))
    largest = difference(actual, expected)
    if not largest <= LIMIT:
        raise UserError(
            f"timm's VisionTransformer has other outputs than this {name}, so it is not used",
            got=f"a difference of {largest:.2g} on two random images",
            allowed=f"at most {LIMIT:g}",
        )
    line = (
        f"{name} is used as timm's VisionTransformer at {height} x {width} pixels, without masks, with its own copy of "
        f"the patch embedding and the positions; checked: on two random images the outputs differ by {largest:.0e} "
        f"(limit {LIMIT:g})"
    )
    return fixed, line


def _size_of(model: NaFlexVit) -> tuple[int, int]:
    """Return the (height, width) for which a NaFlexViT was made; raise UserError if it is unknown."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    size = model.embeds.default_img_size or cfg.get("input_size", ())[1:]
    if not size:
        raise UserError(f"{type(model).__name__} takes images of any size", next_step="give one, image_size=SIDE")
    return pair(size)
