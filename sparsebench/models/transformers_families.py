"""Families of models of the transformers library: the names of their layers, and their networks in timm.

A family is a table of names, and a function that builds its timm network. A new family is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from timm.layers import QuickGELU, SwiGLUPacked
from timm.layers.activations import GELUTanh
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sparsebench.models.timm_parts import ClassAndMean

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
OPENAI = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": GELUTanh,
    "quick_gelu": QuickGELU,
}
HEADS = {"classifier": "logits", "cls_classifier": "logits", "visual_projection": "image_embeds"}
"""Output layers of transformers models, with the field of the output that they give."""
JOINED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.fc1": ("mlp.gate", "mlp.up")}
"""Layers of timm that are several layers of transformers, in the order of their rows; those that a model has."""

VIT = {
    "classifier": "head",
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layer.*.layernorm_before": "blocks.*.norm1",
    "layer.*.layernorm_after": "blocks.*.norm2",
    "layer.*.attention.attention.query": "blocks.*.attn.q",
    "layer.*.attention.attention.key": "blocks.*.attn.k",
    "layer.*.attention.attention.value": "blocks.*.attn.v",
    "layer.*.attention.output.dense": "blocks.*.attn.proj",
    "layer.*.intermediate.dense": "blocks.*.mlp.fc1",
    "layer.*.output.dense": "blocks.*.mlp.fc2",
    # In modules of newer versions:
    "layer.*.attention.q_proj": "blocks.*.attn.q",
    "layer.*.attention.k_proj": "blocks.*.attn.k",
    "layer.*.attention.v_proj": "blocks.*.attn.v",
    "layer.*.attention.o_proj": "blocks.*.attn.proj",
    "layer.*.mlp.fc1": "blocks.*.mlp.fc1",
    "layer.*.mlp.fc2": "blocks.*.mlp.fc2",
    "layernorm": "norm",
    "pooler.dense": "pooler.dense",
}
"""Names of layers and tensors in transformers, and in timm or as parts of `JOINED`. Any prefix may come before them.

