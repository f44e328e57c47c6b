from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from running import run_without_board
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from token_sets import Sets
from vits import vit

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.base import Model
from sparsebench.models.deep import DeepViT, small_vit
from sparsebench.models.timm_models import create_vit
from sparsebench.models.vits import Timm, Vit
from sparsebench.records import store
from sparsebench.records.record import Part
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.images import Composite

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

EMPTY = Split(np.zeros((0, 3, 32, 32), np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
DATA = Data(EMPTY, EMPTY, ("a", "b", "c"))


def after(change, make=vit):
    """Return a model after a change."""
    model = make()
    change(model)
    return model


class Backwards(VisionTransformer):
    def forward_features(self, x):
        return self.norm(self.blocks[::-1](self._pos_embed(self.patch_embed(x))))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(vit, Backwards), "the order of its parts is unknown"),
        (partial(after, lambda model: setattr(model, "forward_features", len)), "it overrides `forward_features`"),
        (partial(after, lambda model: setattr(model.blocks[1], "forward", len)), "a block has its own `forward`"),
        (partial(after, lambda model: model.set_grad_checkpointing(True)), "gradient checkpointing is on"),
        (partial(after, lambda model: setattr(model, "rope", torch.nn.Identity())), "rotary position embeddings"),
        (partial(timm.create_model, "resnet18"), "ResNet is not a timm VisionTransformer"),
        (partial(vit, dynamic_img_size=True, dynamic_img_pad=True), "any size"),
        (partial(vit, patch_drop_rate=0.25), "drops patches itself"),
        (partial(timm.create_model, "vit_tiny_r_s16_p8_224", img_size=64), "HybridEmbed"),
        (partial(vit, img_size=36), "patches"),
        (partial(vit, attn_layer="diff"), "DiffAttention"),
        (partial(vit, global_pool="prr"), "pools with"),
        (partial(vit, Eva, dynamic_img_size=True, dynamic_img_pad=True), "any size"),
        (
            partial(vit, Eva, use_rot_pos_emb=True, attn_type="rope", rope_type="mrope", rope_mrope_section=(0, 2, 2)),
            "RotaryEmbeddingMRope",
        ),
        (partial(after, lambda m: setattr(m.blocks[1].attn, "gate", torch.nn.ReLU()), partial(vit, Eva)), "a gate"),
    ],
)
def test_a_model_in_which_dropping_goes_wrong_is_refused_with_the_reason(make, reason):
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedError, match=reason):
        DeepViT(model)


