"""Agglomerative clustering, DPC-KNN, K-medoids and the smaller image against the loops of their equations."""

import math

import pytest
import torch
from merging import cosine, mean, mean_keys, merged, view
from sparsebench_plugins.atc import ATC
from sparsebench_plugins.downsample import Downsample
from sparsebench_plugins.dpc_knn import DPCKNN
from sparsebench_plugins.k_medoids import KMedoids

from sparsebench.strategy.tokens import sizes_after

COUNTS = [(17, 16), (17, 9), (17, 3), (16, 1)]


@pytest.mark.parametrize("linkage", ["single", "complete", "average"])
@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_atc_joins_the_closest_clusters_until_enough_are_left(N, keep, linkage):
    seen = view(2, N, seed=N + keep)
    plan = ATC(linkage=linkage).plan(seen, keep)
    x, s = merged(plan, seen), sizes_after(plan, seen.sizes)
    between = {"single": min, "complete": max, "average": lambda d: sum(d) / len(d)}[linkage]
    for b in range(2):
        keys, clusters = mean_keys(seen, b), [[i] for i in range(N)]
        apart = [[1 - cosine(k, l) for l in keys] for k in keys]
        while len(clusters) > keep:
            pairs = [(p, q) for p in range(len(clusters)) for q in range(p)]
            p, q = min(pairs, key=lambda pq: between([apart[i][j] for i in clusters[pq[0]] for j in clusters[pq[1]]]))
            clusters[q] += clusters.pop(p)
        tokens, sizes = seen.tokens[b].double().tolist(), seen.sizes[b].tolist()
        for row, cluster in enumerate(sorted(map(sorted, clusters))):
            expected = mean([tokens[i] for i in cluster], [sizes[i] for i in cluster])
            torch.testing.assert_close(x[b, row], torch.tensor(expected), atol=1e-5, rtol=1e-5)
            assert s[b, row] == sum(sizes[i] for i in cluster)


@pytest.mark.parametrize("linkage", ["single", "complete", "average"])
def test_atc_leaves_exactly_as_many_clusters_where_keys_are_equal(linkage):
    seen = view(1, 12, keys=torch.ones(1, 2, 12, 6))
    targets = [ATC(linkage=linkage).plan(seen, 5).target for _ in range(2)]
    assert sorted(set(targets[0][0].tolist())) == list(range(5)) and torch.equal(*targets)


@pytest.mark.parametrize("k", [5, 2, 40])
@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_dpc_knn_merges_around_the_peaks_of_density(N, keep, k):
    seen = view(N=N, seed=N + keep)
    plan = DPCKNN(neighbours=k).plan(seen, keep)
    x = merged(plan, seen)
    for b in range(3):
        tokens, noise = seen.tokens[b].double().tolist(), seen.random()[b].tolist()
        d = [[math.dist(p, q) / 6**0.5 for q in tokens] for p in tokens]
        nearest = [sorted(row)[:k] for row in d]
        rho = [math.exp(-sum(e * e for e in near) / len(near)) + 1e-6 * noise[i] for i, near in enumerate(nearest)]
        delta = [min([d[i][j] for j in range(N) if rho[j] > rho[i]] or [max(d[i])]) for i in range(N)]
        centres = sorted(sorted(range(N), key=lambda i: -rho[i] * delta[i])[:keep])
        join = [i if i in centres else min(centres, key=lambda c: d[i][c]) for i in range(N)]
        for row, centre in enumerate(centres):
            members = [tokens[i] for i in range(N) if join[i] == centre]
            expected = torch.tensor(mean(members, [1.0] * len(members)))
            torch.testing.assert_close(x[b, row], expected, atol=1e-5, rtol=1e-5)


def test_dpc_knn_tells_equal_tokens_apart_by_its_noise_alone():
    seen = view(1, 12, tokens=torch.ones(1, 12, 6))
    assert sorted(set(DPCKNN().plan(seen, 5).target[0].tolist())) == list(range(5))


@pytest.mark.parametrize("weights", ["attention", "equal"])
@pytest.mark.parametrize("iterations", [0, 1, 5])
@pytest.mark.parametrize(("N", "keep"), COUNTS)
def test_k_medoids_keeps_the_medoids(N, keep, iterations, weights):
    seen = view(N=N, seed=N + keep)
    index = KMedoids(weights=weights, iterations=iterations).plan(seen, keep).index
    for b in range(3):
        tokens = seen.tokens[b].double().tolist()
        w = seen.received_attention[b].tolist() if weights == "attention" else [1.0] * N
        first = w if weights == "attention" else seen.random()[b].tolist()
        medoids = sorted(range(N), key=lambda i: -first[i])[:keep]
        for _ in range(iterations):
            join = [
                i if i in medoids else min(medoids, key=lambda m: math.dist(tokens[i], tokens[m])) for i in range(N)
            ]
            clusters = [[i for i in range(N) if join[i] == m] for m in medoids]
            medoids = [min(c, key=lambda i: sum(w[j] * math.dist(tokens[i], tokens[j]) for j in c)) for c in clusters]
        assert sorted(index[b].tolist()) == sorted(medoids)


def test_k_medoids_of_equal_tokens_are_still_different_ones():
    index = KMedoids().plan(view(2, 12, tokens=torch.ones(2, 12, 6)), 5).index
    assert all(len(set(row)) == 5 for row in index.tolist())


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (3, 5), (1, 7), (6, 2)])
def test_a_smaller_image_is_cut_into_equal_cells(grid):
    """A smaller image has exactly as many cells all of one area that cover it once."""
    N = grid[0] * grid[1]
    seen = view(2, N, grid=grid)
    for keep in range(1, N + 1):
        weight = Downsample().plan(seen, keep).weight
        assert weight.shape == (2, keep, N) and (weight >= 0).all() and torch.equal(weight[0], weight[1])
        torch.testing.assert_close(weight.sum(dim=2), torch.ones(2, keep))
        torch.testing.assert_close(weight.sum(dim=1), torch.full((2, N), keep / N))


def test_a_regular_coarser_grid_is_average_pooling():
    x = torch.randn(2, 5, 14, 14, generator=torch.Generator().manual_seed(0))
    seen = view(2, 196, tokens=x.flatten(2).mT, grid=(14, 14), sizes=torch.ones(2, 196))
    for side in (7, 2, 14, 5):
        # Each patch becomes side x side copies; 14 x 14 copies make a cell.
        small = torch.nn.functional.avg_pool2d(x.repeat_interleave(side, 2).repeat_interleave(side, 3), 14)
        torch.testing.assert_close(merged(Downsample().plan(seen, side * side), seen), small.flatten(2).mT)


def test_cells_are_nearly_square():
    weight = Downsample().plan(view(1, 196, grid=(14, 14)), 98).weight[0].unflatten(1, (14, 14)) > 0
    height, width = weight.any(dim=2).sum(dim=1), weight.any(dim=1).sum(dim=1)
    assert int(height.max()) <= 3 and int(width.max()) <= 3
