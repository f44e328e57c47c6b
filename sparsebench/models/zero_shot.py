"""Zero-shot heads: classes as features of texts, compared with the features of images by their cosine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebench.errors import UserError, reason_of
from sparsebench.tasks.sources.labels import DAMAGED, read_text_classes

CONTENT = "the arrays features (classes, channels) and classes (names); scale and bias if the model does not have them"


class TextFeatures(NamedTuple):
    """Features of texts, one for each class.

    Attributes:
        classes: the names of the n classes.
        features: (n, channels) float32.
        scale, bias: factor of the cosines, and what is added to them; None if the file does not say it.
    """

    classes: tuple[str, ...]
    features: np.ndarray
    scale: float | None = None
    bias: float | None = None


def read_text_features(path: Path) -> TextFeatures:
    """Return the features of texts in an .npz file.

    Raises:
        UserError: the file cannot be read, or has not the arrays of `CONTENT`.
    """
    classes = tuple(read_text_classes(path))
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content, np.errstate(over="ignore"):
            features = content["features"].astype(np.float32, casting="same_kind")
            scale, bias = (float(content[name]) if name in content else None for name in ("scale", "bias"))
    except DAMAGED as error:
        raise UserError(f"--text-features: {path} cannot be read: {reason_of(error)}", allowed=CONTENT) from error
    fits = features.ndim == 2 and len(features) == len(classes) and np.isfinite(features).all()
    if not fits or not features.any(axis=1).all():
        raise UserError(
            f"--text-features: {path}",
            got=f"features of shape {features.shape} for {len(classes)} classes",
            allowed="one finite row for each class, not all 0",
        )
    is_scale = scale is None or 0 < scale < math.inf
    if not is_scale or not math.isfinite(bias or 0):
        raise UserError(
            f"--text-features: {path}", got=f"scale {scale}, bias {bias}", allowed="a positive scale, and a finite bias"
        )
    return TextFeatures(classes, features, scale, bias)


class UnitLength(nn.Module):
    """Divides (B, C) features by their length."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C)."""
        return F.normalize(x, dim=-1)


def text_head(whole: Any, vit: Any, classes: int) -> nn.Sequential:
    """Return a head without trained weights: the projection of images that the model has, and one row per class.

    Args:
        whole: the transformers model.
        vit: the timm network of its images.
        classes: number of classes.

    Raises:
        UserError: the model gives no features of images that could be compared with texts.
    """
    projection = getattr(whole, "visual_projection", None)
    if projection is None and (vit.attn_pool is None or hasattr(whole, "classifier")):
        raise UserError(
            f"--text-features: {type(whole).__name__} has no features of images for texts",
            allowed="CLIPModel, CLIPVisionModelWithProjection, SiglipModel, SiglipVisionModel",
        )
    width = vit.num_features
    layers: list[nn.Module] = []
    if projection is not None:
        layers.append(nn.Linear(width, projection.out_features, bias=False))
        width = projection.out_features
    return nn.Sequential(*layers, UnitLength(), nn.Linear(width, classes))


def set_text_head(whole: Any, vit: Any, texts: TextFeatures) -> None:
    """Give a timm network the head whose logits are scaled cosines of its features with those of texts.

    Scale and bias are those of the model, else those of the file.

    Raises:
        UserError: the widths differ, or the scale is unknown; see `text_head`.
    """
    head: Any = text_head(whole, vit, len(texts.classes))
    rows = head[-1]
    if rows.in_features != texts.features.shape[1]:
        raise UserError(
            "--text-features: the texts were not encoded by this model",
            got=f"{texts.features.shape[1]} channels",
            allowed=str(rows.in_features),
        )
    scale, bias = texts.scale, texts.bias
    if hasattr(whole, "logit_scale"):
        scale = math.exp(whole.logit_scale.detach().item())
        bias = whole.logit_bias.detach().item() if hasattr(whole, "logit_bias") else 0.0
    if scale is None:
        raise UserError(
            f"--text-features: {type(whole).__name__} has no scale of the cosines",
            next_step="write scale (and bias, for SigLIP) into the file, or give the folder of the whole model",
        )
    with torch.no_grad():
        if len(head) == 3:
            projection: Any = head[0]
            projection.weight.copy_(whole.visual_projection.weight)
        rows.weight.copy_(scale * F.normalize(torch.from_numpy(texts.features), dim=1))
        rows.bias.fill_(bias or 0.0)
    vit.head = head.to(next(vit.parameters()))
    vit.num_classes = len(texts.classes)