def test_a_model_is_made_by_name_and_a_wrong_name_gets_a_hint():
    model = create_vit("deit_tiny_patch16_224", 64, 3)
    assert DeepViT(model).grid == (4, 4) and model.num_classes == 3
    with pytest.raises(UserError, match="did you mean 'vit_tiny_patch16_224'"):
        create_vit("vit_tiny_patch16_225", 64, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer is not a timm"),
        ("samvit_base_patch16_224", "VisionTransformerSAM is not a timm"),
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
        ("vit_pe_core_tiny_patch16_384", 384, 576),
    ],
)
def test_supported_architectures_are_taken(name, canvas, tokens):
    """Models with rotary positions attention pools and any size are taken."""
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


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Timm(pretrained=True, weights="weights-0123456789ab").check(Composite()), "leave out --pretrained or"),
        (lambda: Timm(arch="local-dir:mine", pretrained=True).check(Composite()), "give --weights DIR/model.safetens"),
        (lambda: create_vit("vit_base_patch16_gap_224", 32, 2, pretrained=True),
         r"no trained weights for 'vit_base_patch16_gap_224'; .*--weights"),
        (lambda: Vit().cost(Sets(), 2), "has no canvas"),
        (lambda: Vit(stem="conv", patch=6, dim=36, heads=2).check(Composite(canvas=24, foreground=12)), "divides dim"),
        (lambda: Vit(stem="conv", dim=30, heads=2).check(Composite(canvas=24, foreground=12)), "that divides dim"),
        (lambda: Vit(stem="conv", patch=1).check(Composite(canvas=24, foreground=12)), "that divides dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_a_user_error(made, message):
    with pytest.raises(UserError, match=message):
        made()


@pytest.mark.parametrize(
    ("canvas", "classes", "sizes"),
    [
        (32, 10, {"dim": 64, "depth": 3, "heads": 4, "patch": 4}),
        (24, 2, {"dim": 12, "depth": 1, "heads": 3, "patch": 8}),
        (56, 100, {"dim": 96, "depth": 5, "heads": 2, "patch": 7}),
        (32, 7, {"dim": 16, "depth": 2, "heads": 2, "patch": 16, "attention": "positional"}),
        (64, 10, {"dim": 96, "depth": 3, "heads": 3, "patch": 8, "stem": "conv"}),
    ],
)
def test_a_small_vit_costs_what_it_says(canvas: int, classes: int, sizes: dict[str, Any]) -> None:
    with torch.device("meta"):
        built = DeepViT(small_vit(canvas, classes, **sizes)).cost
    assert Vit(**sizes).cost(Composite(canvas=canvas, foreground=8), classes) == built


SIZES = {"dim": 32, "depth": 3, "heads": 2, "patch": 8}
TASK = Composite(canvas=32, foreground=16, test=8)


def network_of(model: Model):
    network = model.build(TASK.draw(8, 0, {}), 0)
    network.module.eval()
    return network


def test_a_token_sees_less_than_one_patch_beyond_its_own() -> None:
    network = network_of(Vit(**SIZES, stem="conv"))
    images = torch.rand(1, 3, 32, 32, requires_grad=True)
    network.module.patch_embed(images)[0, 10].sum().backward()  # row 2, column 2 of the patches of 8 pixels
    rows = torch.nonzero(images.grad.abs().sum(dim=(0, 1, 3))).flatten()
    assert (rows.min(), rows.max()) == (9, 23)  # 15 pixels, of which 8 are in its patch


def test_a_network_that_is_loaded_is_the_one_that_was_trained(tmp_path) -> None:
    """Running statistics must be loaded too; otherwise test results would differ."""
    run_without_board(
        "attn_topk", tasks="composite:canvas=32,foreground=16,test=20,epochs=1,pretrain_epochs=0,batch=8",
        model="vit:dim=32,depth=3,heads=2,patch=8,stem=conv", n_train=[16], seeds=1, out=tmp_path, where="test",
        macs=[1.0, 0.5],
    )  # fmt: skip
    records = {(r.label, r.cell.budget.macs): r for r in store.read(tmp_path).values()}
    assert {r.status for r in records.values()} == {"ok"}, [r.failure for r in records.values()]
    dense, whole, half = (records[key] for key in (("dense", 1.0), ("attn_topk", 1.0), ("attn_topk", 0.5)))
    assert whole.metrics["test_loss"] == dense.metrics["test_loss"]
    assert half.metrics["macs_ratio"].value < 0.7 and half.metrics["test_loss"] != dense.metrics["test_loss"]


def test_random_weights_do_not_depend_on_precision_or_stem():
    """Precision the source of weights and a linear stem do not change the random weights."""
    small, tiny = partial(Vit, **SIZES), partial(Timm, arch="deit_tiny_patch16_224")
    others = small(stem="linear"), tiny(precision="bfloat16", weights="weights-0123456789ab")
    pairs = [[network_of(model) for model in pair] for pair in zip((small(), tiny()), others, strict=True)]
    for one, other in pairs:
        again = other.module.state_dict()
        assert all(torch.equal(value, again[name]) for name, value in one.module.state_dict().items())
    assert "stem" not in Part.of(Vit()).params and Part.of(Vit(stem="conv")).params["stem"] == "conv"
