"""DynamicViT against loops over its equations in float64, in training and in the test."""

import math

import pytest
import torch
from merging import cosine, gelu, linear, normed
from sparsebench_plugins.dynamic_vit import DynamicViT
from tiny import B, N, act, images, vit

from sparsebench.strategy.base import LossInputs, ModelOutputs
from sparsebench.strategy.plans import squeeze


@pytest.fixture(scope="module")
def network():
    return vit()


def log_probabilities(module, tokens, D):
    """Return (keep, drop) log-probabilities of tokens, lists of C numbers, by the equations of the layers."""
    norm, project = module["own"][0], module["own"][1]
    z = []
    for x in tokens:
        z.append([gelu(v) for v in linear(project, normed(x, norm))])
    half = len(tokens[0]) // 2
    common = [sum(d * row[half + c] for d, row in zip(D, z, strict=True)) / sum(D) for c in range(half)]
    out = []
    for row in z:
        first, _, second, _, third = module["both"]
        h = [gelu(v) for v in linear(first, row[:half] + common)]
        keep, drop = linear(third, [gelu(v) for v in linear(second, h)])
        total = math.log(math.exp(keep) + math.exp(drop))
        out.append((keep - total, drop - total))
    return out


def noted(strategy):
    """Return the strategy's class, changed to record each plan and view."""

    class Noted(type(strategy)):
        def plan(self, view, keep):
            plan = super().plan(view, keep)
            seen.append((view, view.tokens.detach(), plan))
            return plan

    seen: list = []
    return Noted(**strategy.model_dump()), seen


def test_in_the_test_the_most_probable_stay(network):
    strategy, seen = noted(DynamicViT())
    acting, _ = act(strategy, network, images())
    for view, tokens, plan in seen:
        for b in range(B):
            expected = log_probabilities(view.learned, tokens[b].double().tolist(), [1.0] * tokens.shape[1])
            assert plan.scores[b].tolist() == pytest.approx([keep for keep, _ in expected], abs=1e-5)
            K = plan.index.shape[1]
            assert set(plan.index[b].tolist()) == set(sorted(range(len(expected)), key=lambda i: -expected[i][0])[:K])
    assert [plan.index.shape[1] for _, _, plan in seen] == [8, 4, 2] and acting.index.shape == (B, 2)


def test_training_draws_by_a_hard_gumbel_softmax(network):
    """In training a hard Gumbel softmax draws what stays and nothing comes back."""
    strategy, seen = noted(DynamicViT())
    acting, _ = act(strategy, network, images(), training=True)
    before = torch.ones(B, N)
    for view, tokens, plan in seen:
        for b in range(B):
            pairs = log_probabilities(view.learned, tokens[b].double().tolist(), before[b].tolist())
            for i, (keep, drop) in enumerate(pairs):
                g = [-math.log(-math.log(float(view.random(draw)[b, i]))) for draw in (0, 1)]
                assert float(plan.keep[b, i]) == pytest.approx(float(keep + g[0] > drop + g[1]), abs=1e-6)
        before = before * plan.keep
        torch.testing.assert_close(acting.memory["kept"][view.block], before)
    assert torch.allclose(acting.weights(), before) and 0 < float(before.mean()) < 1


@pytest.fixture(scope="module")
def told():
    """Return the masks of two stages in float64, and the outputs of student and teacher."""
    rng = torch.Generator().manual_seed(0)
    D1 = (torch.rand(B, N, generator=rng) > 0.4).double()
    D2 = D1 * (torch.rand(B, N, generator=rng) > 0.4)
    both = (
        ModelOutputs(torch.randn(B, 5, generator=rng).double(), torch.randn(B, N, 6, generator=rng).double())
        for _ in range(2)
    )
    return D1, D2, *both


