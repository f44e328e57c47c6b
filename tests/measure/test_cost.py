import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import BlockCost, Step, VitCost, scoring_of
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_parts import vit_cost
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep

STAGES = (3, 6, 9)


def deit(size) -> VitCost:
    with torch.device("meta"):
        return vit_cost(timm.create_model(f"deit_{size}_patch16_224"), class_rows=1)


@pytest.fixture(scope="module")
def deit_small() -> VitCost:
    return deit("small")


@pytest.mark.parametrize(("size", "gmacs"), [("tiny", 1.254), ("small", 4.599), ("base", 17.564)])
def test_the_dense_macs_of_deit_are_the_published_ones(size, gmacs):
    cost = deit(size)
    steps = cost.steps(Traits("attention", {"tokens"}), STAGES, [196] * 3)
    assert steps == [Step(196, 196)] * 12
    assert cost.macs(steps) / 1e9 == pytest.approx(gmacs, abs=5e-4)


@pytest.mark.parametrize(
    ("site", "counts", "gmacs"),
    [
        ("attention", (176, 158, 142), 3.960),
        ("attention", (137, 96, 67), 2.980),
        ("attention", (98, 49, 24), 2.278),
        ("attention", (49, 12, 3), 1.699),
        ("attention", (177, 160, 144), 3.988),
        ("attention", (138, 97, 68), 2.997),
        ("attention", (98, 49, 25), 2.282),
        ("attention", (49, 13, 4), 1.709),
        ("attention", (178, 162, 147), 4.022),
        ("attention", (99, 51, 27), 2.309),
        ("block", (176, 158, 142), 3.914),
        ("block", (137, 96, 67), 2.878),
        ("block", (98, 49, 24), 2.147),
        ("block", (49, 12, 3), 1.555),
    ],
)
def test_dropping_from_deit_small_costs_what_is_published(deit_small, site, counts, gmacs):
    steps = deit_small.steps(Traits(site, {"tokens"}), STAGES, counts)
    assert deit_small.macs(steps) / 1e9 == pytest.approx(gmacs, abs=6e-4)


def test_steps_name_what_enters_and_leaves_each_block():
    cost = VitCost(16, 1, 1, 0, 0, (BlockCost(0, 0, 0, 0),) * 4)
    mid = cost.steps(Traits("attention", {"tokens"}), (1, 3), (8, 4))
    assert [(s.tokens_in, s.tokens_out) for s in mid] == [(16, 16), (16, 8), (8, 8), (8, 4)]
    assert not any(s.early or s.scoring for s in mid)
    early = cost.steps(Traits("attention", {"class_attention"}), (1, 3), (8, 4))
    assert [(s.early, s.scoring) for s in early] == [(False, ""), (True, "class"), (False, ""), (True, "class")]
    before = cost.steps(Traits("block", {"tokens"}), (1, 3), (8, 4))
    assert [(s.tokens_in, s.tokens_out) for s in before] == [(16, 16), (8, 8), (8, 8), (4, 4)]
    assert cost.steps(Traits("input", {"pixels"}), (0,), (5,)) == [Step(5, 5)] * 4
    assert cost.steps(Traits("attention", {"class_attention"}), (1,), (16,)) == [Step(16, 16)] * 4


@pytest.mark.parametrize(
    ("needs", "source", "scoring"),
    [
        ({"tokens", "keys"}, "class", ""),
        ({"attention"}, "class", "class"),
        ({"attention"}, "received", "received"),
        ({"class_attention"}, "class", "class"),
        ({"received_attention"}, "class", "received"),
        ({"class_attention", "received_attention"}, "class", "received"),
    ],
)
def test_which_attention_has_to_be_computed_follows_from_the_needs(needs, source, scoring):
    assert scoring_of(needs, source) == scoring


def vit(cls=VisionTransformer, **changes):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 5}
    return cls(**(sizes | changes)).requires_grad_(False).eval()


class Gated(Attention):
    """timm's attention with its gate; the block's constructor has no switch for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, gated=True, **kwargs)


MODELS = {
    "plain": lambda: vit(),
    "wide mlp": lambda: vit(mlp_ratio=3),
    "registers": lambda: vit(reg_tokens=4, qk_norm=True, init_values=0.5),
    "distilled": lambda: vit(VisionTransformerDistilled),
    "average pool": lambda: vit(class_token=False, global_pool="avg"),
    "gated": lambda: vit(attn_layer=Gated),
}


def counted(network, inputs, acting):
    """Return the MACs of one image by torch's counter, which counts two for each."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(inputs, acting)
    return counter.get_total_flops() / 2


def first_tokens(view, keep):
    return Keep(torch.arange(keep).expand(view.index.shape[0], keep))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("site", "needs", "rate"),
    [
        ("attention", ("tokens",), 1.0),
        ("input", ("tokens",), 0.5),
        ("block", ("tokens",), 0.5),
        ("attention", (), 0.5),
        ("attention", ("tokens",), 0.5),
        ("attention", ("attention",), 0.5),
        ("attention", ("received_attention",), 0.5),
    ],
)
def test_the_closed_form_is_what_the_counter_counts(scripted, model, site, needs, rate):
    def decide(view, keep):
        for field in needs:
            getattr(view, field)
        return first_tokens(view, keep)

    module = MODELS[model]()
    for block in module.blocks:
        block.attn.fused_attn = False
    network = DeepViT(module)
    actor = Actor(
        scripted(decide, site=site, needs=needs), Budget(keep_rate=rate, blocks=(1, 2)), network.cost, network.grid, 0
    )
    acting = actor.begin(torch.arange(1), 0, None, tokens=16, training=False)
    found = counted(network, torch.rand(1, 3, 32, 32), acting)
    # A class row may be had by a product and a sum, which the counter does not see.
    rows = sum(32 * (network.prefix + s.tokens_in) * network.class_rows for s in acting.steps if s.scoring == "class")
    assert network.cost.macs(acting.steps) - found in (0, rows)
    assert network.cost.macs(acting.steps) == pytest.approx(found, rel=0.005)
    assert acting.steps == actor.planned


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (lambda: vit(global_pool="map"), 32),
        (lambda: vit(global_pool="prr"), 32),
        (lambda: timm.create_model("vit_tiny_r_s16_p8_224", img_size=64).requires_grad_(False).eval(), 64),
    ],
    ids=["attention pool", "residual attention pool", "convolutional stem"],
)
def test_products_outside_blocks_embedding_and_head_are_counted_or_the_model_is_refused(make, side):
    module = make()
    for part in (*(block.attn for block in module.blocks), module.attn_pool):
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    try:
        network = DeepViT(module)
    except UnsupportedError:
        return
    steps = network.cost.dense()
    assert network.cost.macs(steps) == pytest.approx(counted(network, torch.rand(1, 3, side, side), None), rel=0.005)