The star is the number of a block, and `layer` may be `layers`.
"""
DEIT = VIT | {
    "embeddings.distillation_token": "dist_token",
    "cls_classifier": "head",
    "distillation_classifier": "head_dist",
}
DINOV2 = VIT | {
    "embeddings.register_tokens": "reg_token",
    "layer.*.norm1": "blocks.*.norm1",
    "layer.*.norm2": "blocks.*.norm2",
    "layer.*.layer_scale1.lambda1": "blocks.*.ls1.gamma",
    "layer.*.layer_scale2.lambda1": "blocks.*.ls2.gamma",
    "layer.*.mlp.weights_in": "blocks.*.mlp.fc1",
    "layer.*.mlp.weights_out": "blocks.*.mlp.fc2",
    "layer.*.mlp.gate_proj": "blocks.*.mlp.gate",
    "layer.*.mlp.up_proj": "blocks.*.mlp.up",
    "layer.*.mlp.down_proj": "blocks.*.mlp.fc2",
}
DINOV3 = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.patch_embeddings": "patch_embed.proj",
    "layer.*.norm1": "blocks.*.norm1",
    "layer.*.norm2": "blocks.*.norm2",
    "layer.*.attention.q_proj": "blocks.*.attn.q",
    "layer.*.attention.k_proj": "blocks.*.attn.k",
    "layer.*.attention.v_proj": "blocks.*.attn.v",
    "layer.*.attention.o_proj": "blocks.*.attn.proj",
    "layer.*.layer_scale1.lambda1": "blocks.*.gamma_1",
    "layer.*.layer_scale2.lambda1": "blocks.*.gamma_2",
    "layer.*.mlp.gate_proj": "blocks.*.mlp.gate",
    "layer.*.mlp.up_proj": "blocks.*.mlp.up",
    "layer.*.mlp.down_proj": "blocks.*.mlp.fc2",
    "norm": "norm",
}
TOWER = {
    "classifier": "head",
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding.weight": "pos_embed",
    "layer.*.layer_norm1": "blocks.*.norm1",
    "layer.*.layer_norm2": "blocks.*.norm2",
    "layer.*.self_attn.q_proj": "blocks.*.attn.q",
    "layer.*.self_attn.k_proj": "blocks.*.attn.k",
    "layer.*.self_attn.v_proj": "blocks.*.attn.v",
    "layer.*.self_attn.out_proj": "blocks.*.attn.proj",
    "layer.*.mlp.fc1": "blocks.*.mlp.fc1",
    "layer.*.mlp.fc2": "blocks.*.mlp.fc2",
    "post_layernorm": "norm",
}
CLIP = TOWER | {
    "embeddings.class_embedding": "cls_token",
    "pre_layrnorm": "norm_pre",
    "visual_projection": "head",
}
SIGLIP = TOWER | {
    "head.probe": "attn_pool.latent",
    "head.attention.in_proj": "attn_pool.qkv",
    "head.attention.out_proj": "attn_pool.proj",
    "head.layernorm": "attn_pool.norm",
    "head.mlp.fc1": "attn_pool.mlp.fc1",
    "head.mlp.fc2": "attn_pool.mlp.fc2",
}


@dataclass(frozen=True)
class Family:
    """A family of transformers models.

    Attributes:
        names: the names of its layers, see `VIT`.
        network: returns its timm network with any weights, from the model, its configuration and (height, width).
        classes: the names of its classes in transformers.
        normalised: the mean and std of its usual image processor.
    """

    names: Mapping[str, str]
    network: Callable[[Any, Any, tuple[int, int]], Any]
    classes: tuple[str, ...]
    normalised: Mapping[str, tuple[float, ...]]


def _common(model: Any, config: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of timm's networks that all families have."""
    hidden = getattr(config, "intermediate_size", None) or int(config.hidden_size * config.mlp_ratio)
    return {
        "img_size": size,
        "patch_size": config.patch_size if isinstance(config.patch_size, int) else tuple(config.patch_size),
        "in_chans": config.num_channels,
        "num_classes": outputs_of(model),
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": Fraction(hidden, config.hidden_size),
        "norm_layer": partial(nn.LayerNorm, eps=config.layer_norm_eps),
    }


def outputs_of(model: Any) -> int:
    """Return the number of outputs of a model's output layer, 0 without one."""
    layers = [getattr(model, name, None) for name in HEADS]
    return next((layer.out_features for layer in layers if isinstance(layer, nn.Linear)), 0)


def _activation(config: Any) -> type[nn.Module]:
    """Return the activation of a configuration; GELU for others, which the comparison then refuses."""
    return ACTIVATIONS.get(config.hidden_act, nn.GELU)


def _vit(model: Any, config: Any, size: tuple[int, int]) -> Any:
    common = _common(model, config, size) | {"act_layer": _activation(config), "qkv_bias": config.qkv_bias}
    return _with_pooler(VisionTransformer(**common), model)


class Pooler(nn.Module):
    """The pooler of ViT and DeiT in transformers: tanh of a layer that reads the class token of (B, T, C) tokens."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.dense = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, outputs)."""
        return torch.tanh(self.dense(x[:, 0]))


def _with_pooler(vit: Any, model: Any) -> Any:
    """Return a network with a pooler if the model has one."""
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        vit.pooler = Pooler(pooler.dense.in_features, pooler.dense.out_features)
    return vit


def _ijepa(model: Any, config: Any, size: tuple[int, int]) -> Any:
    """Return a network without a class token, whose head reads the mean of the patches."""
    common = _common(model, config, size) | {"act_layer": _activation(config), "qkv_bias": config.qkv_bias}
    return VisionTransformer(class_token=False, global_pool="avg", fc_norm=False, **common)


