"""The search of DiffRate's counts: masks, merging and their gradients by loops in float64, and the loss."""

import math
from functools import partial

import pytest
import torch
from merging import cosine, place, softmax, view
from sparsebench_plugins.diffrate_search import DiffRateSearch
from tiny import B, images, vit

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget

N, C = 9, 4


def probabilities(theta, pace):
    """Return P_1..P_N of the ranks, and the count."""
    alpha = softmax([pace * x for x in theta])
    mean = sum(n * a for n, a in enumerate(alpha, start=1))
    return [sum(alpha[i:]) for i in range(len(alpha))], math.ceil(mean - 1e-3)


def in_training(seed=0):
    """Return a view in training, in float64, in which tokens 2 and 7 of each sample were removed."""
    strategy, rng = DiffRateSearch(pace=2.0), torch.Generator().manual_seed(seed)
    tokens, attention = (torch.randn(2, N, C, generator=rng).double(), torch.rand(2, N, generator=rng).double())
    seen = view(B=2, N=N, tokens=tokens, attention=attention)
    seen.training = True
    seen.sizes, seen.weights = seen.sizes.double(), torch.ones(2, N, dtype=torch.float64)
    seen.weights[:, [2, 7]] = 0.0
    seen.learned = strategy.module(place(7, 3, C, patches=N)).double()
    seen.memory["counts"] = [torch.tensor(7.0, dtype=torch.float64)]
    return strategy, seen


def by_hand(seen, thetas, pace, at=None):
    """Return the fields of the mask for each sample: keep, values, sizes.

    Masks are 1 or 0 by the counts at `at`, plus the difference of P from P at `at`, for straight-through gradients.
    """
    (P_p, _), (P_m, _) = (probabilities(theta, pace) for theta in thetas)
    (Q_p, p), (Q_m, m) = (probabilities(theta, pace) for theta in (at or thetas))
    p, m = min(p, 7), min(m, p, 7)
    keep, values, sizes = [], [], []
    for b in range(2):
        x, s = seen.tokens[b].tolist(), seen.sizes[b].tolist()
        there, a = seen.weights[b].tolist(), seen.attention[b].tolist()
        order = sorted(range(N), key=lambda i: (-there[i], -a[i] * there[i], i))
        stay = sorted(order[:m])
        drop_mask = [(order.index(i) < p) + P_p[order.index(i)] - Q_p[order.index(i)] for i in range(N)]
        stay_mask = [(order.index(i) < m) + P_m[order.index(i)] - Q_m[order.index(i)] for i in range(N)]
        joins = {i: {} for i in stay}
        for i in range(N):
            if i in stay:
                joins[i][i] = (1.0, 1.0)
                continue
            c, host = max((max(0.0, cosine(x[i], x[j])), -j) for j in stay)
            joins[-host][i] = (there[i] * drop_mask[i] * (1 - stay_mask[i]), c)
        keep.append([d * k for d, k in zip(drop_mask, stay_mask, strict=True)])
        values.append([
            [sum(w * x[j][c] for j, (w, _) in joins[i].items()) / sum(w for w, _ in joins[i].values())
             for c in range(C)] if i in stay else x[i] for i in range(N)
        ])  # fmt: skip
        sizes.append([sum(w * c * s[j] for j, (w, c) in joins[i].items()) if i in stay else s[i] for i in range(N)])
    return keep, values, sizes


def same(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64).to(actual)
    torch.testing.assert_close(actual.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_the_groups_and_the_sizes_are_the_equations(seed):
    strategy, seen = in_training(seed)
    plan = strategy.plan(seen, 3)
    thetas = [seen.learned[name].tolist() for name in "pm"]
    for actual, expected in zip((plan.keep, plan.values, plan.sizes), by_hand(seen, thetas, 2.0), strict=True):
        same(actual, expected)
    assert int(seen.memory["counts"][1]) == 3 and plan.keep.sum(dim=1).tolist() == [3.0, 3.0]


def test_the_gradient_goes_straight_through_a_rank():
    """The gradient goes straight through the probability that a rank is kept."""
    strategy, seen = in_training()
    rng = torch.Generator().manual_seed(5)
    plan = strategy.plan(seen, 3)
    fields = plan.keep, plan.values, plan.sizes
    factors = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in fields]
    sum((f * x).sum() for f, x in zip(factors, fields, strict=True)).backward()
    thetas = {name: seen.learned[name].tolist() for name in "pm"}

    def loss(name, i, step):
        moved = {key: list(theta) for key, theta in thetas.items()}
        moved[name][i] += step
        hand = by_hand(seen, list(moved.values()), 2.0, at=list(thetas.values()))
        return sum(float((f * torch.tensor(x, dtype=torch.float64)).sum()) for f, x in zip(factors, hand, strict=True))

    for name in "pm":
        slopes = [(loss(name, i, 1e-5) - loss(name, i, -1e-5)) / 2e-5 for i in range(N)]
        same(seen.learned[name].grad, slopes)
        assert max(map(abs, slopes)) > 0.01


