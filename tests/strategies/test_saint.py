"""SAINT against its equations in float64, and its budget."""

import math
from functools import partial

import pytest
import torch
from loops64 import agree, unit
from sparsebench_plugins.saint import SAINT
from tiny import act, images, vit

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget

NETWORKS = {
    "class token": partial(vit, depth=12),
    "registers": partial(vit, depth=12, reg_tokens=3),
    "no class token": partial(vit, depth=12, class_token=False, global_pool="avg"),
}


def saint(state, keep, strategy):
    if state.block >= strategy.until * state.depth:
        return
    P, N = state.P, len(state.x) - state.P
    if state.block == 0 or not hasattr(state, "order"):
        state.order = list(range(N))
    keys = unit(state.k.mean(axis=0)[P:])
    E, O = state.order[0::2], state.order[1::2]
    score, candidates = {}, 0
    for i in E:
        s = [float(keys[i] @ keys[j]) for j in O]
        hits = [x for x in s if x >= strategy.threshold]
        candidates += len(hits) >= strategy.K
        score[i] = sum(s) / max(1, len(s))
        if hits:
            score[i] = len(hits) * math.exp(strategy.closeness * (sum(hits) / len(hits) - strategy.threshold))
    r = min(max(candidates, N - keep), len(E)) if O else 0
    if r == 0:
        return
    falling = sorted(E, key=lambda i: -score[i])
    stay = sorted(falling[r:] + O)
    state.order = [stay.index(i) for i in falling[r:] + O]
    rows = [*range(P), *(P + i for i in stay)]
    state.x, state.sizes = state.x[rows], state.sizes[rows]


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("budget", [{"blocks": (3, 6, 9)}, {"schedule": "every"}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"threshold": 0.2, "K": 2, "until": 1.0}], ids=str)
def test_what_stays_is_what_the_equations_say(make, budget, changes):
    strategy = SAINT(**changes)
    agree(
        strategy, make(), images(3), {"rate": 0.6, **budget}, middle=partial(saint, strategy=strategy), log_sizes=False
    )


def test_with_a_high_threshold_only_the_budget_removes_tokens():
    """An image loses what the budget asks for, and with all tokens in the budget nothing."""
    for rate, left in ((1.0, 16), (0.75, 12)):
        acting, _ = act(SAINT(threshold=1.0, until=1.0), vit(), images(), rate=rate, blocks=(2,))
        assert acting.present == left


@torch.no_grad()
def test_images_of_one_batch_keep_different_numbers_without_a_budget():
    network = vit()
    actor = Actor(
        SAINT(threshold=0.3, K=3), Budget(counts=(16, 16), blocks=(0, 1)), network.cost, network.grid, stream=5
    )
    acting = actor.begin(torch.arange(8), 0, None, training=False)
    network(images(8), acting)
    assert len(set(acting.present.tolist())) > 1
