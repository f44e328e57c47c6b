"""Helpers of the tests of merging strategies: views of known tokens, and runs on a small network."""

import math

import torch

from sparsebench.strategy.plans import Place
from sparsebench.strategy.tokens import apply
from sparsebench.strategy.view import TokenView


def view(B=3, N=17, C=6, H=2, *, seed=0, sizes=None, prefix_count=1, block=1, depth=4, grid=None, **given):
    """Return a view of random tokens, keys and attention, which keyword arguments replace."""
    rng = torch.Generator().manual_seed(seed)
    fields = {
        "tokens": torch.randn(B, N, C, generator=rng),
        "keys": torch.randn(B, H, N, C, generator=rng),
        "attention": torch.rand(B, N, generator=rng),
        "received_attention": torch.rand(B, N, generator=rng) + 0.05,
    } | given
    noise = torch.rand(5, B, N, generator=rng)
    B, N = fields["tokens"].shape[:2]
    return TokenView(
        {name: lambda value=value: value for name, value in fields.items()},
        index=torch.arange(N).expand(B, N),
        sizes=torch.randint(1, 4, (B, N), generator=rng).float() if sizes is None else sizes,
        weights=torch.ones(B, N),
        place=place(N, N, 8, block=block, depth=depth, prefix=prefix_count),
        training=False,
        grid=grid,
        random=lambda draw, width: noise[draw],
    )


def place(tokens, keep, width, *, block=1, depth=4, heads=2, prefix=1, patches=None):
    """Return a place in a network of this width; the other sizes do not matter."""
    patches = tokens if patches is None else patches
    return Place(block, depth, tokens, keep, width, heads, width // heads, prefix, patches, 0.0)


def merged(plan, seen):
    """Return the (B, M, C) tokens of the view after the plan."""
    return apply(plan, seen.tokens, seen.sizes)


def cosine(a, b):
    """Return the cosine of two lists of numbers."""
    return dot(a, b) / math.hypot(*a) / math.hypot(*b)


def mean_keys(seen, b):
    """Return N lists, the keys of sample b, mean over heads, in float64."""
    return seen.keys[b].double().mean(dim=0).tolist()


def mean(rows, weights):
    """Return the weighted mean of lists."""
    total = sum(weights)
    return [sum(w * row[c] for w, row in zip(weights, rows, strict=True)) / total for c in range(len(rows[0]))]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def rows(tensor):
    return tensor.detach().double().tolist()


def softmax(logits):
    e = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(e) for x in e]


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def linear(layer, row):
    """Return a linear layer's outputs for one row."""
    return [dot(row, w) + b for w, b in zip(rows(layer.weight), rows(layer.bias), strict=True)]


def normed(row, norm):
    """Return a layer norm's outputs for one row."""
    middle = sum(row) / len(row)
    std = math.sqrt(sum((x - middle) ** 2 for x in row) / len(row) + norm.eps)
    return [(x - middle) / std * w + b for x, w, b in zip(row, rows(norm.weight), rows(norm.bias), strict=True)]
