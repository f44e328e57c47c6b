"""Properties of all networks of the theories, compared with their formulas by loops in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusing import FUSING
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.feature_norm import FeatureNorm
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import OneQuery, Positional, PositionalCost, Shallow, ShallowCost, TwoLayer, TwoLayerCost
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial.task import Spatial
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
from sparsebench.tasks.base import Data, Split

N, L, D = 4, 9, 6
SHALLOW = {"m": 16, "xi": 0.5}
MODELS = {
    "shallow": Shallow(**SHALLOW),
    "shallow, heads": Shallow(**SHALLOW, heads=3),
    "shallow, repacked": Shallow(**SHALLOW, repacked=True),
    "shallow, skip": Shallow(**SHALLOW, skip=True),
    "shallow, four classes": Shallow(**SHALLOW, heads=2, skip=True),
    "two layers": TwoLayer(d_h=10, d_v=8, shrink=0.3, precision="float64"),
    "positional": Positional(first=0.5),
    "positional, cubic": Positional(first=0.5, power=3, nu=0.5, scale=2.0),
    "one query": OneQuery(),
}
PLAIN = ("shallow", "two layers", "positional", "one query")
every = pytest.mark.parametrize("name", MODELS)
plain = pytest.mark.parametrize("name", PLAIN)


def data_of(patterns=4, tokens=L, d=D, classes=("a", "b")):
    rng = np.random.default_rng(1)
    relevance = rng.permuted(np.tile(np.arange(tokens) < 2, (N, 1)), axis=1).astype(np.float32)
    inputs = rng.standard_normal((N, tokens, d)).astype(np.float32)
    split = Split(inputs, np.arange(N) % 2, np.zeros(N, np.int64), relevance)
    return Data(split, split, classes, patterns=np.linalg.qr(rng.standard_normal((d, d)))[0][:, :patterns])


def built(name, repetition=0):
    """Return the network in float64, with weights so large that its attention is not uniform."""
    patterns, classes = 4 if name.startswith("shallow") else 1, "abcd" if "four" in name else "ab"
    net = MODELS[name].build(data_of(patterns, classes=tuple(classes)), repetition).double()
    if name == "one query":
        rng = np.random.default_rng(3)
        with torch.no_grad():
            for weight in net.parameters():
                weight += torch.from_numpy(0.8 * rng.standard_normal(weight.shape))
    return net


SAMPLES = data_of().train
X = torch.from_numpy(SAMPLES.inputs).double()
RELEVANCE = torch.from_numpy(SAMPLES.relevance)


def begin(net, strategy, rate=0.5):
    actor = Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3)
    return actor.begin(torch.arange(N), 0, RELEVANCE, training=False)


def softmax(scores):
    exp = {key: math.exp(score) for key, score in scores.items()}
    return {key: value / sum(exp.values()) for key, value in exp.items()}


def weights(net, *names):
    return [getattr(net, name).detach().numpy() for name in names]


def shallow(net, x, S):
    W_Q, W_K, W_V, W_O, a = weights(net, "W_Q", "W_K", "W_V", "W_O", "a")
    total = np.zeros(len(a))
    for place, l in enumerate(S):
        mixed = []
        for h in range(net.heads):
            shares = softmax({s: x[s] @ W_K[h].T @ W_Q[h] @ x[l] for s in S})
            v = sum(share * (W_V[h] @ x[s]) for s, share in shares.items())
            mixed += [*(v + x[l] if net.skip else v)]
        total += [row[place if net.repacked else l] @ np.maximum(W_O @ np.array(mixed), 0) for row in a]
    return total / len(S) if len(a) > 1 else total[0] / len(S)


def two_layers(net, x, S):
    W_Q, W_K, W_V, w_O = weights(net, "W_Q", "W_K", "W_V", "w_O")
    rows = [softmax({s: (x[l] @ W_Q) @ (x[s] @ W_K) for s in S}) for l in S]
    return sum(share * (x[s] @ W_V @ w_O) for row in rows for s, share in row.items()) / len(S)


def positional(net, x, S):
    (A,), v, total = weights(net, "A"), net.head.weight.detach().numpy()[0], 0.0
    for m in S:
        shares = softmax({j: math.log(math.log(D)) if j == m else A[m, j] for j in S})
        gathered = net.scale * sum(share * (x[j] @ v) for j, share in shares.items())
        total += gathered**net.power + net.nu * gathered
    return total


def one_query(net, x, S):
    (q,), w, b = weights(net, "q"), net.head.weight.detach().numpy()[0], float(net.head.bias)
    return sum(share * (x[s] @ w) for s, share in softmax({s: x[s] @ q for s in S}).items()) + b


FORMULAS = {"shallow": shallow, "two layers": two_layers, "positional": positional, "one query": one_query}


def formula(name, net, kept):
    """Return the outputs by loops for samples with these kept tokens."""
    made = FORMULAS[name.partition(",")[0]]
    return [made(net, x, S) for x, S in zip(X.numpy(), kept, strict=True)]


@every
@torch.no_grad()
def test_the_output_is_the_formula(name):
    net = built(name)
    expected = formula(name, net, [range(L)] * N)
    np.testing.assert_allclose(net(X).numpy(), expected, rtol=1e-11)
    assert np.abs(expected).min() > 1e-5 and net(X).shape == ((N, 2) if "four" in name else (N,))
    attention = net.attention() if name.startswith("positional") else net.attention(X)
    assert float(attention.std()) > 0.02  # not uniform


@pytest.mark.parametrize("strategy", [Random(), Oracle(), AttnTopK(), FeatureNorm()], ids=lambda s: s.name)
@every
@torch.no_grad()
def test_a_removed_token_is_gone_from_keys_values_and_sums(name, strategy):
    net = built(name)
    acting = begin(net, strategy)
    out, index = net(X, acting), acting.index
    assert index.shape == (N, 4) and acting.steps[0].tokens_out == 4
    np.testing.assert_allclose(out.numpy(), formula(name, net, index.tolist()), rtol=1e-11)
    assert not np.allclose(out.numpy(), formula(name, net, [range(L)] * N), rtol=1e-3)
    if strategy.name == "oracle":
        assert (RELEVANCE.gather(1, index).sum(dim=1) == 2).all()
    received = torch.from_numpy(np.stack([seen(name, net, x)["attention"] for x in X.numpy()]))
    scores = {"attn_topk": received, "feature_norm": X.norm(dim=2)}.get(strategy.name)
    if scores is not None:
        assert torch.equal(index, scores.topk(4, dim=1).indices.sort(dim=1).values)


def seen(name, net, x):
    """Return the view's fields of one sample, by numpy."""

    def rows(scores):
        exp = np.exp(scores)
        return exp / exp.sum(axis=-1, keepdims=True)

    if name.startswith("shallow"):
        Q, K, V = (np.stack([x @ w.T for w in W]) for W in weights(net, "W_Q", "W_K", "W_V"))
        maps = rows(Q @ K.transpose(0, 2, 1))
        return {"queries": Q, "keys": K, "values": V, "attention_maps": maps, "attention": maps.mean(axis=(0, 1))}
    if name == "two layers":
        Q, K, V = (x @ W for W in weights(net, "W_Q", "W_K", "W_V"))
        return {"queries": Q[None], "keys": K[None], "values": V[None], "attention": rows(Q @ K.T).mean(axis=0)}
    if name == "one query":
        return {"keys": x[None], "values": x[None], "attention": rows(x @ weights(net, "q")[0])}
    scores = weights(net, "A")[0].copy()
    np.fill_diagonal(scores, math.log(math.log(D)))
    return {"values": (x @ net.head.weight.detach().numpy().T)[None], "attention": rows(scores).mean(axis=0)}


