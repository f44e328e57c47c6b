"""ToMeCIS against its equations in float64."""

from functools import partial

import numpy as np
import pytest
from loops64 import agree, unit
from sparsebench_plugins.tome_cis import ToMeCIS
from tiny import act, images, made, vit

from sparsebench.errors import UnsupportedError


def tome_cis(state, keep):
    P, T = state.P, len(state.x)
    r, keys = T - P - keep, unit(state.k.mean(axis=0))
    importance = state.A[:, 0].mean(axis=0) * np.linalg.norm(state.v.mean(axis=0), axis=1)
    A, B = [i for i in range(P, T) if i % 2 == 0], [i for i in range(P, T) if i % 2]
    best = {i: max(B, key=lambda j: float(keys[i] @ keys[j])) for i in A}
    leave = sorted(A, key=lambda i: -float(keys[i] @ keys[best[i]]))[:r]
    groups = [[i] for i in range(P)] + [[i] for i in A if i not in leave]
    groups += [[j] + [i for i in leave if best[i] == j] for j in B]
    sizes, x = [sum(state.sizes[g]) for g in groups], []
    for g in groups:
        total = sum(importance[g])
        x.append(sum(importance[i] * state.x[i] for i in g) / total if len(g) > 1 else state.x[g[0]])
    state.x, state.sizes = np.array(x), np.array(sizes)


@pytest.mark.parametrize("make", [partial(vit, depth=12), partial(vit, depth=12, reg_tokens=2)])
@pytest.mark.parametrize("budget", [{"blocks": (3, 6, 9)}, {"schedule": "every"}], ids=str)
@pytest.mark.parametrize("proportional", [True, False])
def test_tokens_and_counts_are_the_equations(make, budget, proportional):
    strategy = ToMeCIS(proportional=proportional)
    agree(strategy, make(), images(3), {"rate": 0.6, **budget}, middle=tome_cis, log_sizes=proportional)


def test_without_a_class_token_it_is_refused_in_one_line():
    with pytest.raises(UnsupportedError, match="class_attention") as refused:
        act(made("tome_cis"), vit(class_token=False, global_pool="avg"), images())
    assert "\n" not in str(refused.value)