@pytest.mark.parametrize("divergence", ["released", "paper"])
def test_the_loss_is_the_sum_of_its_terms(told, divergence):
    D1, D2, student, teacher = told
    shares = {1: 0.5, 2: 0.25}
    memory = {"kept": {1: D1, 2: D2}}
    strategy = DynamicViT(share=2, kl=0.5, distillation=0.25, divergence=divergence)
    alone = float(strategy.loss(LossInputs(student, None, memory, D2, shares, 0.6, sum)))
    ratio = sum(
        sum((sum(D[b].tolist()) / N - shares[s]) ** 2 for b in range(B)) / B for s, D in memory["kept"].items()
    ) / len(shares)
    assert alone == pytest.approx(2 * ratio)
    apart = 0.0
    for b in range(B):
        p, q = (outputs.logits[b].softmax(0).tolist() for outputs in (student, teacher))
        p, q = (q, p) if divergence == "released" else (p, q)
        apart += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / B
    away = sum(
        float(D2[b, i]) * sum((x - y) ** 2 for x, y in zip(student.tokens[b, i], teacher.tokens[b, i], strict=True)) / 6
        for b in range(B)
        for i in range(N)
    ) / float(D2.sum())
    taught = float(strategy.loss(LossInputs(student, teacher, memory, D2, shares, 0.6, sum)))
    assert taught == pytest.approx(2 * ratio + 0.5 * apart + 0.25 * float(away))


def test_the_term_of_the_tokens_moves_the_tokens_and_not_the_mask(told):
    D1, D2, student, teacher = told
    D, tokens = D2.clone().requires_grad_(), student.tokens.clone().requires_grad_()
    strategy = DynamicViT(share=0, kl=0, distillation=1)
    lesson = LossInputs(
        ModelOutputs(student.logits, tokens), teacher, {"kept": {1: D1, 2: D2}}, D, {1: 0.5, 2: 0.25}, 0.6, sum
    )
    strategy.loss(lesson).backward()
    assert D.grad is None and bool((tokens.grad.any(dim=2) == (D2 > 0)).all())


def squeezed_by_hand(x, hosts, gone):
    """Return N lists: one sample's tokens (N, C) after each removed token was added to its most similar host."""
    x = x.double().tolist()
    goes = {q: max(hosts, key=lambda h: cosine(x[q], x[h])) for q in gone} if hosts else {}
    out = []
    for i, row in enumerate(x):
        joins = [(math.exp(cosine(x[q], row)), x[q]) for q in gone if goes.get(q) == i]
        total = math.e + sum(w for w, _ in joins)
        out.append([(math.e * v + sum(w * other[c] for w, other in joins)) / total for c, v in enumerate(row)])
    return out


def test_squeezed_tokens_go_to_the_most_similar(network):
    """With squeeze what is drawn to leave in training goes to the most similar that stays."""
    strategy, seen = noted(DynamicViT(disposal="squeeze"))
    acting, _ = act(strategy, network, images(), training=True)
    before = torch.ones(B, N)
    for _, tokens, plan in seen:
        now = before * plan.keep
        for b in range(B):
            hosts = [i for i in range(N) if now[b, i] > 0.5]
            gone = [i for i in range(N) if before[b, i] > 0.5 and i not in hosts]
            by_hand = squeezed_by_hand(tokens[b], hosts, gone)
            torch.testing.assert_close(plan.values[b], torch.tensor(by_hand), atol=1e-5, rtol=1e-5)
        before = now
    assert 0 < float(before.mean()) < 0.5 and torch.allclose(acting.weights(), before)


def test_an_image_without_hosts_keeps_its_tokens():
    """Of an image without hosts tokens are as they were with finite gradients."""
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hosts = torch.tensor([[True, False, False, True, False], [False] * 5])
    out = squeeze(x, hosts, ~hosts)
    assert torch.equal(out[1], x[1])
    out.sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize(
    ("parameters", "taught", "alone"),
    [
        ({}, (), ("kl", "distillation")),
        ({"share": 0, "kl": 0}, ("share", "kl"), ("share", "kl", "distillation")),
        ({"distillation": 0}, ("distillation",), ("kl", "distillation")),
    ],
)
def test_it_says_which_terms_are_inactive(parameters, taught, alone):
    strategy = DynamicViT(**parameters)
    assert strategy.inactive(teacher=True) == taught and strategy.inactive(teacher=False) == alone