@pytest.mark.parametrize("name", [*PLAIN, "shallow, heads"])
@torch.no_grad()
def test_a_strategy_sees_only_tokens_and_attention(scripted, name):
    """A strategy sees tokens parts and attention and nothing else."""
    net, result = built(name), {}
    expected = [seen(name, net, x) for x in X.numpy()]
    fields = (*expected[0], "received_attention", "tokens", "pixels")
    strategy = scripted(
        lambda view, keep: result.update({f: getattr(view, f) for f in fields}), needs=fields, budgeted=False
    )
    assert torch.equal(net(X, begin(net, strategy)), net(X))
    assert torch.equal(result.pop("tokens"), X) and result.pop("pixels") is None
    for field, value in result.items():
        of = "attention" if field == "received_attention" else field
        np.testing.assert_allclose(value.numpy(), [one[of] for one in expected], rtol=1e-10)
    assert net.attention_source == "received" and net.grid is None
    for lacks in {"queries", "keys", "class_attention"} - set(fields):
        says = rf"needs {lacks}, which this model cannot give .*\(it gives [a-z_, ]*\)$"
        with pytest.raises(UnsupportedError, match=says):  # no hint at another site for a network of one layer
            net(X, begin(net, scripted(lambda view, keep: None, needs=(lacks,))))


