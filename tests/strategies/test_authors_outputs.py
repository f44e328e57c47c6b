"""Methods against outputs of their authors' code, on a network of 12 blocks and 64 patches.

`tests/golden/authors.npz` holds numbers alone: the weights `w/...` of a timm network, four inputs `x`,
and for each setting the logits `y` and the token `counts` of the authors' code, with the class token counted. `wobble`
is how far these logits move if the input is multiplied by 1 + 1e-6 N(0, 1).
"""

from functools import cache

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from tiny import ROOT, made

from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.budget import Budget


@cache
def numbers():
    with np.load(ROOT / "tests/golden/authors.npz") as file:
        return dict(file)


def network():
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 12, "num_heads": 4, "num_classes": 10}
    model = VisionTransformer(**sizes)
    weights = {name[2:]: torch.from_numpy(value) for name, value in numbers().items() if name.startswith("w/")}
    model.load_state_dict(weights)
    return DeepViT(model.eval(), mean=0.0, std=1.0)


ALL = {"counts": (64,) * 12}
"""The budget of an adaptive method without a budget: any number of tokens may stay."""
SETTINGS = [
    ("saint/golden/t0.75", "saint", ALL),
    ("saint/golden/t0.7", "saint:threshold=0.7", ALL),
    ("saint/golden/t0.5", "saint:threshold=0.5", ALL),
    ("saint/golden/t0.3", "saint:threshold=0.3", ALL),
    ("saint/golden/t0.5_K2_g3", "saint:threshold=0.5,K=2,closeness=3", ALL),
    ("saint/golden/t0.5_K1_g10", "saint:threshold=0.5,K=1", ALL),
    ("saint/golden/t0.5_all_blocks", "saint:threshold=0.5,until=1", ALL),
    ("tomecis/golden/r4", "tome_cis", {"per_block": 4}),
    ("tomecis/golden/r5", "tome_cis", {"per_block": 5}),
    ("tomecis/golden/r6", "tome_cis", {"per_block": 6}),
    ("tomecis/golden/r4_no_prop", "tome_cis:proportional=false", {"per_block": 4}),
    ("tomecis/golden/rlist", "tome_cis", {"counts": (48, 48, 48, *[40] * 3, *[36] * 6)}),
]


@torch.no_grad()
@pytest.mark.parametrize(("key", "words", "budget"), SETTINGS, ids=[key for key, _, _ in SETTINGS])
def test_outputs_and_counts_are_those_of_the_authors(key, words, budget):
    net, inputs = network(), torch.from_numpy(numbers()["x"])
    actor = Actor(made(words), Budget(**budget), net.cost, net.grid, stream=0)
    acting = actor.begin(torch.arange(len(inputs)), 0, None, training=False)
    logits = net(inputs, acting).numpy()
    assert_theirs(logits, key)
    counts = np.stack([np.broadcast_to(step.tokens_out, len(inputs)) for step in acting.steps], axis=1)
    np.testing.assert_array_equal(counts + 1, np.broadcast_to(numbers()[f"{key}/counts"], counts.shape))


def assert_theirs(logits, key):
    """Compare (4, 10) logits with those of the authors' code."""
    theirs, wobble = numbers()[f"{key}/y"], numbers()[f"{key}/wobble"]
    assert (np.abs(logits - theirs).max(axis=1) <= 1e-5 + 10 * wobble).all()
    assert np.abs(logits - numbers()["dense/y"]).max() > 1e-3
