"""The table of supported models in the page "Prune my model", against the registry of timm."""

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer

from sparsebench.errors import UserError
from sparsebench.models.base import supported
from sparsebench.models.deep import DeepViT
from sparsebench.models.naflex import FixedNaFlex

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md"
MODULES = ("vision_transformer", "eva", "deit", "naflexvit", "vision_transformer_hybrid")
"""The modules of timm that register models of these classes."""
ROWS = {
    "DINOv3 (`vit_*_dinov3`)": lambda name, _: fnmatch(name, "vit_*dinov3*"),
    "EVA-02 (`eva02_*`)": lambda name, _: fnmatch(name, "eva02_*"),
    "Perception Encoder (`vit_pe_*`)": lambda name, _: fnmatch(name, "vit_pe_*"),
    "other Eva: EVA, rotary ViTs, Sapiens2, LingBot": lambda _, model: isinstance(model, Eva),
    "SigLIP (`vit_*_siglip_*`)": lambda name, _: fnmatch(name, "vit_*siglip*"),
    "distilled DeiT": lambda _, model: isinstance(model, VisionTransformerDistilled),
    "NaFlexViT at one size (`naflexvit_*`)": lambda _, model: isinstance(model, NaFlexVit),
    "other VisionTransformer": lambda _, model: isinstance(model, VisionTransformer),
}
"""The rows of the table, and whether a model belongs to them; the first that fits counts."""


def is_supported(name: str, model: object) -> bool:
    try:
        with supported(name):
            if isinstance(model, NaFlexVit):
                model = FixedNaFlex(model, timm.get_pretrained_cfg(name).input_size[1:])
            DeepViT(model)
    except UserError:
        return False
    return True


@pytest.mark.slow
def test_the_table_has_the_models_of_timm_that_are_supported() -> None:
    page = PAGE.read_text(encoding="utf-8")
    version = re.search(r"registry of timm (\S+) are supported", page)
    assert version is not None
    if version[1] != timm.__version__:
        pytest.skip(f"the table is of timm {version[1]}")
    registered: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    names = sorted({name for module in MODULES for name in timm.list_models(module=module)})
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name)
        if not isinstance(model, VisionTransformer | Eva | NaFlexVit):
            continue
        row = next(row for row, belongs in ROWS.items() if belongs(name, model))
        registered[row] += 1
        taken[row] += is_supported(name, model)
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \|$", page, flags=re.MULTILINE)
    table = {row: (int(supported_), int(all_)) for row, supported_, all_ in rows}
    assert table == {row: (taken[row], registered[row]) for row in ROWS}