@plain
def test_the_gradient_is_that_of_the_kept_tokens(scripted, name):
    net, inputs = built(name), X.clone().requires_grad_()
    net(inputs, begin(net, scripted(lambda view, keep: Keep(torch.arange(keep).expand(N, keep))))).sum().backward()
    assert (inputs.grad.abs().sum(dim=2) > 0).tolist() == [[True] * 4 + [False] * 5] * N
    assert all(float(w.grad.abs().sum()) > 0 for w in net.parameters())
    if name == "positional":
        expected = torch.zeros(L, L, dtype=torch.bool)
        expected[:4, :4] = ~torch.eye(4, dtype=torch.bool)
        assert torch.equal(net.A.grad.abs() > 1e-12 * net.A.grad.abs().max(), expected)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"shallow, repacked"}))
@torch.no_grad()
def test_in_another_order_each_token_keeps_its_position(scripted, name):
    net, kept = built(name), torch.tensor([[8, 0, 3, 7]] * N)
    actings = [begin(net, scripted(lambda view, keep, o=o: Keep(kept, ordered=o))) for o in (False, True)]
    torch.testing.assert_close(*(net(X, acting) for acting in actings), rtol=1e-12, atol=1e-12)
    assert actings[1].index.tolist() == kept.tolist() != actings[0].index.tolist()


@plain
@torch.no_grad()
def test_keeping_all_tokens_is_the_network_itself(scripted, name):
    net = built(name)
    for decide, rate in ((lambda view, keep: None, 0.5), (lambda view, keep: Keep(view.index), 1.0)):
        acting = begin(net, scripted(decide, budgeted=rate == 1), rate)
        assert torch.equal(net(X, acting), net(X)) and acting.steps == [Step(L, L)]


@pytest.mark.parametrize("plan", FUSING.values(), ids=FUSING)
@plain
def test_tokens_cannot_be_fused_merged_or_mixed(scripted, name, plan):
    net = built(name)
    with pytest.raises(UnsupportedError, match=r"model .*kept or removed"):
        net(X, begin(net, scripted(plan)))


@plain
def test_a_repetition_has_its_own_first_weights(name):
    """A repetition has its own first weights and always the same in any precision."""
    model, data = MODELS[name], data_of(4 if name == "shallow" else 1)
    first, again, other = (model.build(data, repetition).state_dict() for repetition in (0, 0, 1))
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert name == "one query" or not any(torch.equal(value, other[key]) for key, value in first.items())
    if "precision" in type(model).model_fields:
        for precision, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            same = model.model_copy(update={"precision": precision}).build(data, 0).state_dict()
            assert all(value.dtype == dtype and torch.equal(value.float(), first[key].float())
                       for key, value in same.items())  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        (Shallow(), replace(data_of(), patterns=None), "patterns"),
        (Shallow(), data_of(classes=("a", "b", "c")), "got 3; allowed: 2 or 4"),
        (TwoLayer(), data_of(classes=("a", "b", "c", "d")), r"two_layer.*got 4; allowed: 2"),
        *((model, data, "one feature") for model in (Positional(), OneQuery())
          for data in (data_of(), replace(data_of(), patterns=None))),
    ],
)  # fmt: skip
def test_data_that_a_model_is_not_for_are_a_user_error(model, data, says):
    with pytest.raises(UserError, match=says):
        model.build(data, 0)


TOKENS = [
    (Theory(tokens=L, d=d, classes=classes, patterns=classes + 2, test=4), Shallow(m=m, heads=H, skip=skip))
    for L, d, m, classes, H, skip in ((20, 10, 8, 2, 1, False), (50, 16, 32, 2, 3, True), (31, 12, 5, 4, 2, False))
]
TOKENS += [
    (Overfitting(tokens=M, d=d, test=4), TwoLayer(d_h=d_h, d_v=d_v))
    for M, d, d_h, d_v in ((16, 64, 8, 12), (5, 20, 30, 7))
]
TOKENS += [(Spatial(tokens=D, group=2, d=d, test=4), Positional()) for D, d in ((12, 8), (36, 64))]
TOKENS += [(SparseTokens(tokens=L, d=d, test=4), OneQuery()) for L, d in ((8, 3), (64, 16))]


