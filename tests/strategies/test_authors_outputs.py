"""Methods against outputs of their authors' code, on a network of 12 blocks and 64 patches.

`tests/golden/authors.npz` holds numbers alone: the weights `w/...` of a timm network, four inputs `x`,
and for each setting the logits `y` and the token `counts` of the authors' code in the MLP of each block, with one
class token counted. `wobble`
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


def network(class_token=True):
    """Return the network; without its class token the head reads the size-weighted mean of the patches."""
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 12, "num_heads": 4, "num_classes": 10}
    pool = {} if class_token else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    model = VisionTransformer(**sizes, **pool)
    weights = {name[2:]: torch.from_numpy(value) for name, value in numbers().items() if name.startswith("w/")}
    if not class_token:
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
        del weights["cls_token"]
    model.load_state_dict(weights)
    return DeepViT(model.eval(), mean=0.0, std=1.0)


ALL = {"counts": (64,) * 12}
"""The budget of an adaptive method without a budget: any number of tokens may stay."""
LATER = tuple(range(1, 12))
FALLING = tuple(range(59, 18, -4))
"""Counts of a removal of 4 after each block, and of one more after the first."""
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
    *((f"gtp/golden/Mixed_P4_a0.1_theta{theta}", f"gtp:theta={theta}", {"per_block": 4})
      for theta in ("1.0", "0.95", "0.9", "0.8")),
    ("gtp/golden/Semantic_P4_a0.1_theta1.0", "gtp:graph=semantic", {"per_block": 4}),
    ("gtp/golden/Spatial_P4_a0.1_theta1.0", "gtp:graph=spatial", {"per_block": 4}),
    ("gtp/golden/Mixed_P4_a0.4_theta1.0", "gtp:alpha=0.4", {"per_block": 4}),
    ("gtp/golden/Mixed_P4_a0.1_theta1.0_no_scale", "gtp:proportional=false", {"per_block": 4}),
    ("gtp/golden/None_P4_theta1.0", "gtp:alpha=0", {"per_block": 4}),
    ("mctf/golden/released_r4", "mctf", {"per_block": 4, "blocks": LATER}),
    ("mctf/golden/released_r5", "mctf", {"per_block": 5, "blocks": LATER}),
    ("mctf/golden/released_r6", "mctf", {"counts": (*range(58, 9, -6), 9, 9), "blocks": LATER}),
    ("mctf/golden/released_r4_all_blocks", "mctf", {"per_block": 4}),
    ("mctf/golden/tau_1_2_4_r4", "mctf:tau_information=2,tau_size=4", {"per_block": 4, "blocks": LATER}),
    ("mctf/golden/sim_only_r4", "mctf:tau_information=0,tau_size=0", {"per_block": 4, "blocks": LATER}),
    ("mctf/golden/one_way_r4", "mctf:ways=one", {"per_block": 4, "blocks": LATER}),
    ("mctf/golden/pool_size_r4", "mctf:pooling=size", {"per_block": 4, "blocks": LATER}),
    ("cropr/golden/R4", "cropr", {"counts": FALLING}),
    ("cropr/golden/R4_Q4", "cropr:queries=4", {"counts": FALLING}),
    ("cropr/golden/R4_heads4", "cropr:heads=4", {"counts": FALLING}),
    ("cropr/golden/R4_norm_qk", "cropr:projections=true", {"counts": FALLING}),
    ("cropr/golden/R4_llf", "cropr:returns=-1", {"counts": FALLING[:10]}),
    ("cropr/golden/R5_llf", "cropr:returns=11", {"counts": tuple(range(58, 12, -5))}),
    ("vidtldr/golden/r16_8_8", "vid_tldr", {"counts": (48, 40, 32), "blocks": (0, 1, 2)}),
    ("vidtldr/golden/r16_8_8_at_3_6_9", "vid_tldr", {"counts": (48, 40, 32), "blocks": (3, 6, 9)}),
    ("vidtldr/golden/r4", "vid_tldr", {"per_block": 4}),
    *((f"dtem/golden/r{r}", "dtem", {"per_block": r}) for r in (4, 6, 8)),
]  # fmt: skip
"""The key of the numbers, and the strategy and the budget of the same method."""


@torch.no_grad()
@pytest.mark.parametrize(("key", "words", "budget"), SETTINGS, ids=[key for key, _, _ in SETTINGS])
def test_outputs_and_counts_are_those_of_the_authors(key, words, budget):
    net, inputs = network(class_token=not words.startswith("vid_tldr")), torch.from_numpy(numbers()["x"])
    actor = Actor(made(words), Budget(**budget), net.cost, net.grid, stream=0)
    learn(actor)
    acting = actor.begin(torch.arange(len(inputs)), 0, None, training=False)
    logits = net(inputs, acting).numpy()
    assert_theirs(logits, key)
    counts = np.stack([np.broadcast_to(step.tokens_out, len(inputs)) for step in acting.steps], axis=1)
    np.testing.assert_array_equal(counts + 1, np.broadcast_to(numbers()[f"{key}/counts"], counts.shape))


@torch.no_grad()
def learn(actor):
    """Give the modules of a strategy the weights of the authors' modules."""
    for number, (block, module) in enumerate(sorted(actor.learned.items())):
        if actor.strategy.name == "dtem":
            module.weight.copy_(theirs("dtem/w/metric_weight")[block])
            module.bias.copy_(theirs("dtem/w/metric_bias")[block])
            continue
        module["queries"].weight.copy_(theirs(f"cropr/w/queries_Q{actor.strategy.queries}")[number])
        shared = {"mlp.1": "mlp.fc1", "mlp.3": "mlp.fc2", "head.1": "head.head", "q": "q", "k": "k"}
        for name, weight in module.named_parameters():
            part, _, kind = name.rpartition(".")
            if part in shared:
                weight.copy_(theirs(f"cropr/w/shared/{shared[part]}.{kind}"))


