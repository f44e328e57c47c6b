"""GTP, Cropr, DTEM, MCTF and Representation Shift against their equations in float64, at three places and at all."""

from functools import partial
from math import exp, log

import numpy as np
import pytest
import torch
import vits
from loops64 import agree, loops, unit
from merging import view
from sparsebench_plugins.cropr import Cropr
from sparsebench_plugins.dtem import DTEM
from sparsebench_plugins.gtp import GTP
from sparsebench_plugins.mctf import MCTF
from sparsebench_plugins.rep_shift import RepShift
from tiny import act, images, made, vit

import sparsebench
from sparsebench.deploy.apply import RANDOM
from sparsebench.errors import UserError
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.testing.networks import build
from sparsebench.training.steps import Autograd, Samples

DEEP = partial(vit, depth=12)
NETWORKS = {
    "class token": DEEP,
    "registers": partial(DEEP, reg_tokens=3),
    "no class token": partial(DEEP, class_token=False, global_pool="avg"),
}
networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
places = pytest.mark.parametrize("budget", [{"blocks": (3, 6, 9)}, {"schedule": "every"}], ids=["three", "every"])


def keep_rows(state, stay):
    """Keep these patches, in this order."""
    rows = [*range(state.P), *(state.P + i for i in stay)]
    state.x, state.sizes = state.x[rows], state.sizes[rows]


