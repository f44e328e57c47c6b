import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sparsebench_plugins.ats import ATS
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.random import Random
from sparsebench_plugins.random_inside import RandomInside
from timm.layers import Attention

from sparsebench.models.actor import Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Merge
from sparsebench.tasks.images import Composite
from sparsebench.training.evaluation import evaluate, influences
from sparsebench.training.steps import Samples

n, N = 5, 16
TASK = Composite(canvas=16, foreground=10, test=n)
DATA = TASK.draw(4, 0, {})


def network_of(**options):
    network = Vit(dim=16, depth=4, heads=2, patch=4, **options).build(DATA, 0)
    with torch.no_grad():  # initially all probabilities are nearly equal
        for parameter in network.module.parameters():
            parameter.mul_(3)
    network.module.double()
    return network


@pytest.fixture(scope="module")
def network():
    return network_of()


def samples():
    split = DATA.test
    return Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance_on((4, 4)))))


def actor_of(strategy, network, **budget):
    return Actor(strategy, Budget(**budget), network.cost, network.grid, 3)


def mixed(attn, x, P):
    """Return the attention output for (1, T, C) tokens with position embeddings P."""
    if type(attn) is Attention:
        return attn(x)
    q, k, v = (F.linear(y, w, b).unflatten(2, (2, 8)).transpose(1, 2) for y, w, b in
               zip((P, P, x), attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True))  # fmt: skip
    return attn.proj((torch.softmax(q @ k.mT / 8**0.5, dim=-1) @ v).transpose(1, 2).flatten(2))


@torch.no_grad()
def by_hand(network, image, without, stays, site):
    """Return the probabilities of one image, with timm's blocks run one by one on the given patches."""
    vit = network.module.eval()
    x = vit._pos_embed(vit.patch_embed((image[None].double() / 255 - 0.5) / 0.5))
    there = list(range(N))

    def only(x, wanted):
        rows = [0] + [1 + place for place, patch in enumerate(there) if patch in wanted]
        there[:] = [patch for patch in there if patch in wanted]
        return x[:, rows]

    x = only(x, set(there) - {without})
    if site == "input" and stays:
        x = only(x, stays[0])
    for number, block in enumerate(vit.blocks):
        if site == "block" and number in stays:
            x = only(x, stays[number])
        x = x + mixed(block.attn, block.norm1(x), vit.pos_embed[:, [0, *(1 + patch for patch in there)]])
        if site == "attention" and number in stays:
            x = only(x, stays[number])
        x = x + block.mlp(block.norm2(x))
    return vit.forward_head(vit.norm(x)).softmax(dim=1)[0]


def expected(network, stays=None, site="input"):
    """Return (n, N) z from the kept patches of each image, by block."""
    z = np.zeros((n, N))
    for i, image in enumerate(torch.from_numpy(DATA.test.inputs)):
        own = {block: set(patches[i].tolist()) for block, patches in (stays or {}).items()}
        p, c = by_hand(network, image, None, own, site).max(dim=0)
        for k in range(N):
            if site == "input" and own and k not in own[0]:
                continue
            z[i, k] = abs(float(p - by_hand(network, image, k, own, site)[c]))
    return z


@pytest.mark.parametrize("attention", ["content", "positional"])
def test_without_a_strategy_tokens_go_after_the_embedding(attention):
    """Without a strategy each token is discarded after the position embedding."""
    network = network_of(attention=attention)
    result = influences(network, None, samples(), n)[0]
    assert result.shape == (n, N) and result.max() > 0.01
    np.testing.assert_allclose(result, expected(network), atol=1e-9)


@pytest.mark.parametrize("strategy", [Random(), RandomInside(), AttnTopK()], ids=lambda s: s.site)
def test_what_a_strategy_chose_is_replayed_without_each_token(network, strategy):
    own = {} if strategy.site == "input" else {"blocks": (0, 2, 3)}
    actor = actor_of(strategy, network, keep_rate=0.7, **own)
    _, acting = samples().forward(network, actor, torch.arange(n), visit=0, training=False)
    stays = {decision.block: decision.after for decision in acting.decisions}
    assert len(stays) == (1 if strategy.site == "input" else 3)
    result = influences(network, actor, samples(), n)[0]
    np.testing.assert_allclose(result, expected(network, stays, strategy.site), atol=1e-9)
    assert result.max() > 0.01
    if strategy.site == "input":
        assert ((result == 0).sum(axis=1) == N - int(0.7 * N)).all()


@pytest.mark.parametrize("attention", ["content", "positional"])
@pytest.mark.parametrize("site", ["input", "attention", "block"])
def test_in_whatever_order_tokens_go_on_the_same_are_discarded(scripted, site, attention):
    network, blocks = network_of(attention=attention), None if site == "input" else (1, 3)
    order = torch.rand(n, N, generator=torch.Generator().manual_seed(5)).double()
    result = []
    for ordered in (False, True):
        strategy = scripted(lambda v, keep, o=ordered: Keep(order.gather(1, v.index).topk(keep).indices, ordered=o),
                            site=site)  # fmt: skip
        result.append(influences(network, actor_of(strategy, network, keep_rate=0.6, blocks=blocks), samples(), n)[0])
    np.testing.assert_allclose(*result, atol=1e-9)
    assert result[0].max() > 0.01


def test_only_the_first_images_have_influences(network):
    """Only the first images are looked at and each alike whatever comes with it."""
    actor = actor_of(Random(), network, keep_rate=0.5)
    every = influences(network, actor, samples(), 99)[0]
    assert every.shape == (n, N)
    np.testing.assert_allclose(influences(network, actor, samples(), 2)[0], every[:2], atol=1e-12)


@pytest.mark.parametrize("strategy", [None, Random()])
def test_the_predictions_are_those_of_the_test(network, strategy):
    actor = strategy and actor_of(strategy, network, keep_rate=0.3)
    result = influences(network, actor, samples(), n)
    assert result[1].tolist() == evaluate(network, actor, samples(), TASK.recipe()).predicted.tolist()


def test_fewer_go_together_while_there_is_no_memory(network):
    class Hungry:
        def __init__(self, most):
            self.came, self.most = [], most
            self.module, self.cost = network.module, network.cost

        def __call__(self, inputs, acting=None):
            self.came.append(len(inputs))
            if len(inputs) > self.most:
                raise torch.OutOfMemoryError("too many")
            return network(inputs, acting)

    hungry = Hungry(20)
    result = influences(hungry, None, samples(), n)[0]
    assert hungry.came[:8] == [5, 80, 5, 80, 5, 64, 5, 32] and set(hungry.came[8:]) == {5, 16}
    np.testing.assert_allclose(result, influences(network, None, samples(), n)[0], atol=1e-12)
    with pytest.raises(torch.OutOfMemoryError):
        influences(Hungry(0), None, samples(), n)


def fuse(view, keep):
    return Keep(view.index[:, : keep - 1], fuse=torch.ones(view.index.shape))


def merge(view, keep):
    return Merge(torch.arange(N).expand(view.index.shape) // 2)


@pytest.mark.parametrize("decide", [fuse, merge, None], ids=["fuse", "merge", "numbers of their own"])
def test_merged_tokens_have_no_influences(network, scripted, decide):
    """Tokens that are not only removed alike in all images cannot be told apart."""
    strategy = ATS() if decide is None else scripted(decide)
    assert influences(network, actor_of(strategy, network, keep_rate=0.5), samples(), n) is None