def _deit(model: Any, config: Any, size: tuple[int, int]) -> Any:
    """Return a network with two heads, or one in which the distillation token is a register token."""
    common = _common(model, config, size) | {"act_layer": _activation(config), "qkv_bias": config.qkv_bias}
    if hasattr(model, "distillation_classifier"):
        return VisionTransformerDistilled(**common)
    return _with_pooler(VisionTransformer(reg_tokens=1, **common), model)


def _dinov2(model: Any, config: Any, size: tuple[int, int]) -> Any:
    common = _common(model, config, size) | {"act_layer": _activation(config), "qkv_bias": config.qkv_bias}
    if config.use_swiglu_ffn:
        hidden = (int(config.hidden_size * config.mlp_ratio) * 2 // 3 + 7) // 8 * 8
        common |= {
            "mlp_layer": SwiGLUPacked,
            "act_layer": nn.SiLU,
            "mlp_ratio": Fraction(2 * hidden, config.hidden_size),
        }
    registers = getattr(config, "num_register_tokens", 0)
    network = ClassAndMean if common["num_classes"] else VisionTransformer
    return network(init_values=1.0, reg_tokens=registers, no_embed_class=registers > 0, **common)


def _dinov3(model: Any, config: Any, size: tuple[int, int]) -> Any:
    return Eva(
        qkv_bias=config.query_bias or config.value_bias,
        swiglu_mlp=config.use_gated_mlp,
        init_values=1.0,
        global_pool="token",
        num_reg_tokens=config.num_register_tokens,
        use_abs_pos_emb=False,
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_temperature=config.rope_theta,
        rope_rotate_half=True,
        **_common(model, config, size),
    )


def _siglip(model: Any, config: Any, size: tuple[int, int]) -> Any:
    common = _common(model, config, size) | {"act_layer": _activation(config)}
    pools = getattr(config, "vision_use_head", True) and not common["num_classes"]
    return VisionTransformer(class_token=False, global_pool="map" if pools else "avg", fc_norm=False, **common)


def _clip(model: Any, config: Any, size: tuple[int, int]) -> Any:
    """Return a network whose class token is normalised after it is pooled, so that its tokens are not."""
    common = _common(model, config, size) | {"act_layer": _activation(config), "pre_norm": True}
    if hasattr(model, "classifier"):
        return VisionTransformer(global_pool="avg", final_norm=False, **common)
    vit = VisionTransformer(fc_norm=True, **common)
    if isinstance(vit.head, nn.Linear):
        vit.head = nn.Linear(vit.head.in_features, vit.head.out_features, bias=False)
    return vit


FAMILIES = (
    Family(VIT, _vit, ("ViTModel", "ViTForImageClassification"), HALF),
    Family(VIT, _vit, ("ViTMSNModel", "ViTMSNForImageClassification"), IMAGENET),
    Family(VIT, _ijepa, ("IJepaModel", "IJepaForImageClassification"), IMAGENET),
    Family(
        DEIT,
        _deit,
        ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        IMAGENET,
    ),
    Family(
        DINOV2,
        _dinov2,
        (
            "Dinov2Model",
            "Dinov2ForImageClassification",
            "Dinov2WithRegistersModel",
            "Dinov2WithRegistersForImageClassification",
        ),
        IMAGENET,
    ),
    Family(DINOV3, _dinov3, ("DINOv3ViTModel",), IMAGENET),
    Family(SIGLIP, _siglip, ("SiglipVisionModel", "SiglipVisionTransformer", "SiglipForImageClassification"), HALF),
    Family(
        CLIP,
        _clip,
        (
            "CLIPVisionModel",
            "CLIPVisionTransformer",
            "CLIPVisionModelWithProjection",
            "CLIPForImageClassification",
        ),
        OPENAI,
    ),
)
WITH_TEXT = ("CLIPModel", "SiglipModel")
"""Models of images and texts: their `vision_model` is taken."""
CLASSES = tuple(name for family in FAMILIES for name in family.classes if not name.endswith("VisionTransformer"))