def graph_of(state, kind):
    x, N = unit(state.x[state.P :]), len(state.x) - state.P
    side, a = round(N**0.5), np.zeros((N, N))
    for k in range(N):
        near = [p for p in range(N) if p != k and max(abs(k // side - p // side), abs(k % side - p % side)) <= 1]
        alike = sorted((p for p in range(N) if p != k), key=lambda p: -float(x[k] @ x[p]))[:8]
        for p in {"spatial": near, "semantic": alike, "mixed": near + alike}[kind]:
            a[k, p] = 1
    D = a.sum(axis=1)
    state.graph = a / np.sqrt(D)[:, None] / np.sqrt(D)


def gtp(state, keep, alpha):
    P, N = state.P, len(state.x) - state.P
    score = [max(A[P + j, P + j] for A in state.A) * max(sum(A[:, P + j]) for A in state.A) for j in range(N)]
    order = sorted(range(N), key=lambda j: -score[j])
    stay, leave = order[:keep], order[keep:]
    x, s = state.x.copy(), state.sizes.copy()
    for k in stay:
        for p in leave:
            x[P + k] += alpha * state.graph[k, p] * state.x[P + p]
            s[P + k] += alpha * state.graph[k, p] * state.sizes[P + p]
    state.x, state.sizes, state.graph = x, s, state.graph[np.ix_(stay, stay)]
    keep_rows(state, stay)


def cut(A, theta):
    k = int(A.shape[1] ** 2 * (1 - theta))
    if not k:
        return A
    return np.array([np.where(head < sorted(head.ravel())[k - 1], 0, head) for head in A])


@networks
@places
@pytest.mark.parametrize("changes", [{}, {"graph": "spatial", "alpha": 0.4, "theta": 0.9}], ids=str)
def test_gtp_propagates_along_its_graph(make, budget, changes):
    strategy = GTP(**changes)
    steps = {
        "start": partial(graph_of, kind=strategy.graph),
        "maps": partial(cut, theta=strategy.theta),
        "middle": partial(gtp, alpha=strategy.alpha),
    }
    agree(strategy, make(), images(2), {"keep_rate": 0.5, **budget}, **steps)


def by_score(state, keep, score):
    """Keep the patches with the largest scores."""
    N = len(state.x) - state.P
    keep_rows(state, sorted(sorted(range(N), key=lambda i: -score(state, state.P + i))[:keep]))


SHIFTS = {
    "mlp": lambda state, row: float(np.linalg.norm(state.mlp[row] - (state.x[row] - state.mlp[row]))),
    "added": lambda state, row: float(np.linalg.norm(state.mlp[row])),
}


@networks
@places
@pytest.mark.parametrize("change", SHIFTS)
def test_rep_shift_keeps_what_the_mlp_changes_most_and_drops_after_it(make, budget, change):
    step = partial(by_score, score=SHIFTS[change])
    agree(RepShift(change=change), make(), images(2), {"keep_rate": 0.6, **budget}, after=step, log_sizes=False)


def learned(strategy, network, budget):
    """Return the weights of a strategy that `act` makes, by block, in float64."""
    actor = Actor(strategy, Budget(**budget),
                  network.cost, network.grid, stream=5)  # fmt: skip
    return {
        block: {n: w.detach().double().numpy() for n, w in m.named_parameters()} for block, m in actor.learned.items()
    }


@networks
@places
def test_cropr_keeps_the_largest_products_with_its_query(make, budget):
    strategy, network, budget = Cropr(queries=2), make(), {"keep_rate": 0.6, **budget}
    weights = learned(strategy, network, budget)

    def step(state, keep):
        query = weights[state.block]["queries.weight"].sum(axis=0)
        by_score(state, keep, lambda state, row: float(query @ state.x[row]))

    agree(strategy, network, images(2), budget, after=step, log_sizes=False)


@networks
def test_tokens_that_left_come_back_unchanged(make):
    """They leave after blocks 2, 5 and 8, and come back before block 10."""
    network, strategy = make(), RepShift(change="added", returns=10)
    patches, left = [], {}

    def step(state, keep):
        now = state.x[state.P :]
        if state.block == 9:
            rows = left | dict(zip(patches, now, strict=True))
            state.x = np.vstack([state.x[: state.P], *(rows[patch] for patch in sorted(rows))])
            state.sizes = np.ones(len(state.x))
            return
        ranked = sorted(range(len(now)), key=lambda i: -float(np.linalg.norm(state.mlp[state.P + i])))
        left.update({patches[i]: now[i] for i in ranked[keep:]})
        stay = sorted(ranked[:keep])
        patches[:] = [patches[i] for i in stay]
        keep_rows(state, stay)

    for image in images(2):
        patches[:] = range(16)
        left.clear()
        acting, logits = act(strategy, network, image[None], rate=0.6, blocks=(2, 5, 8))
        expected, remaining = loops(network, image, acting.keep | {9: 0}, after=step, log_sizes=False)
        np.testing.assert_allclose(logits[0].numpy(), expected, atol=2e-4, rtol=2e-4)
        assert remaining[10:] == [16, 16] and [s.tokens_out for s in acting.steps] == [16] * 3 + [9] * 3 + [5] * 3 + [
            3,
            16,
            16,
        ]
        assert acting.index.tolist() == [list(range(16))]
        assert network.cost.macs(acting.steps) == network.cost.macs(acting.actor.planned)


def test_after_tokens_came_back_none_can_leave():
    with pytest.raises(UserError, match="0 to 8"):
        act(RepShift(returns=10), DEEP(), images(1), blocks=(2, 9))


@pytest.mark.parametrize(
    "words", ["patch_variance:returns=-1", "attn_topk:returns=4", "value_norm:returns=-2", "random:returns=2"]
)
def test_every_score_that_drops_can_have_its_tokens_come_back(words):
    network = DEEP(depth=6)
    acting, logits = act(made(words), network, images(2), relevance=None, schedule=None)
    counts = [step.tokens_in for step in acting.steps]
    back = acting.actor.returns
    assert counts[back:] == [16] * (6 - back) and min(counts) < 16 and logits.isfinite().all()
    assert network.cost.macs(acting.steps) == network.cost.macs(acting.actor.planned)


@pytest.mark.parametrize("words", ["tome:returns=-1", "attn_topk:disposal=fuse,returns=-1", "saint:returns=-1"])
def test_only_dropped_tokens_can_come_back(words):
    with pytest.raises(UserError, match="come back"):
        made(words)


@pytest.mark.parametrize("returns", [0, 12, -12])
def test_a_block_that_the_network_lacks_is_refused(returns):
    with pytest.raises(UserError, match="1 to 11"):
        act(made(f"value_norm:returns={returns}"), DEEP(), images(1))


def softly(x, w, metric, order, n, r, strategy):
    """Return the tokens, sizes and order after a soft merge of one image, by loops."""
    E, O = order[0:n:2], order[1:n:2]
    best = {e: sorted(O, key=lambda o: -float(metric[e] @ metric[o]))[: strategy.partners] for e in E}
    s = {(e, o): float(metric[e] @ metric[o]) / strategy.tau for e in E for o in best[e]}
    T = dict.fromkeys(s, 0.0)
    for _ in range(r):
        top = max(s.values()) / strategy.spread
        total = sum(exp(v / strategy.spread - top) for v in s.values())
        p = {pair: exp(v / strategy.spread - top) / total for pair, v in s.items()}
        for e, o in s:
            T[e, o] += p[e, o]
            s[e, o] += log(max(1 - sum(p[e, other] for other in best[e]), 2**-23))
    rows = {e: max(1.0, sum(T[e, o] for o in best[e])) for e in E}
    T = {(e, o): t / rows[e] for (e, o), t in T.items()}
    new_x, new_w = x.copy(), w.copy()
    for o in O:
        gains = {e: T[e, o] * w[e] for e in E if (e, o) in T}
        new_w[o] = w[o] + sum(gains.values())
        new_x[o] = (w[o] * x[o] + sum((g * x[e] for e, g in gains.items()), np.zeros(x.shape[1]))) / new_w[o]
    for e in E:
        new_w[e] = w[e] * min(1.0, max(0.0, 1 - sum(T[e, o] for o in best[e])))
    falling = sorted(E + O, key=lambda i: -new_w[i])
    return new_x, new_w, falling + order[n:]


@pytest.mark.parametrize("r", [1, 3, 8])
def test_a_soft_merge_is_the_loops(r):
    strategy, first = DTEM(), view(2, 17, prefix_count=1)
    inputs = torch.randn(2, 17, 6, generator=torch.Generator().manual_seed(8)).double()
    embedding = torch.nn.Linear(6, 4).double()
    sizes = 1 + torch.rand(2, 17, generator=torch.Generator().manual_seed(9))
    seen = view(2, 17, tokens=first.tokens.double(), attention_input=inputs, sizes=sizes)
    seen.training, seen.learned, seen.sizes = True, embedding, seen.sizes.double()
    plan = strategy.plan(seen, 17 - r)
    again = view(2, 17, tokens=seen.tokens + plan.by, attention_input=inputs.flip(2))
    again.training, again.learned, again.sizes, again.memory = True, embedding, plan.sizes, seen.memory
    second = strategy.plan(again, 17 - 2 * r) if 17 - 2 * r > 0 else None
    for b in range(2):
        metric = unit(embedding(inputs[b]).detach().numpy())
        x, w, order = softly(seen.tokens[b].numpy(), seen.sizes[b].numpy(), metric, list(range(17)), 17, r, strategy)
        np.testing.assert_allclose((seen.tokens + plan.by)[b].detach().numpy(), x, atol=1e-9)
        np.testing.assert_allclose(plan.sizes[b].detach().numpy(), w, atol=1e-9)
        if second is not None:
            metric = unit(embedding(inputs[b].flip(1)).detach().numpy())
            x, w, order = softly(x, w, metric, order, 17 - r, min(r, (17 - r) // 2), strategy)
            np.testing.assert_allclose(second.sizes[b].detach().numpy(), w, atol=1e-7)
            falling = second.sizes[b].detach().numpy()[seen.memory["order"][b]]
            np.testing.assert_allclose(falling, w[order], atol=1e-7)


def test_the_embedding_learns_by_the_gradient_of_the_soft_merge():
    strategy, rng = DTEM(tau=0.5, spread=0.5), torch.Generator().manual_seed(3)
    tokens, inputs = (torch.randn(1, 9, 6, generator=rng).double() for _ in range(2))
    embedding = torch.nn.Linear(6, 4).double()

    def merged(weight):
        seen = view(1, 9, tokens=tokens, attention_input=inputs, sizes=torch.ones(1, 9).double())
        seen.training = True
        seen.learned = lambda x: torch.nn.functional.linear(x, weight)
        plan = strategy.plan(seen, 8)  # one merge, so that no row of shares has a sum above 1
        return plan.by, plan.sizes

    assert torch.autograd.gradcheck(merged, (embedding.weight.detach().requires_grad_(),))


def test_in_training_all_tokens_stay_and_only_the_embedding_learns():
    network, strategy = DEEP(depth=4), DTEM()
    actor = Actor(strategy, Budget(per_block=4, blocks=(0, 1)), network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(2), 0, None, training=True)
    network(images(2), acting).square().sum().backward()
    assert acting.index.shape == (2, 16) and float(acting.sizes.detach().sum(dim=1).sub(16).abs().max()) < 1e-4
    assert all(bool(m.weight.grad.any()) and bool(m.weight.grad.isfinite().all()) for m in actor.learned.values())
    assert strategy.network_rate(0.0) == strategy.network_rate(1.0) == 0.0


@networks
@places
def test_dtem_merges_the_pairs_of_its_embedding(make, budget):
    strategy, network, budget = DTEM(), make(), {"keep_rate": 0.6, **budget}
    weights = learned(strategy, network, budget)

    def step(state, keep):
        P, T = state.P, len(state.x)
        metric = unit(state.normed @ weights[state.block]["weight"].T + weights[state.block]["bias"])
        A, B = [i for i in range(P, T) if i % 2 == 0], [i for i in range(P, T) if i % 2]
        best = {i: max(B, key=lambda j: float(metric[i] @ metric[j])) for i in A}
        ranked = sorted(A, key=lambda i: -float(metric[i] @ metric[best[i]]))
        r = T - P - keep
        rest = sorted(ranked[r:]) if P else ranked[r:]
        groups = [[i] for i in range(P)] + [[i] for i in rest]
        groups += [[j] + [i for i in ranked[:r] if best[i] == j] for j in B]
        x = [sum(state.sizes[i] * state.x[i] for i in g) / sum(state.sizes[g]) for g in groups]
        state.x, state.sizes = np.array(x), np.array([sum(state.sizes[g]) for g in groups])

    agree(strategy, network, images(2), budget, middle=step)


def fused(A, groups, weights):
    """Return (H, M, M) attention: columns of groups are added up, rows are weighted means."""
    columns = np.stack([A[:, :, g].sum(axis=2) for g in groups], axis=2)
    rows = [(weights[g][:, None] * columns[:, g]).sum(axis=1) / weights[g].sum() for g in groups]
    return np.stack(rows, axis=1)


def mctf(state, keep, two_ways=True):
    """Merge the tokens, sizes and attention of a state by MCTF's weights, with the default temperatures."""
    P, T = state.P, len(state.x)
    received = state.A.mean(axis=(0, 1))
    x, r = unit(state.x), T - P - keep

    def weight(i, j):
        alike = (float(x[i] @ x[j]) + 1) / 2
        return alike * (received[i] * received[j]) ** (-1 / 20) * (state.sizes[i] * state.sizes[j]) ** (-1 / 40)

    members = {i: [i] for i in range(P, T)}
    A, B = [i for i in members if i % 2 == 0], [i for i in members if i % 2]
    for sources, hosts, number in ((A, B, r // 2), (B, A, r - r // 2)):
        there = [j for j in hosts if j in members]
        best = {i: max(there, key=lambda j: weight(i, j)) for i in sources}
        ranked = sorted(sources, key=lambda i: -weight(i, best[i]))
        for i in ranked[:number]:
            members[best[i]] += members.pop(i)
    groups = (
        [[i] for i in range(P)] + [members[j] for j in A if j in members] + [members[j] for j in ranked if j in members]
    )
    share = received * state.sizes
    state.A = fused(state.A, groups, share)
    state.x = np.array([(share[g][:, None] * state.x[g]).sum(axis=0) / share[g].sum() for g in groups])
    state.sizes = np.array([state.sizes[g].sum() for g in groups])


@networks
@places
@pytest.mark.parametrize("ahead", [True, False])
def test_mctf_merges_tokens_and_attention_before_the_values(make, budget, ahead):
    agree(MCTF(ahead=ahead), make(), images(2), {"keep_rate": 0.6, **budget}, **{"early" if ahead else "after": mctf})


def test_auxiliary_heads_learn_from_labels_in_a_training():
    case = build("class token")
    actor = Actor(Cropr(), Budget(keep_rate=0.5), case.network.cost, case.network.grid, stream=5)
    steps = Autograd(case.network, actor, Samples(case.inputs, case.labels, case.relevance), case.recipe)
    with torch.enable_grad():
        steps.step(np.arange(len(case.labels)), 0, 0.0)
    gradients = [weight.grad for module in actor.learned.values() for weight in module.parameters()]
    assert gradients and all(gradient is not None and bool(gradient.any()) for gradient in gradients)


def test_in_a_users_loop_auxiliary_logits_teach_the_heads_alone():
    model = vits.vit(num_classes=5)
    with sparsebench.apply(model, "cropr:keep_rate=0.5,blocks=1", learned=RANDOM) as sparse:
        sparse.train()
        sparse(images(3))
        (logits,) = sparse.auxiliary()
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 4])).backward()
        assert all(weight.grad is None for weight in model.parameters())
        heads = [weight.grad for weight in sparse.parameters() if weight.grad is not None]
        assert heads and all(bool(grad.any()) for grad in heads)