def actor_on(network, budget, **parameters):
    return Actor(DiffRateSearch(**parameters), budget, network.cost, network.grid, stream=5)


def begin(actor, training, n=B):
    return actor.begin(torch.arange(n), 0, None, training=training)


NETWORKS = pytest.mark.parametrize(
    "make", [vit, partial(vit, class_token=False, global_pool="avg")], ids=["class token", "no class token"]
)


@NETWORKS
@torch.no_grad()
def test_training_with_masks_equals_the_test_without_tokens(make):
    """Training with masks gives the logits of the test without the tokens."""
    network = make()
    actor = actor_on(network, Budget(macs=0.6))
    learned, removed = begin(actor, training=True), begin(actor, training=False)
    torch.testing.assert_close(network(images(), learned), network(images(), removed), atol=1e-4, rtol=1e-4)
    kept = [int(n) for n in learned.memory["counts"]]
    assert [step.tokens_out for step in removed.steps] == kept == list(actor.keep.values())
    assert learned.weights().sum(dim=1).tolist() == [kept[-1]] * B and learned.sizes.shape == (B, 16)


@torch.no_grad()
def test_the_learned_counts_are_those_of_the_test_and_never_rise():
    network = vit()
    actor = actor_on(network, Budget(macs=0.6))
    for block, (p, m) in {0: (12, 10), 1: (16, 6), 2: (9, 8), 3: (3, 5)}.items():
        for name, n in (("p", p), ("m", m)):
            actor.learned[block][name].fill_(-9.0)[n - 1] = 9.0
    acting = begin(actor, training=False)
    network(images(), acting)
    assert [step.tokens_out for step in acting.steps] == [10, 6, 6, 3]
    merged = [int((decision.plan.target >= 0).sum(dim=1)[0]) for decision in acting.decisions]
    assert merged == [12, 10, 6, 3]


def test_what_counts_spend_has_its_slopes():
    actor = actor_on(vit(), Budget(macs=0.6))
    counts = torch.tensor([12.25, 9.5, 7.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda counts: actor.spent(list(counts)), (counts,))
    assert bool((torch.autograd.grad(actor.spent(list(counts)), counts)[0] > 0).all())
    assert actor.spent(list(actor.keep.values())) == actor.share_of(actor.planned) == pytest.approx(0.6, abs=0.05)


def test_the_loss_brings_the_counts_to_the_budget():
    """The loss is the weighted square and brings the counts to the budget."""
    network = vit()
    network.module.requires_grad_(False)
    actor = actor_on(network, Budget(macs=0.9), weight=3.0)
    target = actor_on(network, Budget(macs=0.5))
    actor.planned = target.planned  # as if the initial counts were far from the budget
    weights = [weight for module in actor.learned.values() for weight in module.parameters()]
    optimiser = torch.optim.Adam(weights, lr=0.05)
    asked, off = target.share_of(target.planned), []
    for _ in range(60):
        acting = begin(actor, training=True, n=1)
        network(images(1), acting)
        optimiser.zero_grad()
        loss = acting.loss()
        spent = float(actor.spent([int(n) for n in acting.memory["counts"]]))
        off.append(abs(spent - asked))
        assert loss.item() == pytest.approx(3.0 * off[-1] ** 2, rel=1e-4, abs=1e-7)
        loss.backward()
        optimiser.step()
    assert off[0] > 0.35 and off[-1] < 0.06
