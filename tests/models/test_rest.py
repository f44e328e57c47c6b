"""Tokens that rest for one block: comparison with float64 loops, MACs, and errors."""

import copy
from contextlib import nullcontext

import pytest
import torch
from eva_vits import EVAS, SIGLIPS, unfused
from torch.utils.flop_counter import FlopCounterMode
from vits import ARCHITECTURES, B, N, images, vit

from sparsebench import Rest, Strategy, StrategyError, UnsupportedError, UserError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.base import complaint
from sparsebench.strategy.budget import Budget
from sparsebench.testing.networks import build
from sparsebench.training.evaluation import evaluate
from sparsebench.training.steps import Samples

COUNTED = ("plain", "4 registers", "distilled", "average pool without class token", "PE", "SigLIP")
EVERY = ARCHITECTURES | EVAS | SIGLIPS


def some(view, keep):
    """Return positions of resting tokens, different in each sample and block, in random order."""
    rng = torch.Generator().manual_seed(view.block)
    return torch.rand(view.index.shape, generator=rng).argsort(dim=1)[:, keep:]


def rests(plan, needs=("tokens",)):
    """Return a strategy with this plan, a function of the view and the number of tokens that take part."""

    class Rests(Strategy):
        name, site, how = "rests", "block", "rest"

        def plan(self, view, keep):
            return plan(view, keep)

    Rests.needs = frozenset(needs)
    return Rests()


def begin(network, strategy, n=B, training=False, **budget):
    actor = Actor(strategy, Budget(**({"keep_rate": 0.5} | budget)), network.cost, network.grid, stream=7)
    return actor.begin(torch.arange(n), 0, None, training=training)


@torch.no_grad()
def by_loops(network, pixels, resting):
    """Return the logits if the tokens `resting[block][sample]` skip the block, computed one sample at a time."""
    model, P = copy.deepcopy(network.module).double(), network.prefix

    def loop(number, block):
        def forward(x, rope=None, **_no_mask):
            out = x.clone()
            for b in range(len(x)):
                rows = [row for row in range(x.shape[1]) if row - P not in resting.get(number, {}).get(b, ())]
                turns = {} if rope is None else {"rope": rope[..., [row - P for row in rows if row >= P], :].double()}
                new = block(x[b, rows][None], **turns)[0]
                for place, row in enumerate(rows):
                    out[b, row] = new[place]
            return out

        return forward

    for number, block in enumerate(model.blocks):
        block.forward, bare = None, type(block).forward.__get__(block)
        block.forward = loop(number, bare)
    return model((pixels.double() - 0.5) / 0.5)


@pytest.mark.parametrize(("kind", "blocks"), [*((kind, (0, 2)) for kind in EVERY), ("plain", (3,)), ("PE", (3,))])
def test_those_that_rest_have_skipped_that_block_alone(kind, blocks):
    network, seen = DeepViT(EVERY[kind]()), {}

    def plan(view, keep):
        if view.block not in blocks:
            return None
        index = some(view, keep)
        seen[view.block] = {b: set(row) for b, row in enumerate(index.tolist())}
        return Rest(index)

    pixels = images(network)
    acting = begin(network, rests(plan), blocks=blocks[:1])
    with torch.no_grad():
        out = network(pixels, acting)
        dense = network(pixels)
    assert set(seen) == set(blocks)
    torch.testing.assert_close(out.double(), by_loops(network, pixels, seen), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, dense, atol=1e-3)
    assert acting.index.tolist() == [list(range(network.cost.tokens))] * B
    assert acting.sizes.eq(1).all() and acting.resting == 0


@pytest.mark.parametrize(
    ("kind", "needs"),
    [*((kind, ("tokens",)) for kind in EVERY), *((kind, ("previous_attention",)) for kind in COUNTED)],
)
def test_where_none_rests_it_is_the_dense_network_to_the_bit(kind, needs):
    network = DeepViT(EVERY[kind]())
    acting = begin(network, rests(lambda view, keep: Rest(view.index[:, :0]), needs), blocks=(1,))
    acting.keep, acting.acts = {1: network.cost.tokens}, lambda block: block > 0
    pixels = images(network)
    with torch.no_grad():
        assert torch.equal(network(pixels, acting), network(pixels))
    assert len(acting.decisions) == len(network.module.blocks) - 1


def test_a_count_holds_until_the_next_and_all_are_asked_about_each_time():
    network, asked = DeepViT(vit()), []

    def plan(view, keep):
        asked.append((view.block, view.index.shape[1], keep))
        return Rest(some(view, keep))

    acting = begin(network, rests(plan), counts=(9, 5), blocks=(0, 2), keep_rate=None)
    network(images(network), acting)
    assert asked == [(0, N, 9), (1, N, 9), (2, N, 5), (3, N, 5)]
    assert acting.steps == acting.actor.planned
    assert [(step.tokens_in, step.tokens_out, step.rested) for step in acting.steps] == [(9, 9, 7)] * 2 + [
        (5, 5, 11)
    ] * 2


