"""DivPrune, farthest points, determinantal choice and vid-TLDR against the loops of their equations."""

import itertools
import math

import pytest
import torch
from merging import cosine, mean, merged, view
from sparsebench_plugins.divprune import DivPrune
from sparsebench_plugins.dpp import DPP
from sparsebench_plugins.farthest_point import FarthestPoint
from sparsebench_plugins.vid_tldr import VidTLDR
from test_bipartite import HALVES

from sparsebench.strategy.tokens import sizes_after

COUNTS = [(17, 16), (17, 9), (17, 3), (16, 1), (1, 1)]
DIVERSE = [DivPrune(), FarthestPoint(), DPP()]


def one_by_one(apart, first, keep):
    """Return a selection that begins with a token and adds the token that is farthest from the selected ones."""
    chosen = [first]
    while len(chosen) < keep:
        rest = [i for i in range(len(apart)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: min(apart[i][j] for j in chosen)))
    return chosen


@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_divprune_takes_the_token_farthest_in_angle(N, keep):
    seen = view(N=N, seed=N + keep)
    index = DivPrune().plan(seen, keep).index
    for b in range(3):
        tokens = seen.tokens[b].double().tolist()
        apart = [[1 - cosine(p, q) for q in tokens] for p in tokens]
        alone = [sorted(d for j, d in enumerate(row) if j != i)[:2] for i, row in enumerate(apart)]
        first = max(range(N), key=lambda i: ([round(d, 12) for d in alone[i]], -i))
        assert index[b].tolist() == one_by_one(apart, first, keep)


@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_farthest_points_begin_with_the_one_farthest_from_the_mean(N, keep):
    seen = view(N=N, seed=N + keep)
    index = FarthestPoint().plan(seen, keep).index
    for b in range(3):
        tokens = seen.tokens[b].double().tolist()
        centre = mean(tokens, [1.0] * N)
        outer = [math.dist(x, centre) for x in tokens]
        apart = [[math.dist(p, q) for q in tokens] for p in tokens]
        assert index[b].tolist() == one_by_one(apart, outer.index(max(outer)), keep)


@pytest.mark.parametrize("ridge", [0.01, 1.0])
@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_dpp_takes_the_token_that_gains_most_volume(N, keep, ridge):
    seen = view(N=N, seed=N + keep)
    index = DPP(ridge=ridge).plan(seen, keep).index
    for b in range(3):
        x = seen.tokens[b].double()
        kernel = x @ x.T
        kernel += ridge * kernel.diagonal().mean() * torch.eye(N)
        chosen: list[int] = []
        while len(chosen) < keep:
            sets = {i: [*chosen, i] for i in range(N) if i not in chosen}
            volumes = {i: torch.linalg.slogdet(kernel[one][:, one]).logabsdet.item() for i, one in sets.items()}
            chosen.append(max(volumes, key=volumes.__getitem__))
        assert index[b].tolist() == chosen


@pytest.mark.parametrize("strategy", DIVERSE, ids=lambda one: one.name)
def test_equal_tokens_are_still_different_ones(strategy):
    for tokens in (torch.ones(1, 12, 6), torch.zeros(1, 12, 6)):
        index = strategy.plan(view(tokens=tokens), 12).index[0]
        assert sorted(index.tolist()) == list(range(12))


def test_more_tokens_stay_than_there_are_channels():
    index = DPP().plan(view(1, 17, 3), 12).index[0]
    assert len(set(index.tolist())) == 12


def saliency(rows):
    """Return the factor of the size of each token that leaves, from (N, N) attention."""
    sharp = [sum(a * math.log(a) for a in row if a > 0) for row in rows]
    low, high = min(sharp), max(sharp)
    scaled = [(s - low) / (high - low) if high > low else 0.0 for s in sharp]
    middle = sum(scaled) / len(scaled)
    above = [max(0.0, s - middle) for s in scaled]
    return [s / max(above) if max(above) else 0.0 for s in above]


@pytest.mark.parametrize(("P", "same"), list(itertools.product([1, 0, 2], [False, True])))
@pytest.mark.parametrize(("N", "keep"), HALVES)
def test_vid_tldr_merges_similar_tokens_less_of_the_background(N, keep, P, same):
    rng = torch.Generator().manual_seed(N)
    queries, keys = torch.randn(2, 3, 2, N, 5, generator=rng)
    queries = queries * (not same)
    seen = view(N=N, seed=N + keep, prefix_count=P, queries=queries, keys=keys)
    plan = VidTLDR().plan(seen, keep)
    x, new_sizes = merged(plan, seen), sizes_after(plan, seen.sizes)
    attention = (queries.double() @ keys.double().mT / 5**0.5).softmax(dim=3).mean(dim=1)
    for b in range(3):
        share = saliency(attention[b].tolist())
        tokens, sizes = seen.tokens[b].double().tolist(), seen.sizes[b].tolist()
        A, B = ([i for i in range(N) if (P + i) % 2 == odd] for odd in (0, 1))
        best = {i: max(B, key=lambda j: cosine(tokens[i], tokens[j])) for i in A}
        leave = sorted(A, key=lambda i: -cosine(tokens[i], tokens[best[i]]))[: N - keep]
        groups = [[i] for i in A if i not in leave] + [[j] + [i for i in leave if best[i] == j] for j in B]
        for row, group in enumerate(groups):
            weights = [sizes[i] * (share[i] if i != group[0] else 1.0) for i in group]
            expected = torch.tensor(mean([tokens[i] for i in group], weights))
            torch.testing.assert_close(x[b, row], expected, atol=1e-5, rtol=1e-5)
            assert float(new_sizes[b, row]) == pytest.approx(sum(weights), rel=1e-4)
