"""PatchMerger, SiT, TokenLearner and Sinkhorn against plain loops in float64, and that they learn."""

import math

import pytest
import torch
from merging import dot, gelu, linear, merged, normed, place, rows, softmax, view
from sparsebench_plugins.patch_merger import PatchMerger
from sparsebench_plugins.sinkhorn import Sinkhorn
from sparsebench_plugins.sit import SiT
from sparsebench_plugins.token_learner import TokenLearner

STRATEGIES = [PatchMerger(), SiT(), TokenLearner(hidden=7), Sinkhorn(), Sinkhorn(epsilon=0.1, iterations=7)]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
K, C = 5, 6


def seen_by(strategy, tokens=17):
    """Return a view with a module whose weights are not the initial ones."""
    seen = view(N=tokens, C=C)
    rng = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen.learned = strategy.module(place(tokens, K, C))
    with torch.no_grad():
        for weight in seen.learned.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=rng))
    return seen


def unit(row):
    return [x / math.hypot(*row) for x in row]


def weights_and_values(strategy, x, module):
    """Return (K, N) weights and (N, C) values of one sample's tokens, as lists."""
    if isinstance(strategy, PatchMerger):
        values = [normed(row, module["norm"]) for row in x]
        return [softmax([dot(q, row) for row in values]) for q in rows(module["queries"].weight)], values
    if isinstance(strategy, SiT | TokenLearner):
        norm, first, _, second = module
        scale = float(module.scale.detach()) if isinstance(strategy, SiT) else 1.0
        logits = []
        for row in x:
            z = linear(second, [gelu(a) for a in linear(first, normed(row, norm))])
            logits.append([scale * a for a in z])
        return [softmax(column) for column in zip(*logits, strict=True)], x
    values, centres = [unit(row) for row in x], [unit(row) for row in rows(module.weight)]
    T = [[math.exp(dot(row, c) / strategy.epsilon) for c in centres] for row in values]
    share, u = 1 / (K + len(x)), [1.0] * len(x)
    for _ in range(strategy.iterations):
        v = [share / sum(a * row[k] for a, row in zip(u, T, strict=True)) for k in range(K)]
        u = [share / dot(row, v) for row in T]
    return [[(K + len(x)) * u[i] * T[i][k] * v[k] for i in range(len(x))] for k in range(K)], values


@each
def test_it_is_the_equation(strategy):
    seen = seen_by(strategy)
    plan = strategy.plan(seen, K)
    out = merged(plan, seen)
    for b in range(3):
        weight, values = weights_and_values(strategy, rows(seen.tokens[b]), seen.learned)
        torch.testing.assert_close(plan.weight[b].double(), torch.tensor(weight).double(), atol=1e-5, rtol=1e-5)
        by_hand = [[dot(w, column) for column in zip(*values, strict=True)] for w in weight]
        torch.testing.assert_close(out[b].double(), torch.tensor(by_hand).double(), atol=1e-5, rtol=1e-5)


def test_sinkhorn_takes_the_same_of_each_token():
    """Sinkhorn takes the same of each token and at last gives each centre as much."""
    # With 1 / (K + N) for both, no plan has both marginals: those of the centres are equal, but have another value.
    for iterations, least, most in ((1, 1e-3, 1 / 3), (200, 0, 5e-5)):
        strategy = Sinkhorn(epsilon=0.5, iterations=iterations)
        T = strategy.plan(seen_by(strategy), K).weight.detach()
        assert T.dtype == torch.float32 and bool((T > 0).all())
        torch.testing.assert_close(T.sum(dim=1), torch.ones(3, 17), atol=5e-5, rtol=0)
        assert least <= float((T.sum(dim=2) * K / 17 - 1).abs().max()) < most
