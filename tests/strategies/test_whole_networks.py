"""Strategies in whole networks: logits, order and counts against loops in float64 over the whole sequence."""

from functools import partial

import networks as hand
import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from tiny import images, made, vit

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget

NETWORKS = {
    "no class token": (0, {"class_token": False, "global_pool": "avg"}),
    "class token": (1, {}),
    "distilled": (2, {"cls": VisionTransformerDistilled}),
}


@pytest.mark.parametrize("words", ["tome", "tome:proportional=false", "tofu", "tofu:length=paper,proportional=true"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bipartite_matching_is_that_of_the_whole_sequence(name, words, r=3):
    strategy, (prefix, changes) = made(words), NETWORKS[name]
    act = partial(hand.tofu, length=strategy.length) if strategy.name == "tofu" else hand.tome
    rule = hand.at({block: 16 - r * (block + 1) for block in range(4)}, act)
    how = {"prefix": prefix, "proportional": strategy.proportional}
    acting = hand.compare(strategy, vit(**changes), rule, {"per_block": r}, **how)
    assert [step.tokens_out for step in acting.steps] == [16 - r, 16 - 2 * r, 16 - 3 * r, 16 - 4 * r]


CEIL = {"keep_rate": 0.7, "convention": "compound-ceil"}


@pytest.mark.parametrize(
    ("name", "rule", "budget", "how"),
    [
        # ceil(.7 * 16) = 12, and with a fused token ceil(.7 * 13) = 10, ceil(.7 * 11) = 8.
        ("attn_topk", hand.at({1: 12, 2: 9, 3: 7}, hand.top_k), CEIL, {}),
        ("evit", hand.at({1: 12, 2: 10, 3: 8}, hand.evit), CEIL, {}),
        # One token alone is fused in the first stage, and in the others: ceil(.9 * 16) + 1 = 16.
        ("evit", hand.at({1: 15, 2: 15, 3: 15}, hand.evit), CEIL | {"keep_rate": 0.9}, {}),
        ("tps", hand.at({1: 12, 2: 9, 3: 7}, hand.tps), CEIL, {}),
        ("patch_merger", hand.patch_merger, {"keep_rate": 0.7}, {"site": "block"}),
    ],
)
def test_logits_order_and_counts_are_those_of_loops(name, rule, budget, how):
    """One strategy of each way to act; what every other strategy chooses is compared with loops in its own tests."""
    hand.compare(made(name), vit(), rule, budget, **how)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("attn_topk", hand.at({1: 12, 2: 9, 3: 7}, hand.top_k)),
        ("evit", hand.at({1: 12, 2: 10, 3: 8}, hand.evit)),
        ("tps", hand.at({1: 12, 2: 9, 3: 7}, hand.tps)),
    ],
)
def test_gradients_are_those_of_loops(name, rule):
    """The slope of a logit in a direction of all weights, by automatic differentiation and by the loops' difference."""
    network, image = vit(), images(1)
    network.module.double()
    actor = Actor(made(name), Budget(**CEIL), network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(1), 0, None, training=False)
    network(image.double(), acting)[0, 0].backward()
    rng = torch.Generator().manual_seed(2)
    along = {name: torch.randn(p.shape, generator=rng).double() for name, p in network.module.named_parameters()}
    slope = sum(float((p.grad * along[name]).sum()) for name, p in network.module.named_parameters())
    there = {name: p.detach().clone() for name, p in network.module.named_parameters()}
    logits = []
    for step in (1e-6, -1e-6):
        network.module.load_state_dict({name: there[name] + step * along[name] for name in there}, strict=False)
        logits.append(float(hand.by_hand(network, image[0], rule)[0][0]))
    assert abs(slope) > 0.1 and slope == pytest.approx((logits[0] - logits[1]) / 2e-6, rel=1e-5)