@pytest.mark.parametrize(("task", "model"), TOKENS, ids=lambda part: part.name)
def test_the_theories_networks_cost_what_they_say(task, model):
    data = task.draw(4, 0, {})
    assert model.cost(task, len(data.classes)) == model.build(data, 0).cost


@pytest.mark.parametrize("variant", [{}, {"heads": 3}, {"skip": True}, {"heads": 2, "skip": True, "outputs": 2}])
@pytest.mark.parametrize(("needs", "rate"), [((), 1.0), ((), 0.4), (("tokens",), 0.4), (("attention",), 0.4)])
def test_the_closed_form_of_the_shallow_model_is_what_the_counter_counts(scripted, needs, rate, variant):
    def decide(view, keep):
        for field in needs:
            getattr(view, field)
        return Keep(torch.arange(keep).expand(len(view.index), keep))

    L, m = 20, 32
    network = ShallowViT(
        np.random.default_rng(0), np.eye(8)[:, :4], L, m=m, first=FirstWeights(0.1, 0.2, 0.1), **variant
    )
    actor = Actor(scripted(decide, needs=needs), Budget(keep_rate=rate), network.cost, None, 0)
    acting = actor.begin(torch.arange(1), 0, None, training=False)
    # The read-out is a sum of elementwise products, which the counter does not count.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.rand(1, L, 8), acting)
    result = counter.get_total_flops() / 2 + round(rate * L) * m * variant.get("outputs", 1)
    assert network.cost.macs(acting.steps) == result
    assert acting.steps == actor.planned


@pytest.mark.parametrize(
    ("needs", "scoring", "letters"),
    [
        ({"tokens"}, "", ""), ({"keys"}, "", "k"), ({"queries", "values"}, "", "qv"),
        ({"keys", "attention"}, "received", ""), ({"values", "attention"}, "received", "v"),
    ],
)  # fmt: skip
def test_what_is_projected_only_to_score_is_counted_once(needs, scoring, letters):
    """Queries and keys of the scoring attention are counted with it."""
    L, d, m, d_h, d_v = 16, 10, 7, 5, 3
    for cost, widths in (
        (ShallowCost(L, d, d, d, m), {"q": d, "k": d, "v": d}),
        (TwoLayerCost(L, d, d_h, d_v), {"q": d_h, "k": d_h, "v": d_v}),
    ):
        (step,) = cost.steps(Traits("input", needs), (0,), (8,))
        assert (step.scoring, step.projected) == (scoring, letters)
        bare = cost.macs([replace(step, projected="")])
        assert cost.macs([step]) - bare == L * d * sum(widths[letter] for letter in letters)
        (whole,) = cost.steps(Traits("input", needs), (0,), (L,))
        assert (whole.scoring, whole.projected) == ("", "")
    values = PositionalCost(L, d)
    assert values.macs(values.steps(Traits("input", {"values"}), (0,), (8,))) == 8 * (d + 8) + L * d


MACS = {  # of n of L tokens, and of the scoring attention
    "two layers": (lambda n: 2 * n * D * 10 + n * n * 10 + n * (D + 1), 2 * L * D * 10 + L * L * 10),
    "positional": (lambda n: n * D + n * n, 0),
    "one query": (lambda n: n * (2 * D + 1), L * D),
}


@pytest.mark.parametrize("name", MACS)
def test_macs_fall_with_the_tokens_and_attention_to_choose_by_is_paid_for(name):
    cost, (macs, scoring) = built(name).cost, MACS[name]
    for n in range(1, L + 1):
        assert cost.macs(cost.steps(Traits("input", {"tokens"}), (0,), (n,))) == macs(n)
        scored = cost.macs(cost.steps(Traits("attention", {"attention"}), (0,), (n,)))
        assert scored == macs(n) + (0 if n == L else scoring)


@pytest.mark.parametrize(("name", "model"), [("two", TwoLayer(d_h=128, d_v=64)), ("one", OneQuery())])
def test_dense_macs_are_half_of_the_counted_operations(name, model):
    net = model.build(data_of(1, tokens=16, d=256), 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 16, 256))
    by_vector = "aten.mv" in str(counter.get_flop_counts())
    # W_V w_O is the same for all samples; products of the tokens with a query or read-out may be counted or not.
    unseen = -net.W_V.numel() * by_vector if name == "two" else 16 * 256 * (not by_vector)
    assert net.cost.macs([Step(16, 16)]) == pytest.approx(counter.get_total_flops() / 2 + unseen, rel=0.01)