def theirs(key):
    return torch.from_numpy(numbers()[key])


@torch.no_grad()
@pytest.mark.parametrize(
    ("key", "words", "counts"), [("R4_train", "cropr", FALLING), ("R4_llf_train", "cropr:returns=-1", FALLING[:10])]
)
def test_auxiliary_logits_are_those_of_the_authors(key, words, counts):
    net, inputs = network(), torch.from_numpy(numbers()["x"])
    actor = Actor(made(words), Budget(counts=counts), net.cost, net.grid, stream=0)
    learn(actor)
    acting = actor.begin(torch.arange(len(inputs)), 0, None, training=True)
    assert_theirs(net(inputs, acting).numpy(), f"cropr/golden/{key}")
    torch.testing.assert_close(
        torch.stack(list(acting.auxiliary()), dim=1), theirs(f"cropr/golden/{key}/aux"), atol=1e-5, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("block", [0, 5])
def test_a_soft_merge_in_training_is_that_of_the_authors(block):
    net, inputs, key = network(), torch.from_numpy(numbers()["x"]), f"dtem/golden/r8_block{block}_only_train"
    actor = Actor(made("dtem"), Budget(counts=(56,), blocks=(block,)), net.cost, net.grid, stream=0)
    learn(actor)
    acting = actor.begin(torch.arange(len(inputs)), 0, None, training=True)
    assert_theirs(net(inputs, acting).numpy(), key)
    sizes = theirs(f"{key}/sizes")[:, 1:].sort(dim=1).values  # in their order, class token first
    torch.testing.assert_close(acting.sizes.sort(dim=1).values, sizes, atol=2e-5, rtol=0)


def assert_theirs(logits, key):
    """Compare (4, 10) logits with those of the authors' code."""
    expected, wobble = numbers()[f"{key}/y"], numbers()[f"{key}/wobble"]
    assert (np.abs(logits - expected).max(axis=1) <= 1e-5 + 10 * wobble).all()
    assert np.abs(logits - numbers()["dense/y"]).max() > 1e-3
