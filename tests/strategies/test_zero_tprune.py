"""Zero-TPrune against plain loops in float64."""

import math

import numpy as np
import pytest
from sparsebench_plugins.zero_tprune import ZeroTPrune
from tiny import B, N, act, chosen, images, inside, vit

ITERATIONS = (30, 5, 5, 1)  # of the four blocks


def ranks(A, iterations, low, high):
    """Return one sample's s for all tokens, A (H, T, T), and how many heads counted."""
    H, T = A.shape[:2]
    each = []
    for h in range(H):
        s = [1 / T] * T
        for _ in range(iterations):
            s = [sum(A[h, i, j] * s[i] for i in range(T)) for j in range(T)]
        if low <= sum((x * T - 1) ** 2 for x in s) / T <= high:
            each.append(s)
    if not each:
        return ranks(A, iterations, 0, math.inf)[0], 0
    return [math.sqrt(sum(s[j] ** 2 for s in each) / len(each)) for j in range(T)], len(each)


def stay(s, keys, keep, similar, groups):
    """Return the patches of one sample that stay: s of the patches, keys (N, C)."""
    order = sorted(range(len(s)), key=lambda j: (-s[j], j))
    half = (len(s) + 1) // 2
    first, second = (order[::2], order[1::2]) if groups == "alternate" else (order[:half], order[half:])

    def closest(j):
        return max(float(keys[i] @ keys[j]) / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) for i in first)

    go = sorted(second, key=lambda j: -closest(j))[: min(round(similar * (len(s) - keep)), len(s) // 2)]
    left = [-1.0 if j in go else s[j] for j in range(len(s))]
    return chosen(left, keep)


CASES = {
    "as it comes": {},
    "halves": {"groups": "rank"},
    "similar only": {"similar": 1.0},
    "rank only": {"similar": 0.0},
    "few heads": {"low": 0.1, "high": 0.4},
    "no head": {"low": 5.0, "high": 6.0},
}


@pytest.mark.parametrize("keep", [3, 13])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_it_keeps_what_the_equations_keep(params, block, keep):
    strategy, network = ZeroTPrune(**params), vit(reg_tokens=1)
    shown = inside(network, images(), block)
    acting, _ = act(strategy, network, images(), blocks=(block,), rate=keep / N)
    for b in range(B):
        s, _ = ranks(shown["A"][b], ITERATIONS[block], strategy.low, strategy.high)
        keys = np.concatenate(list(shown["k"][b]), axis=1)[2:]
        np.testing.assert_allclose(acting.scores[b], s[2:], rtol=1e-5)
        assert acting.index[b].tolist() == stay(s[2:], keys, keep, strategy.similar, strategy.groups)


def test_the_bounds_of_the_variance_leave_some_heads_and_not_others():
    shown = inside(vit(), images(), 1)
    assert {ranks(shown["A"][b], 5, 0.1, 0.4)[1] for b in range(B)} & {1, 2, 3}
    assert all(ranks(shown["A"][b], 5, 0.01 / 17**2, 0.7 / 17**2)[1] == 0 for b in range(B)), "they are not of s itself"
