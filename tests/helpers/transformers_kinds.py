"""Small models of the transformers library with random weights, one of each kind."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'sparsebench[transformers]'"
)

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = SHAPE | {"intermediate_size": 72}
TALL = WIDE | {"image_size": [32, 48]}


def vision(**more: object) -> dict[str, Any]:
    return {"vision_config": WIDE, **more}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTModel", WIDE),
    "ViT, not square": ("ViTModel", TALL),
    "ViT with 5 classes, no biases": ("ViTForImageClassification", WIDE | {"num_labels": 5, "qkv_bias": False}),
    "ViT without classes": ("ViTForImageClassification", WIDE | {"num_labels": 0}),
    "ViT-MSN": ("ViTMSNModel", WIDE),
    "ViT-MSN with 3 classes": ("ViTMSNForImageClassification", WIDE | {"num_labels": 3}),
    "I-JEPA": ("IJepaModel", WIDE),
    "I-JEPA with 3 classes": ("IJepaForImageClassification", WIDE | {"num_labels": 3}),
    "DeiT": ("DeiTModel", WIDE),
    "DeiT with 3 classes": ("DeiTForImageClassification", WIDE | {"num_labels": 3}),
    "distilled DeiT": ("DeiTForImageClassificationWithTeacher", WIDE | {"num_labels": 4}),
    "DINOv2": ("Dinov2Model", SHAPE),
    "DINOv2 with 6 classes, SwiGLU": (
        "Dinov2ForImageClassification",
        SHAPE | {"num_labels": 6, "use_swiglu_ffn": True},
    ),
    "DINOv2, registers": ("Dinov2WithRegistersModel", SHAPE),
    "DINOv2, registers, 7 classes": ("Dinov2WithRegistersForImageClassification", SHAPE | {"num_labels": 7}),
    "DINOv3": ("DINOv3ViTModel", WIDE | {"num_register_tokens": 4}),
    "DINOv3, gated": ("DINOv3ViTModel", WIDE | {"use_gated_mlp": True, "hidden_act": "silu"}),
    "SigLIP": ("SiglipVisionModel", WIDE),
    "SigLIP without pool": ("SiglipVisionModel", WIDE | {"vision_use_head": False}),
    "SigLIP with 3 classes": ("SiglipForImageClassification", vision(num_labels=3)),
    "CLIP": ("CLIPVisionModel", WIDE),
    "CLIP, projected": ("CLIPVisionModelWithProjection", WIDE | {"projection_dim": 20}),
    "CLIP with 3 classes": ("CLIPForImageClassification", vision(num_labels=3)),
}


def model_of(kind: str, **more: object) -> Any:
    """Return a model with weights that are large enough to tell one network from another."""
    name, config = KINDS[kind]
    cls = getattr(transformers, name)
    with quiet():
        model = cls(cls.config_class(**config, **more))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=rng) + 0.5 * (weight.ndim == 1))
    return model.eval()


def folder_of(model: Any, folder: Path) -> Path:
    """Return a folder that save_pretrained wrote."""
    with quiet():
        model.save_pretrained(folder)
    return folder


class quiet:  # noqa: N801
    """Keeps transformers from writing to the terminal."""

    def __enter__(self) -> None:
        logs = transformers.utils.logging
        self.level, self.bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
        logs.set_verbosity_error()
        logs.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers.utils.logging.set_verbosity(self.level)
        if self.bars:
            transformers.utils.logging.enable_progress_bar()
