"""The own MACs of strategies against torch's counter of floating-point operations around their plans."""

import numpy as np
import pytest
import torch
from sparsebench_theory.overfitting.network import TwoLayerViT
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from tiny import B, N, act, images, made, vit
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Mix
from sparsebench.strategy.tokens import apply
from sparsebench.training.evaluation import StandIn


class Watched(StandIn):
    """Adds to `macs_seen` the counted MACs per image of each plan, including the application of a Mix."""

    def __init__(self, strategy, macs_seen):
        super().__init__(strategy)
        self.macs_seen = macs_seen

    def plan(self, view, keep):
        for field in self.strategy.reads():
            getattr(view, field)
        with FlopCounterMode(display=False) as counter:
            plan = self.strategy.plan(view, keep)
            if isinstance(plan, Mix):
                apply(plan, view.tokens, view.sizes)
        self.macs_seen.append(counter.get_total_flops() / 2 / len(view.index))
        return plan


def counted(strategy, network, inputs, rate, **budget):
    """Return the own MACs of the choices, and the counted MACs, without zeros."""
    macs_seen: list[float] = []
    acting, _ = act(Watched(strategy, macs_seen), network, inputs, rate=rate, **budget)
    assert acting.steps == acting.actor.planned
    return [step.own for step in acting.steps if step.own], [macs for macs in macs_seen if macs]


COUNTED = (
    "tome", "tome_cis", "tofu", "pitome", "mctf", "atc", "diffrate", "diffrate:merged=1.0", "zero_tprune:iterations=7+3+2", "tps",
    "dynamic_vit", "dynamic_vit:disposal=squeeze", "value_norm:disposal=merge", "divprune", "dpp", "vid_tldr", "ppt",
    "ppt:threshold=0.0", "perturbation:draws=2", "vision_zip:contextual=0.3", "vis_pruner:step=2", "pru_merge",
    "patch_merger", "sit", "token_learner:hidden=7", "sinkhorn:epsilon=0.1,iterations=7", "tnt",
)  # fmt: skip
FEW_LEAVE = ("tome", "mctf", "diffrate", "ppt", "tps", "sinkhorn")
"""One strategy of each kind, for a budget that removes one of 16 tokens."""


@pytest.mark.parametrize(
    ("words", "rate", "prefix"),
    [*((words, 0.6, {"reg_tokens": 3}) for words in COUNTED), *((name, 15 / 16, {}) for name in FEW_LEAVE)],
)
def test_own_macs_are_what_the_counter_counts(words, rate, prefix):
    strategy, network = made(words), vit(**prefix)
    for block in network.module.blocks:
        block.attn.fused_attn = False  # the counter does not count it on a CPU
    own, macs_seen = counted(strategy, network, images(1), rate)
    assert own == macs_seen and (own or strategy.name == "diffrate")  # diffrate merges half of one token, that is none


@pytest.mark.theory
@pytest.mark.parametrize("words", ["tofu:merge_from=1.0", "zero_tprune:iterations=7+3+2"])
def test_keys_of_theory_models_have_their_own_width(words):
    rng = np.random.default_rng(0)
    sizes = {"m": 5, "first": FirstWeights(0.1, 0.2, 0.1), "heads": 3}
    shallow, two_layer = ShallowViT(rng, np.eye(8)[:, :4], 11, **sizes), TwoLayerViT(rng, 11, 8, d_h=6, d_v=5, shrink=1)
    for network in (shallow, two_layer):
        try:
            own, macs_seen = counted(made(words), network, torch.rand(B, 11, 8), 0.6)
        except UnsupportedError:
            assert network is two_layer
        else:
            assert own and own == macs_seen


def test_distances_cost_a_multiplication_a_channel():
    """The counter does not count distances."""
    for words, macs in (
        ("dpc_knn", N * N * 32),
        ("farthest_point", N * N * 32),
        ("k_medoids:iterations=3", N * N * 32 + 3 * N * N),
        ("k_medoids:iterations=0,weights=equal", N * N * 32),
    ):
        own, macs_seen = counted(made(words), vit(), images(), 0.5, blocks=(1,))
        assert own == [macs] and not macs_seen


@pytest.mark.parametrize("macs", [0.9, 0.5, 0.3])
def test_where_they_cost_more_than_is_saved_a_fraction_is_of_the_rest(macs):
    network = vit()
    dense = network.cost.macs(network.cost.dense())
    actor = Actor(made("perturbation"), Budget(macs=macs), network.cost, network.grid, stream=5)
    bare = Actor(made("patch_variance"), Budget(macs=macs), network.cost, network.grid, stream=5)
    assert 1 < actor.keep[0] == bare.keep[0] < N
    assert network.cost.macs(actor.planned) / dense == pytest.approx(macs, abs=0.04)
    acting = actor.begin(torch.arange(B), 0, None, training=False)
    network(images(), acting)
    asked = (N + 1) * (dense - network.cost.embed * N)
    assert network.cost.macs(acting.steps) == network.cost.macs(actor.planned) + asked
