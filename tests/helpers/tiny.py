"""A small Vision Transformer for tests of strategies, and the results of one of its blocks in float64."""

import copy
import importlib
import tomllib
from pathlib import Path

import numpy as np
import torch
import vits

from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import fill, parse

B, N = 4, 16
ROOT = Path(__file__).resolve().parents[2]
EVERY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sparsebench"]
ENTRIES = {name: module for name, module in EVERY.items() if module.startswith("sparsebench_plugins.")}
SHIPPED = {name: importlib.import_module(module).sparsebench_strategies()[0] for name, module in ENTRIES.items()}


def made(words):
    """Return a shipped strategy from its name and parameters, such as "tome:proportional=false"."""
    spec = parse(words)
    (params,) = spec.combinations()
    return fill(SHIPPED[spec.name], params, spec.name)


def vit(*args, **changes):
    """Return a network of `vits.vit`: 32 x 32 pixels, 4 x 4 patches, weights large enough to attend unevenly."""
    return DeepViT(vits.vit(*args, **changes))


@torch.no_grad()
def act(
    strategy, network, inputs, relevance=None, rate=0.5, items=None, *, training=False, visit=0, done=1.0, **budget
):
    """Return the pass and the outputs of a strategy on a network."""
    actor = Actor(strategy, Budget(keep_rate=rate, **budget), network.cost, network.grid, stream=5)
    items = torch.arange(len(inputs)) if items is None else items
    acting = actor.begin(items, visit, relevance, training=training, done=done)
    return acting, network(inputs, acting)


def images(n=B):
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def chosen(scores, keep):
    """Return the positions of the `keep` largest scores of one sample, in ascending order, by a plain sort."""
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep]
    return sorted(best)


@torch.no_grad()
def inside(network, inputs, number):
    """Return q, k, v, attention A, branch and tokens of one block of the bare model with all tokens, in float64.

    q, k, v are (B, H, T, d), A is (B, H, T, T), class and register tokens first; branch and tokens are (B, T, C).
    """
    model = copy.deepcopy(network.module).double()
    seen = []
    block = model.blocks[number]
    handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model((inputs.double() - 0.5) / 0.5)
    handle.remove()
    H = block.attn.num_heads
    x = seen[0]
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(2, (3, H, -1)).permute(2, 0, 3, 1, 4).numpy()
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    A = np.exp(scores - scores.max(axis=3, keepdims=True))
    A /= A.sum(axis=3, keepdims=True)
    mixed = torch.from_numpy(np.einsum("bhqk,bhkd->bqhd", A, v)).flatten(2)
    branch = block.attn.proj(mixed).numpy()
    return {"q": q, "k": k, "v": v, "A": A, "branch": branch, "tokens": x.numpy() + branch}
