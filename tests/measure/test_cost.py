from functools import partial

import numpy as np
import pytest
import timm
import torch
from eva_vits import KINDS, unfused
from torch.utils.flop_counter import FlopCounterMode
from vits import ARCHITECTURES, any_tokens, begin, images, vit

from sparsebench.measure.cost import BlockCost, Step, VitCost, mean_step, projections_for
from sparsebench.models.deep import DeepViT, PositionalDeepViT, small_vit
from sparsebench.models.timm_parts import vit_cost
from sparsebench.strategy.base import Traits

STAGES = (3, 6, 9)


def deit(size) -> VitCost:
    with torch.device("meta"):
        return vit_cost(timm.create_model(f"deit_{size}_patch16_224"))


@pytest.mark.parametrize(("size", "gmacs"), [("tiny", 1.254), ("small", 4.599), ("base", 17.564)])
def test_the_dense_macs_of_deit_are_the_published_ones(size, gmacs):
    cost = deit(size)
    steps = cost.steps(Traits("attention", {"tokens"}), STAGES, [196] * 3)
    assert steps == [Step(196, 196)] * 12
    assert cost.macs(steps) / 1e9 == pytest.approx(gmacs, abs=5e-4)


PUBLISHED = {
    "attention": {
        (176, 158, 142): 3.960, (137, 96, 67): 2.980, (98, 49, 24): 2.278, (49, 12, 3): 1.699, (177, 160, 144): 3.988,
        (138, 97, 68): 2.997, (98, 49, 25): 2.282, (49, 13, 4): 1.709, (178, 162, 147): 4.022, (99, 51, 27): 2.309,
    },
    "block": {(176, 158, 142): 3.914, (137, 96, 67): 2.878, (98, 49, 24): 2.147, (49, 12, 3): 1.555},
}  # fmt: skip


@pytest.mark.parametrize("site", PUBLISHED)
def test_dropping_from_deit_small_costs_what_is_published(site):
    cost = deit("small")
    for counts, gmacs in PUBLISHED[site].items():
        steps = cost.steps(Traits(site, {"tokens"}), STAGES, counts)
        assert cost.macs(steps) / 1e9 == pytest.approx(gmacs, abs=6e-4)


@pytest.mark.parametrize(
    ("needs", "class_rows", "scoring", "projected"),
    [
        ({"tokens", "keys"}, 1, "", "k"),
        ({"values", "queries", "keys"}, 1, "", "qkv"),
        ({"attention", "values", "keys"}, 1, "class", "v"),
        ({"attention", "queries"}, 0, "received", ""),
        ({"class_attention"}, 1, "class", ""),
        ({"received_attention"}, 1, "received", ""),
        ({"class_attention", "received_attention"}, 1, "received", ""),
    ],
)
def test_the_computations_for_scores_follow_from_the_needs(needs, class_rows, scoring, projected):
    assert VitCost(8, 1, class_rows, 0, 0, (BlockCost(0, 0, 0, 0),)).scoring(needs) == scoring
    assert projections_for(needs, scoring) == projected


@pytest.mark.parametrize("scoring", ["", "class", "received"])
@pytest.mark.parametrize("early", [True, False])
def test_a_mean_step_costs_the_mean_of_its_images(early, scoring):
    block = BlockCost(qkv=48, proj=16, mlp=128, width=4)
    cost = VitCost(tokens=8, prefix=1, class_rows=1, embed=12, head=8, blocks=(block,))
    keys, out, own_macs = np.array([[8.0, 5.0, 7.0], [3.0, 5.0, 1.0], [2.0, 0.0, 10.0]])
    each = [Step(k, o, early, scoring, own=macs) for k, o, macs in zip(keys, out, own_macs, strict=True)]
    two = Step(keys[:2], out[:2], early, scoring, own=own_macs[:2])
    mean = mean_step([(2, two), (1, each[2])])
    assert cost.macs([mean]) == pytest.approx(np.mean([cost.macs([step]) for step in each]), rel=1e-12)
    assert (mean.tokens_in, mean.tokens_out, mean.own) == (20 / 3, 3, 4)


MODELS = ARCHITECTURES | KINDS | {"wide mlp": partial(vit, mlp_ratio=3)}
SMALL = {"patch": 8, "dim": 32, "depth": 4, "heads": 4}
NETWORKS = {name: lambda make=make: DeepViT(unfused(make())) for name, make in MODELS.items()} | {
    "positional": lambda: PositionalDeepViT(unfused(small_vit(32, 5, attention="positional", **SMALL).eval())),
    "convolutional stem": lambda: DeepViT(unfused(small_vit(32, 5, stem="conv", **SMALL).eval())),
}
PASSES = [
    ("attention", ("tokens",), 1.0),
    ("input", ("tokens",), 0.5),
    ("block", ("tokens",), 0.5),
    ("attention", (), 0.5),
    ("attention", ("tokens",), 0.5),
    ("attention", ("attention",), 0.5),
    ("attention", ("received_attention",), 0.5),
]


def counted(network, acting):
    """Return the MACs of one image from torch's FLOP counter, which counts two for each MAC."""
    network.module.requires_grad_(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images(network, 1), acting)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("name", "site", "needs", "rate"),
    [(name, *one) for name in NETWORKS for one in (PASSES if name in ("plain", "positional") else PASSES[4:6])],
)
def test_the_closed_form_equals_the_counted_macs(scripted, name, site, needs, rate):
    def decide(view, keep):
        for field in needs:
            getattr(view, field)
        return any_tokens(view, keep)

    network = NETWORKS[name]()
    acting = begin(network, scripted(decide, site=site, needs=needs), rate, n=1)
    result = counted(network, acting)
    # The row of class attention is an element-wise product and a sum, which the counter does not count.
    width = network.cost.blocks[0].width * network.class_rows
    rows = sum(width * (network.prefix + step.tokens_in) for step in acting.steps if step.scoring == "class")
    assert network.cost.macs(acting.steps) - result in (0, rows)
    assert network.cost.macs(acting.steps) == pytest.approx(result, rel=0.005)
    assert acting.steps == acting.actor.planned
