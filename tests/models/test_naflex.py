"""NaFlexViTs of timm at one image size, with a strategy."""

from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import generate_default_cfgs, naflexvit, register_model

import sparsebench
from sparsebench.deploy.apply import timm_model
from sparsebench.errors import UserError
from sparsebench.models.deep import DeepViT

NEAR = 1e-5
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
NAME = "naflexvit_tiny_of_these_tests"


default_cfgs = generate_default_cfgs({NAME: {"input_size": (3, 224, 224)}})  # register_model reads this name


@register_model
def naflexvit_tiny_of_these_tests(pretrained: bool = False, **kwargs: Any) -> Any:
    """Return a NaFlexViT whose weights fit into a test."""
    more = {"pos_embed_grid_size": (5, 5), "pos_embed_interp_mode": "bilinear", "reg_tokens": 2, "global_pool": "map"}
    return naflexvit._create_naflexvit(NAME, pretrained, **SMALL, **more, class_token=True, **kwargs)


def tiny(name: str, **more: Any) -> Any:
    """Return a small NaFlexViT with weights that are large enough to tell one network from another."""
    model = timm.create_model(name, **SMALL, num_classes=5, **more).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=rng))
    return model


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
@pytest.mark.parametrize("name", timm.list_models("naflexvit_*16_*"))
@torch.no_grad()
def test_all_macs_give_the_output_of_the_model(name, size, caplog):
    model = tiny(name)
    x = torch.randn(2, 3, *size)
    for spec in ("value_norm:macs=1", "tome:macs=1"):
        with sparsebench.apply(model, spec, image_size=size) as sparse:
            assert (sparse(x) - model(x)).abs().max() <= NEAR
            assert sparse.tokens[0] == size[0] * size[1] // 256
    assert all("checked" in line and f"{size[0]} x {size[1]}" in line for line in caplog.messages)


def test_the_blocks_are_those_of_the_model():
    model = tiny("naflexvit_base_patch16_gap", img_size=64)
    x = torch.randn(2, 3, 64, 64)
    with sparsebench.apply(model, "tome:per_block=4", image_size=64).train() as sparse:
        sparse(x).sum().backward()
    assert sparse.model.blocks[1] is model.blocks[1]
    assert model.blocks[1].attn.qkv.weight.grad is not None
    assert (sparse.model.num_classes, sparse.model.training) == (5, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_type": "axial"}, "rotary positions"),
        ({"patch_drop_rate": 0.5}, "drops patches itself"),
    ],
)
def test_what_a_vision_transformer_does_not_have_is_refused(more, message):
    with pytest.raises(UserError, match=message) as caught:
        sparsebench.apply(tiny("naflexvit_base_patch16_gap", **more), "tome", macs=0.7, image_size=64)
    assert "\n" not in str(caught.value)


def test_another_forward_is_refused_by_the_numbers():
    model = tiny("naflexvit_base_patch16_map")
    forward = model.forward_features
    model.forward_features = lambda patches, **more: forward(patches.flip(3), **more)
    with pytest.raises(UserError, match=r"other outputs .* a difference of \d"):
        sparsebench.apply(model, "tome", macs=0.7, image_size=64)


def test_the_size_is_named_if_the_model_has_none():
    model = naflexvit.NaFlexVit(naflexvit.NaFlexVitCfg(**SMALL), num_classes=5)
    with pytest.raises(UserError, match="image_size=SIDE"):
        sparsebench.apply(model, "tome", macs=0.7)
    with pytest.raises(UserError, match="multiples of the patch size"):
        sparsebench.apply(model, "tome", macs=0.7, image_size=70)


@pytest.mark.parametrize("side", [None, 64])
@torch.no_grad()
def test_a_file_of_its_weights_is_read_by_name(side, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=3).eval()
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    network = timm_model(f"timm:{NAME}", tmp_path / "own.safetensors", side=side)
    x = torch.randn(2, 3, *network.patch_embed.img_size)
    assert x.shape[-1] == (side or 224)
    assert (network(x) - model(x)).abs().max() <= NEAR
    assert DeepViT(network).cost.prefix == 3

    save_file(network.state_dict(), tmp_path / "fixed.safetensors")
    again = timm_model(f"timm:{NAME}", tmp_path / "fixed.safetensors", side=side)
    assert torch.equal(again(x), network(x))
    del model.embeds.cls_token
    save_file(model.state_dict(), tmp_path / "bad.safetensors")
    with pytest.raises(UserError, match="another architecture"):
        timm_model(f"timm:{NAME}", tmp_path / "bad.safetensors")
