from functools import partial

import numpy as np
import pytest
import timm
import torch
from vits import vit

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_models import named_vit
from sparsebench.models.vits import Timm
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.images import Composite

EMPTY = Split(np.zeros((0, 3, 32, 32), np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
DATA = Data(EMPTY, EMPTY, ("a", "b", "c"))


def with_rope():
    model = vit()
    model.rope = torch.nn.Identity()
    return model


def with_checkpointing():
    model = vit()
    model.set_grad_checkpointing(True)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_checkpointing, "gradient checkpointing is on"),
        (with_rope, "rotary position embeddings"),
        (partial(timm.create_model, "resnet18"), "ResNet is no timm VisionTransformer"),
        (partial(vit, dynamic_img_size=True, dynamic_img_pad=True), "pixels are of any size"),
        (partial(vit, patch_drop_rate=0.25), "drops patches on its own"),
        (partial(timm.create_model, "vit_tiny_r_s16_p8_224", img_size=64), "patches"),
        (partial(vit, img_size=36), "patches"),
        (partial(vit, attn_layer="diff"), "DiffAttention"),
    ],
    ids=["checkpointing", "rope", "resnet", "padding", "patch dropout", "stem", "pixels left over", "diff"],
)
def test_a_model_in_which_dropping_goes_wrong_is_refused_with_the_reason(make, reason):
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedError, match=reason):
        DeepViT(model)


def test_a_model_is_made_by_name_and_a_wrong_name_gets_a_hint():
    model = named_vit("deit_tiny_patch16_224", 64, 3)
    assert DeepViT(model).grid == (4, 4) and model.num_classes == 3
    with pytest.raises(UserError, match="did you mean 'vit_tiny_patch16_224'"):
        named_vit("vit_tiny_patch16_225", 64, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "relative positions"),
        ("convnext_tiny", "ConvNeXt is no timm VisionTransformer"),
        ("naflexvit_base_patch16_gap", "NaFlexVit is no timm VisionTransformer or Eva: it takes patches of any number"),
        ("vit_tiny_r_s16_p8_224", "patches are made by HybridEmbed"),
        ("vit_base_patch16_18x2_224", "ParallelThingsBlock"),
        ("deit_tiny_patch16_224.nowhere", "Invalid pretrained tag"),
    ],
)
def test_a_name_that_cannot_be_acted_on_is_refused_before_anything_runs(name, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        Timm(arch=name).check(Composite(canvas=224))
    assert name in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "canvas", "tokens"),
    [
        ("eva02_tiny_patch14_224", 224, 256),
        ("vit_small_patch16_dinov3", 256, 256),
        ("vit_base_patch16_siglip_224", 224, 196),
        ("vit_pe_core_tiny_patch16_384", 384, 576),
        ("vit_base_patch16_rope_mixed_224", 224, 196),
    ],
)
def test_models_with_rotary_positions_attention_pools_and_any_size_are_taken(name, canvas, tokens):
    assert Timm(arch=name).cost(Composite(canvas=canvas), 10).tokens == tokens


def test_pixels_are_normalised_as_timm_has_it_for_the_model():
    images = torch.rand(2, 3, 32, 32)
    for arch, mean, std in [
        ("deit_tiny_patch16_224", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("vit_tiny_patch16_224", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ]:
        network = Timm(arch=arch).build(DATA, 0)
        network.module.eval()
        mean, std = (torch.tensor(x)[:, None, None] for x in (mean, std))
        with torch.no_grad():
            assert torch.equal(network(images), network.module((images - mean) / std))


def test_precision_and_the_source_of_weights_do_not_change_the_random_ones():
    first = Timm(arch="deit_tiny_patch16_224").build(DATA, 0).module.state_dict()
    again = Timm(arch="deit_tiny_patch16_224", precision="bfloat16", weights="weights-0123456789ab").build(DATA, 0)
    assert all(torch.equal(first[name], value) for name, value in again.module.state_dict().items())


def test_timm_s_weights_or_a_file_s_but_not_both():
    with pytest.raises(UserError, match="leave --pretrained or --weights out"):
        Timm(pretrained=True, weights="weights-0123456789ab").check(Composite())


def test_a_model_without_trained_weights_cannot_be_fetched():
    with pytest.raises(UserError, match=r"no trained weights for 'vit_base_patch16_gap_224'; .*--weights"):
        named_vit("vit_base_patch16_gap_224", 32, 2, pretrained=True)
