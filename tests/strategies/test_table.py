"""Every strategy with every schedule and disposal it can have: it runs, keeps the counts, and costs what was asked."""

from itertools import product

import pytest
import timm
import torch
from tiny import SHIPPED, B, N, act, images, vit

from sparsebench.budget import FULL, Budget, schedule_of, solve, stages
from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import VitCost
from sparsebench.models.acting import Actor
from sparsebench.models.deep import vit_cost
from sparsebench.strategy import Strategy

SCHEDULES = ("stages", "every", "late")
DISPOSALS = ("drop", "fuse", "merge", "squeeze")
SPENDING = {name: cls for name, cls in SHIPPED.items() if cls.budgeted and not cls.trains_only}
TABLE = [
    pytest.param(cls, disposal, schedule, id=f"{name}-{disposal}-{schedule}")
    for (name, cls), disposal, schedule in product(SPENDING.items(), DISPOSALS, SCHEDULES)
    if (disposal == "drop" or cls.plan is Strategy.plan) and (schedule == "stages" or cls.site != "input")
]
NO_PLACE = {"radial"}
"""Strategies that need to know where a token is, which nobody knows of mixed ones."""


@pytest.fixture(scope="module")
def network():
    return vit()


@pytest.fixture(scope="module")
def deit_small() -> VitCost:
    with torch.device("meta"):
        return vit_cost(timm.create_model("deit_small_patch16_224"), class_rows=1)


def relevance():
    return torch.rand(B, N, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("cls", "disposal", "schedule"), TABLE)
def test_it_runs_keeps_to_the_counts_and_chooses_alike_alone_in_a_batch_and_again(network, cls, disposal, schedule):
    strategy, mask = cls(disposal=disposal), relevance()
    budget = Budget(keep_rate=0.4, schedule=schedule)
    counts = solve(budget, network.cost, strategy.habits())
    if cls.name in NO_PLACE and disposal == "squeeze":
        with pytest.raises(UnsupportedError, match="no place"):
            act(strategy, network, images(), mask, 0.4, schedule=schedule)
        return
    acting, out = act(strategy, network, images(), mask, 0.4, schedule=schedule)
    at = dict(zip(stages(budget, strategy.habits(), 4), counts, strict=True))
    realised = {d.block: d.after.shape[1] for d in acting.decisions}
    if cls.adaptive:
        assert realised.keys() <= at.keys() and acting.index.shape[1] < N
    else:
        assert realised.items() <= at.items() and acting.index.shape == (B, counts[-1]) and counts[-1] < N
    assert out.shape == (B, 5) and bool(out.isfinite().all())
    again, same = act(strategy, network, images(), mask, 0.4, schedule=schedule)
    assert torch.equal(out, same) and torch.equal(acting.index, again.index)
    alone, single = act(strategy, network, images()[2:3], mask[2:3], 0.4, torch.tensor([2]), schedule=schedule)
    assert torch.equal(alone.index[0], acting.index[2][: alone.index.shape[1]])
    torch.testing.assert_close(single[0], out[2], atol=1e-5, rtol=1e-4)
    actor = Actor(strategy, budget, network.cost, network.grid, stream=5)
    assert cls.adaptive or network.cost.macs(acting.steps) == network.cost.macs(actor.planned)


@pytest.mark.parametrize(("cls", "disposal", "schedule"), TABLE)
@pytest.mark.parametrize("target", [0.87, 0.5])
def test_on_deit_small_it_costs_what_was_asked_for(deit_small, cls, disposal, schedule, target):
    habits = cls(disposal=disposal).habits()
    dense = deit_small.macs(deit_small.dense())

    def share(budget):
        counts = solve(budget, deit_small, habits)
        return deit_small.macs(deit_small.steps(habits, stages(budget, habits, 12), counts)) / dense

    def shaped(**amount):
        return Budget(**amount, schedule=None if habits.site == "input" else schedule)

    assert schedule_of(shaped(macs=target), habits) == (habits.schedule if habits.site == "input" else schedule)
    least = share(shaped(macs=1e-3))
    assert share(shaped(macs=target)) == pytest.approx(max(target, least), rel=0.02)


@pytest.mark.parametrize("name", SHIPPED)
def test_at_a_full_budget_it_is_the_dense_network(network, name):
    cls = SHIPPED[name]
    actor = Actor(cls(), FULL, network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(B), 0, relevance(), tokens=N, training=False)
    with torch.no_grad():
        assert torch.equal(network(images(), acting), network(images()))


@pytest.mark.parametrize("name", SPENDING)
def test_gradients_flow_through_what_stays(network, name):
    actor = Actor(SPENDING[name](), Budget(keep_rate=0.5), network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(B), 0, relevance(), tokens=N, training=True)
    pixels = images().requires_grad_()
    network(pixels, acting).square().sum().backward()
    assert bool(pixels.grad.isfinite().all()) and bool((pixels.grad != 0).any(dim=(1, 2, 3)).all())
    network.module.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    ("rate", "counts", "gmacs"),
    [
        (0.9, (178, 162, 147), 4.022),
        (0.7, (139, 99, 71), 3.029),
        (0.5, (99, 51, 27), 2.309),
        (0.25, (50, 14, 5), 1.725),
    ],
)
def test_evit_has_its_published_counts_and_cost(deit_small, rate, counts, gmacs):
    habits = SHIPPED["evit"]().habits()
    assert solve(Budget(keep_rate=rate, convention="compound-ceil"), deit_small, habits) == counts
    steps = deit_small.steps(habits, (3, 6, 9), counts)
    assert deit_small.macs(steps) / 1e9 == pytest.approx(gmacs, abs=8e-4)
