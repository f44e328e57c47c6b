"""Sensitivity to noise on one token, and the view's `outputs`, against the bare networks in float64."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from sparsebench_plugins.perturbation import Perturbation
from sparsebench_theory.models import Positional, Shallow, TwoLayer
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.spatial.task import Spatial
from timm.models.deit import VisionTransformerDistilled
from tiny import B, N, images, vit

from sparsebench.models.actor import Actor
from sparsebench.models.deep import PositionalDeepViT, small_vit
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep

DEEP = {
    "class token": vit,
    "registers and a norm before": partial(vit, reg_tokens=4, pre_norm=True),
    "distilled": partial(vit, VisionTransformerDistilled),
    "average pool": partial(vit, class_token=False, global_pool="avg"),
    "positional": lambda: PositionalDeepViT(
        small_vit(32, 5, attention="positional", patch=8, dim=32, depth=2, heads=2)
    ),
}


def begin(strategy, network, n=B, training=False, **budget):
    actor = Actor(strategy, Budget(**(budget or {"keep_rate": 0.5})), network.cost, network.grid, stream=5)
    return actor.begin(torch.arange(n), 0, None, training=training)


def seen(strategy, network, inputs, need=None):
    """Return the pass of a strategy, and the uniform numbers and tokens of its views."""
    shown = []

    class Watched(Perturbation):
        def scores(self, view):
            C = view.tokens.shape[2]
            shown.extend([view.tokens, [view.random(draw, C) for draw in range(2 * self.draws)]])
            return super().scores(view)

    acting = begin(Watched(**strategy.model_dump()), network, len(inputs))
    with torch.no_grad():
        network(inputs, acting)
    return acting, *shown


def deep_by_hand(network, inputs):
    """Return a function from patch tokens to the logits of the bare modules, in float64."""
    model = copy.deepcopy(network.module).double().eval()
    embedded = model._pos_embed(model.patch_embed((inputs.double() - 0.5) / 0.5))

    def answer(b, tokens):
        x = torch.cat([embedded[b, : network.prefix], tokens])[None]
        x = model.norm_pre(x)
        for block in model.blocks:
            x = x + block.ls1(block.attn(block.norm1(x)))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return model.forward_head(model.norm(x))[0]

    return answer


def theory_by_hand(network, inputs):
    model = copy.deepcopy(network).double()
    return lambda b, tokens: model(tokens[None]).reshape(-1)


def sensitivities(answer, tokens, uniform, strategy):
    """Return (B, N) means of ||f(x + e_j) - f(x)||, one sample, token and draw at a time."""
    out = torch.zeros(tokens.shape[:2], dtype=torch.float64)
    for b, x in enumerate(tokens.double()):
        scale = strategy.sigma * np.sqrt(np.mean(x.numpy() ** 2))
        for draw in range(strategy.draws):
            u, v = (uniform[2 * draw + i][b].double().numpy() for i in (0, 1))
            noise = torch.from_numpy(scale * np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v))
            for j in range(len(x)):
                moved = x.clone()
                moved[j] += noise[j]
                out[b, j] += float((answer(b, moved) - answer(b, x)).norm()) / strategy.draws
    return out


@pytest.mark.parametrize("make", DEEP.values(), ids=DEEP)
@torch.no_grad()
def test_it_keeps_the_tokens_to_which_the_logits_are_most_sensitive(make):
    network, strategy = make(), Perturbation(draws=2, sigma=0.5)
    acting, tokens, uniform = seen(strategy, network, images(2))
    expected = sensitivities(deep_by_hand(network, images(2)), tokens, uniform, strategy)
    torch.testing.assert_close(acting.scores.double(), expected, rtol=2e-3, atol=1e-5)
    assert torch.equal(acting.index, expected.argsort(dim=1, descending=True)[:, : N // 2].sort(dim=1).values)


THEORY = {
    "shallow": (Shallow(m=8), Theory(tokens=12, d=16, relevant=0.4, confusion=0.1)),
    "four classes, heads, skip": (
        Shallow(m=8, heads=2, skip=True),
        Theory(tokens=12, d=16, relevant=0.4, confusion=0.1, classes=4),
    ),
    "two layers": (TwoLayer(d_h=6, d_v=5, shrink=1), Overfitting(tokens=5, d=20, signal=12, test=10)),
    "positional": (Positional(first=0.3), Spatial(d=10, test=10)),
}


@pytest.mark.theory
@pytest.mark.parametrize(("model", "task"), THEORY.values(), ids=THEORY)
@torch.no_grad()
def test_it_acts_on_the_theory_models(model, task):
    data = task.draw(3, 0, {})
    network, inputs = model.build(data, 0), torch.from_numpy(data.train.inputs)
    strategy = Perturbation(sigma=0.5)
    acting, tokens, uniform = seen(strategy, network, inputs)
    expected = sensitivities(theory_by_hand(network, inputs), tokens, uniform, strategy)
    torch.testing.assert_close(acting.scores.double(), expected, rtol=5e-3, atol=1e-6)
    assert float(expected.std(dim=1).min()) > 0 and network.cost.macs(acting.steps) > network.cost.macs(
        network.cost.dense()
    )


def asked(decide, network, inputs, scripted, training=False):
    """Return the result of `decide` for the view in the middle of a pass through the network."""
    results = []

    def plan(view, keep):
        results.append(decide(view))
        return Keep(torch.arange(keep).expand(len(view.index), keep))

    network(inputs, begin(scripted(plan, needs=("tokens", "outputs")), network, len(inputs), training))
    return results[0]


@pytest.mark.parametrize("make", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_of_unchanged_tokens_are_the_bare_network(scripted, make, training):
    """Outputs of the tokens as they are is the bare network as in a test."""
    network = make()
    with torch.no_grad():
        expected = network(images())
    module = network.module
    module.train(training)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout) and part is not module.pos_drop:
            part.p = 0.5
    modes, random = [part.training for part in module.modules()], torch.random.get_rng_state()
    logits = asked(lambda v: [v.outputs(v.tokens, torch.arange(B)), torch.random.get_rng_state()], network, images(),
                   scripted, training)  # fmt: skip
    assert not logits[0].requires_grad
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    assert [part.training for part in module.modules()] == modes
    assert training or torch.equal(logits[1], random)
    assert not any({"forward", "pool"} & set(vars(part)) for part in module.modules())


@torch.no_grad()
def test_at_most_a_batch_of_rows_goes_through_at_once(scripted):
    """Rows may be of any samples and no more than the batch go through at once."""
    network, sample = vit(), torch.tensor([3, 0, 0, 2, 1, 3, 3])
    # Each sample gets its own prefix, because prefixes of equal samples are equal.
    network.module.patch_drop.register_forward_hook(
        lambda _m, _a, x: torch.cat([x[:, :1] + torch.arange(len(x))[:, None, None], x[:, 1:]], dim=1)
    )
    together = asked(lambda v: v.outputs(v.tokens, torch.arange(B)), network, images(), scripted)
    sizes = []
    network.module.blocks[1].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    logits = asked(lambda v: v.outputs(v.tokens[sample], sample), network, images(), scripted)
    torch.testing.assert_close(logits, together[sample], atol=1e-5, rtol=1e-5)
    assert sizes == [4, 3, 4]  # the last is the pass itself
    assert asked(lambda v: v.outputs(v.tokens[:0], sample[:0]), network, images(), scripted).shape == (0, 5)
