"""Scores made of what a block's attention shows, each against plain loops in float64."""

import math
from functools import partial

import numpy as np
import pytest
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.attn_value_norm import AttnValueNorm
from sparsebench_plugins.column_norm import ColumnNorm
from sparsebench_plugins.evit import EViT
from sparsebench_plugins.feature_norm import FeatureNorm
from sparsebench_plugins.rep_shift import RepShift
from sparsebench_plugins.tps import TPS
from sparsebench_plugins.value_norm import ValueNorm
from tiny import B, N, act, chosen, images, inside, vit

CLASS = partial(vit, reg_tokens=2)
CLASSLESS = partial(vit, class_token=False, global_pool="avg")


def class_attention(s, b, j, P, classless=False):
    """Return a_j, mean over heads; without a class token the mean over queries of what j receives."""
    H, T = s["A"].shape[1], s["A"].shape[2]
    rows = range(T) if classless else (0,)
    return sum(s["A"][b, h, i, P + j] for h in range(H) for i in rows) / (H * len(rows))


def mean_query(s, b, j, P):
    H, T, d = s["q"].shape[1:]
    total = 0.0
    for h in range(H):
        q = [sum(s["q"][b, h, i, c] for i in range(P, T)) / (T - P) for c in range(d)]
        logits = [sum(q[c] * s["k"][b, h, i, c] for c in range(d)) / math.sqrt(d) for i in range(T)]
        total += math.exp(logits[P + j]) / sum(map(math.exp, logits)) / H
    return total


def value_norm(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["v"][b, :, P + j].flatten()))


def ats(s, b, j, P, classless=False):
    given = [class_attention(s, b, i, P, classless) * value_norm(s, b, i, P) for i in range(N)]
    return given[j] / sum(given)


def feature_norm(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["tokens"][b, P + j]))


def rep_shift(s, b, j, P):
    return math.sqrt(sum(float(x) ** 2 for x in s["branch"][b, P + j]))


def column_norm(n, s, b, j, P):
    H, T = s["A"].shape[1], s["A"].shape[2]
    return sum(sum(s["A"][b, h, i, P + j] ** n for i in range(T)) ** (1 / n) for h in range(H)) / H


CASES = {
    "attn_topk mean_query": (AttnTopK(attention="mean_query"), CLASS, mean_query),
    "attn_topk mean_query, no class token": (AttnTopK(attention="mean_query"), CLASSLESS, mean_query),
    "tps": (TPS(), CLASS, class_attention),
    "evit": (EViT(), CLASS, class_attention),
    "evit, no class token": (EViT(), CLASSLESS, partial(class_attention, classless=True)),
    "value_norm": (ValueNorm(), CLASS, value_norm),
    "value_norm, smallest": (ValueNorm(keep="smallest"), CLASS, lambda *a: -value_norm(*a)),
    "attn_value_norm": (AttnValueNorm(), CLASS, ats),
    "attn_value_norm, no class token": (AttnValueNorm(), CLASSLESS, partial(ats, classless=True)),
    "feature_norm": (FeatureNorm(), CLASS, feature_norm),
    "feature_norm, smallest": (FeatureNorm(keep="smallest"), CLASS, lambda *a: -feature_norm(*a)),
    "rep_shift": (RepShift(), CLASS, rep_shift),
    "column_norm": (ColumnNorm(), CLASS, partial(column_norm, 2.0)),
    "column_norm 5.5": (ColumnNorm(n=5.5), CLASSLESS, partial(column_norm, 5.5)),
}


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize(("strategy", "make", "score"), CASES.values(), ids=CASES)
def test_scores_are_the_equations_and_the_largest_stay(strategy, make, score, block):
    network = make()
    shown = inside(network, images(), block)
    expected = np.array([[score(shown, b, j, network.prefix) for j in range(N)] for b in range(B)])
    acting, _ = act(strategy, network, images(), blocks=(block,))
    (decision,) = acting.decisions
    np.testing.assert_allclose(decision.plan.scores, expected, rtol=1e-5, atol=1e-7)
    if strategy.name == "tps":
        assert (decision.plan.weight > 0).sum(dim=(1, 2)).tolist() == [N] * B
    else:
        stay = N // 2 - strategy.traits().fuses
        assert decision.plan.index.tolist() == [chosen(row, stay) for row in expected]


def test_a_high_order_of_the_column_norm_is_the_largest_entry_and_no_power_vanishes():
    shown = inside(vit(), images(), 1)
    acting, _ = act(ColumnNorm(n=1000), vit(), images(), blocks=(1,))
    np.testing.assert_allclose(acting.scores, shown["A"][..., 1:].max(axis=2).mean(axis=1), rtol=5e-3)
