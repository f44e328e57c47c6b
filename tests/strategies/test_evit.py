"""EViT against loops over its equations in float64: fused tokens, single fused tokens, the keep rate in training."""

import math

import numpy as np
import pytest
import torch
from merging import view
from sparsebench_plugins.evit import EViT
from tiny import B, N, act, images, vit

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.tokens import apply
from sparsebench.testing.networks import build
from sparsebench.training.steps import Autograd, Samples


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("keep", [17, 9, 2])
def test_what_does_not_stay_is_summed_with_its_attention(keep, renormalise):
    seen = view(N=17, seed=keep)
    plan = EViT(renormalise=renormalise).plan(seen, keep)
    out = apply(plan, seen.tokens, seen.sizes)
    for b in range(3):
        a, x = seen.attention[b].double().tolist(), seen.tokens[b].double().tolist()
        ranked = sorted(range(17), key=lambda i: -a[i])
        kept, left = ranked[: keep - 1], ranked[keep - 1 :]
        total = sum(a[i] for i in left) if renormalise else 1.0
        fused = [sum(a[i] * x[i][c] for i in left) / total for c in range(6)]
        torch.testing.assert_close(out[b, -1].double(), torch.tensor(fused).double(), atol=1e-5, rtol=1e-5)
        assert plan.index[b].tolist() == kept


STAGE = {"convention": "compound-ceil", "blocks": (1,)}


@pytest.mark.parametrize(("rate", "acts"), [(1.0, False), (0.99, False), (0.94, False), (0.9375, True), (0.9, True)])
def test_a_stage_in_which_nothing_is_fused_is_the_dense_block(rate, acts):
    network = vit()
    acting, out = act(EViT(), network, images(), rate=rate, **STAGE)
    assert acting.actor.acts == bool(acting.decisions) == acts
    with torch.no_grad():
        assert torch.equal(out, network(images())) != acts


@pytest.mark.parametrize("done", [0.0, 0.03, 0.1, 0.2, 0.3666, 0.37, 0.9])
def test_the_keep_rate_falls_by_a_cosine(done):
    """In training the keep rate falls by a cosine from epoch 10 to 110 of 300."""
    network, epoch = vit(), 300 * done
    rate = 1.0 if epoch < 10 else 0.5 if epoch >= 110 else 0.5 + 0.25 * (1 + math.cos(math.pi * (epoch - 10) / 100))
    kept = math.ceil(rate * N)
    count = min(N, kept + 1)
    for training in (True, False):
        acting, _ = act(EViT(), network, images(), training=training, done=done, **STAGE)
        assert acting.index.shape == (B, count if training else 9)
    assert [step.tokens_out for step in acting.actor.planned] == [N, 9, 9, 9]


def test_a_training_begins_dense_and_ends_with_the_budgets_tokens():
    case, counts = build("class token"), []

    class Noted(EViT):
        def plan(self, view, keep):
            counts.append(keep)
            return super().plan(view, keep)

    actor = Actor(Noted(), Budget(keep_rate=0.5, **STAGE), case.network.cost, case.network.grid, stream=5)
    steps = Autograd(case.network, actor, Samples(case.inputs, case.labels, None), case.recipe)
    for visit, done in enumerate((0.0, 0.15, 0.2, 0.3, 0.9)):
        steps.step(np.arange(4), visit, done)
    assert len(counts) == 4 and counts == sorted(counts, reverse=True) and len(set(counts)) == 4
    assert counts[-1] == math.ceil(0.5 * case.network.cost.tokens) + 1
