"""ATS against loops over its equations in float64."""

import math

import pytest
import torch
from merging import view
from sparsebench_plugins.ats import ATS
from tiny import B, N, act, images, vit

from sparsebench.measure.schedule import TokenSchedule
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.training.fit import calibrate
from sparsebench.training.steps import Samples


def shares(attention, values):
    """Return S_j = a_j ||v_j|| / sum_i a_i ||v_i|| of one sample, for values (H, N, d)."""
    contributions = [a * math.sqrt(sum(float(v) ** 2 for v in values[:, j].flatten())) for j, a in enumerate(attention)]
    return [g / sum(contributions) for g in contributions]


def taken(S, M, ascending, points, left=0):
    """Return the tokens that the M points select, after some have left; of equally near ones, the smallest sum."""
    order = sorted(range(len(S)), key=lambda j: (S[j], j)) if ascending else list(range(len(S)))
    c, total = [], 0.0
    for j in order:
        total += S[j]
        c.append(total)
    if points == "paper":
        ys = [(2 * m - 1) / (2 * M) for m in range(1, M + 1)]
    else:
        low, high = min([*c, *[0.0] * left]), max(c)
        c = [(x - low) / (high - low) if high > low else 0.0 for x in c]
        s = min((x for x in c if x > 0), default=1.0)
        ys = [s] if M == 1 else [s + m * (1 - s) / (M - 1) for m in range(M)]
    return {order[min(range(len(c)), key=lambda i: (abs(c[i] - y), c[i], i))] for y in ys}


@pytest.mark.parametrize("points", ["released", "paper"])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("M", [1, 2, 5, 11, 16, 17])
def test_the_points_take_the_tokens_whose_sum_is_nearest(M, ascending, points):
    # In float64: in float32 rounding may decide which of two tokens is nearer to a point.
    values = torch.randn(3, 2, 17, 5, generator=torch.Generator().manual_seed(M)).double()
    attention = torch.rand(3, 17, generator=torch.Generator().manual_seed(M + 1)).double() ** 4
    plan = ATS(ascending=ascending, points=points).plan(view(attention=attention, values=values), M)
    for b in range(3):
        S = shares(attention[b].tolist(), values[b])
        assert plan.scores[b].tolist() == pytest.approx(S, abs=1e-6)
        assert set(plan.keep[b].nonzero()[:, 0].tolist()) == taken(S, M, ascending, points)
        assert 1 <= int(plan.keep[b].sum()) <= M


@pytest.mark.parametrize("points", ["released", "paper"])
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("M", [1, 3, 5])
@pytest.mark.parametrize("row", [[1.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0], [0.0, 0, 0, 1, 0], [2.0, 0, 3, 0, 0]], ids=str)
def test_tokens_without_a_score_are_no_trouble(row, M, ascending, points):
    seen = view(1, 5, attention=torch.tensor([row]), values=torch.ones(1, 2, 5, 3))
    plan = ATS(ascending=ascending, points=points).plan(seen, M)
    S = [a / (sum(row) or 1.0) for a in row]
    assert plan.keep[0].nonzero()[:, 0].tolist() == sorted(taken(S, M, ascending, points))
    assert plan.scores[0].tolist() == pytest.approx(S)


@pytest.mark.parametrize("points", ["released", "paper"])
@pytest.mark.parametrize("M", [1, 8, 17])
def test_padding_is_never_taken(M, points):
    sizes = (torch.arange(17) < torch.tensor([17, 9, 1])[:, None]).float()
    attention = torch.rand(3, 17, generator=torch.Generator().manual_seed(0))
    values = torch.randn(3, 2, 17, 5, generator=torch.Generator().manual_seed(1))
    plan = ATS(points=points).plan(view(attention=attention, values=values, sizes=sizes), M)
    for b, there in enumerate((17, 9, 1)):
        S = shares(attention[b, :there].double().tolist(), values[b, :, :there].double())
        assert set(plan.keep[b].nonzero()[:, 0].tolist()) == taken(S, M, True, points, left=17 - there)


def test_points_begin_at_the_smallest_present_score():
    """Where tokens have left the points begin at the smallest score that is there."""
    first = view(1, 4, attention=torch.tensor([[0.1, 0.2, 0.3, 0.4]]), values=torch.ones(1, 2, 4, 3))
    assert ATS().plan(first, 4).keep.tolist() == [[False, True, True, True]]
    # The points are .2, .6 and 1, the sums .2, .5 and 1; with the smallest subtracted again, no point would select it.
    then = view(1, 3, attention=torch.tensor([[0.2, 0.3, 0.5]]), values=torch.ones(1, 2, 3, 3))
    then.memory = first.memory
    assert ATS().plan(then, 3).keep.tolist() == [[True, True, True]]


def test_acts_as_published_without_a_smaller_budget():
    """With all tokens as upper bounds it acts as published and at a full budget it does not."""
    network = vit()
    acting, _ = act(ATS(), network, images(), rate=None, counts=(N,) * 3, blocks=(1, 2, 3))
    assert acting.actor.acts and [d.block for d in acting.decisions] == [1, 2, 3]
    counts = (acting.sizes > 0).sum(dim=1)
    assert bool((counts < N).all()) and bool((counts > 0).all())
    assert not Actor(ATS(), FULL, network.cost, network.grid, stream=5).acts


@pytest.mark.parametrize(
    ("depth", "blocks"), [(12, tuple(range(3, 12))), (24, tuple(range(6, 24))), (3, (1, 2)), (2, (0, 1))]
)
def test_it_acts_from_a_quarter_of_the_depth_on_unless_blocks_are_named(depth, blocks):
    traits, cost = ATS().traits(), vit(depth=depth).cost

    def acts_in(budget):
        return TokenSchedule(budget, traits, cost).blocks

    assert acts_in(Budget(macs=0.5)) == blocks
    assert acts_in(Budget(macs=0.5, blocks=(0, 1))) == (0, 1)
    assert acts_in(Budget(counts=(4,) * depth)) == tuple(range(depth))


def test_asked_for_more_than_it_spends_it_is_given_all_tokens():
    network, data = vit(), Samples(images(), torch.zeros(B, dtype=torch.long), None)
    actor = Actor(ATS(), Budget(macs=0.99), network.cost, network.grid, stream=5)
    _, ratio, _ = calibrate(network, actor, data)
    assert set(actor.keep.values()) == {N} and actor.acts and ratio < 0.99