@pytest.mark.parametrize(
    ("kind", "needs"),
    [*((kind, ("tokens",)) for kind in ("plain", "PE")), *((k, ("previous_attention",)) for k in COUNTED)],
)
def test_it_costs_what_the_counter_counts(kind, needs):
    """Rows of class attention are element-wise products and sums, which the counter misses; they are counted here."""
    network = DeepViT(unfused(EVERY[kind]()).requires_grad_(False))
    acting = begin(network, rests(lambda view, keep: Rest(some(view, keep)), needs), n=1, blocks=(1, 3))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images(network, 1), acting)
    looked = [step for step in acting.steps if step.scoring == "class"]
    assert len(looked) == (3 if network.class_rows and needs == ("previous_attention",) else 0)
    width = network.cost.blocks[0].width
    unseen = sum(network.class_rows * (network.prefix + step.tokens_in) * width for step in looked)
    assert network.cost.macs(acting.steps) == counter.get_total_flops() / 2 + unseen
    assert acting.steps == acting.actor.planned


def test_previous_attention_is_of_tokens_that_took_part():
    """Resting tokens keep their previous value; block 0 is the dense model's."""
    network, views = DeepViT(vit()), []

    def plan(view, keep):
        views.append((view.previous_attention.clone(), some(view, keep)))
        return Rest(views[-1][1])

    network(
        images(network), begin(network, rests(plan, ["previous_attention"]), counts=(6,), blocks=(1,), keep_rate=None)
    )
    (first, rest_1), (second, rest_2), (third, _) = views
    for before, resting, after in ((first, rest_1, second), (second, rest_2, third)):
        assert torch.equal(before.gather(1, resting), after.gather(1, resting))
        active = torch.ones(B, N, dtype=torch.bool).scatter(1, resting, False)
        assert (before != after)[active].all()
    dense = begin(network, rests(lambda view, keep: None), blocks=(1,))
    network(images(network), dense)
    assert dense.previous is None


def test_each_plan_is_read_where_that_waits_for_nothing():
    network, index = DeepViT(vit()), [torch.tensor([[4, 4]]), torch.tensor([[4, 7]])]
    strategy = rests(lambda view, keep: Rest(index.pop()))
    actor = Actor(strategy, Budget(counts=(14,), blocks=(3,)), network.cost, network.grid, stream=7)
    for refused in (nullcontext(), pytest.raises(StrategyError, match="names a token twice")):
        with refused:
            network(images(network, 1), actor.begin(torch.arange(1), 0, None, training=False))


def test_attention_before_the_first_block_is_refused():
    attends = rests(lambda view, keep: Rest.all_but_top(view.previous_attention, keep), ["previous_attention"])
    with pytest.raises(
        UserError,
        match=r"budget blocks; got 0\+2; allowed: 1 to 3 for this model; .*the attention of the previous block",
    ):
        begin(DeepViT(vit()), attends, blocks=(0, 2))
    assert list(begin(DeepViT(vit()), attends, schedule="every").keep) == [1, 2, 3]
    one = DeepViT(vit(depth=1))
    with pytest.raises(UnsupportedError, match="needs previous_attention, which this model cannot give"):
        one(images(one), begin(one, attends))


@pytest.mark.parametrize(
    "change",
    [{"site": "attention"}, {"site": "input"}, {"adaptive": True}, {"trained": True}],
    ids=lambda change: str(change),
)
def test_a_class_that_cannot_rest_is_refused(change):
    cls = type(rests(lambda view, keep: None))
    assert complaint(cls) is None
    assert "lets tokens rest, so its site must be 'block'" in complaint(type("Odd", (cls,), change))


def test_what_was_chosen_is_noted_of_all_tokens_each_time():
    """In each block of the budget all tokens have a score."""
    case = build("class token")
    strategy = rests(lambda view, keep: Rest.all_but_top(view.tokens.sum(dim=2), keep))
    depth, tokens = case.network.cost.depth, case.network.cost.tokens
    budget = Budget(counts=(tokens // 2, tokens // 4), blocks=(0, depth - 1))
    actor = Actor(strategy, budget, case.network.cost, case.network.grid, stream=1)
    samples = Samples(case.inputs, case.labels, case.relevance)
    done = evaluate(case.network, actor, samples, case.recipe, choices=True)
    assert [choice.block for choice in done.choices] == [-1, 0, depth - 1]
    for choice, count in zip(done.choices[1:], budget.counts, strict=True):
        assert (choice.kept.sum(axis=1) == count).all() and choice.scored
        lowest = choice.scores.argsort(axis=1)[:, : tokens - count]
        assert not choice.kept[[[row] for row in range(len(lowest))], lowest].any()
