"""Every strategy with every schedule and disposal it can have: it runs, keeps the counts, and costs what was asked."""

import pickle
from itertools import product

import pytest
import timm
import torch
from tiny import SHIPPED, B, N, act, images, vit
from token_sets import OneLayer, Sets

from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import VitCost
from sparsebench.measure.schedule import TokenSchedule
from sparsebench.models.timm_parts import vit_cost
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import DISPOSALS
from sparsebench.training.evaluation import patches_in

SCHEDULES = ("stages", "every", "late")
SPENDING = {name: cls for name, cls in SHIPPED.items() if cls.budgeted and not cls.trains_only}
EACH_WAY = ("attn_topk", "patch_variance", "radial")
"""The fast tests run only these with every disposal: one in attention, one at the input, one without "squeeze"."""
SCHEDULED = (*EACH_WAY, "tome", "mctf", "ats", "idle_vit", "diffrate")
"""The fast tests run only these with every schedule: they drop, merge, are adaptive, let rest, or combine these."""
TABLE = [
    pytest.param(
        cls, disposal, schedule, id=f"{name}-{disposal}-{schedule}",
        marks=[pytest.mark.slow] * (
            (name not in EACH_WAY and disposal != cls.model_fields["disposal"].default)
            or (name not in SCHEDULED and schedule != "stages")
        ),
    )
    for (name, cls), disposal, schedule in product(SPENDING.items(), DISPOSALS, SCHEDULES)
    if disposal in cls.allowed_disposals() and (schedule == "stages" or cls.site != "input")
]  # fmt: skip
NO_PLACE = {"radial"}
"""Strategies that need the positions of tokens, which mixed tokens do not have."""
TARGETS = (0.65, 0.37)
"""Fractions of the dense MACs: about those of DeiT-S at keep rates 0.7 and 0.25."""
OUT_OF_REACH = {
    ("tome", "stages", 0.37): 0.4965,
    ("tome_cis", "stages", 0.37): 0.4965,
    ("saint", "stages", 0.37): 0.4964,
    ("tofu", "stages", 0.37): 0.4965,
    ("pitome", "stages", 0.37): 0.4970,
    ("mctf", "stages", 0.37): 0.4832,
    ("dtem", "stages", 0.37): 0.4983,
    ("vid_tldr", "stages", 0.37): 0.5016,
    ("ppt", "stages", 0.37): 0.4965,
}
"""The smallest cost of these strategies on DeiT-S. They merge pairs, so at most half of the tokens leave at once: after
three stages 98, 49 and 25 of 196 stay. vid_tldr also computes more of the attention. All other strategies reach
the target, and these reach it with their own schedule, in every block.
"""


@pytest.fixture(scope="module")
def network():
    return vit()


@pytest.fixture(scope="module")
def deit_small() -> VitCost:
    with torch.device("meta"):
        return vit_cost(timm.create_model("deit_small_patch16_224"))


def relevance():
    return torch.rand(B, N, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("cls", "disposal", "schedule"), TABLE)
def test_it_keeps_the_counts_and_ignores_the_batch(network, cls, disposal, schedule):
    """It runs keeps to the counts and chooses alike alone and in a batch."""
    strategy, mask = cls(disposal=disposal), relevance()
    budget = Budget(keep_rate=0.4, schedule=schedule)
    schedule_of_budget = TokenSchedule(budget, strategy.traits(), network.cost)
    counts = schedule_of_budget.counts
    if cls.name in NO_PLACE and disposal == "squeeze":
        with pytest.raises(UnsupportedError, match="no place"):
            act(strategy, network, images(), mask, 0.4, schedule=schedule)
        return
    acting, out = act(strategy, network, images(), mask, 0.4, schedule=schedule)
    at = dict(zip(schedule_of_budget.blocks, counts, strict=True))
    realised = {d.block: d.after.shape[1] for d in acting.decisions}
    assert counts[-1] < N
    if not strategy.adaptive:
        if strategy.rests:  # a count holds until the next, and at the end all tokens are present
            realised = {block: realised[block] for block in at}
        assert realised.items() <= at.items() and acting.index.shape == (B, N if strategy.rests else counts[-1])
    assert out.shape == (B, 5) and bool(out.isfinite().all())
    alone, single = act(strategy, network, images()[2:3], mask[2:3], 0.4, torch.tensor([2]), schedule=schedule)
    assert torch.equal(patches_in(alone.index, N)[0], patches_in(acting.index, N)[2])
    torch.testing.assert_close(single[0], out[2], atol=1e-5, rtol=1e-4)
    if not strategy.adaptive:
        assert network.cost.macs(acting.steps) == network.cost.macs(acting.actor.planned)


@pytest.mark.parametrize(("cls", "disposal", "schedule"), TABLE)
def test_on_deit_small_it_costs_what_was_requested(deit_small, cls, disposal, schedule):
    """On DeiT-S it costs what was asked for or the nearest that it can."""
    traits = cls(disposal=disposal).traits()
    dense = deit_small.macs(deit_small.dense())

    def share(amount):
        budget = Budget(macs=amount, schedule=None if traits.site == "input" else schedule)
        planned = TokenSchedule(budget, traits, deit_small)
        assert planned.kind == (traits.schedule if traits.site == "input" else schedule)
        return planned.macs / dense

    for target in TARGETS:
        if nearest := OUT_OF_REACH.get((cls.name, schedule, target)):
            assert share(target) == share(1e-3) == pytest.approx(nearest, abs=5e-5)
        else:
            assert share(target) == pytest.approx(target, rel=0.02)


SETS_REFUSE = {
    **dict.fromkeys(("tome", "pitome", "mctf", "atc", "dpc_knn", "diffrate", "vid_tldr", "tps", "ppt", "pru_merge",
                     "vision_zip"), "no sizes: tokens can be kept or removed, not fused, merged"),
    **dict.fromkeys(("dynamic_vit", "a_vit", "tnt", "patch_merger", "token_learner", "sit", "sinkhorn",
                     "diffrate_search", "cropr", "dtem"),
                    "is trained with the network: this model is trained by steps in closed form"),
    "tome_cis": "needs class_attention", "saint": "keeps another number of tokens of each sample",
    "ats": "keeps another number of tokens of each sample", "evit": "changes the number of tokens while training",
    "idle_vit": "nothing after it", "downsample": "have no places", "radial": "without a grid",
    "fisher_mask": "shows no gradients", "patch_variance": "not made of pixels", "gradient_energy": "two pixels a side",
    "rep_shift": "needs branch", "gtp": "builds something from the tokens",
}  # fmt: skip
"""Strategies that cannot act on one attention layer over a set of tokens, and why."""


@pytest.mark.parametrize("name", SHIPPED)
def test_on_a_network_of_token_sets_it_keeps_the_counts_or_says_why_not(name):
    cls, data = SHIPPED[name], Sets(tokens=20, relevant=0.4, confusion=0.1).draw(6, 0, {})
    network, tokens = OneLayer(m=8).build(data, 0), torch.from_numpy(data.train.inputs)
    if name in SETS_REFUSE:
        with pytest.raises(UnsupportedError, match=SETS_REFUSE[name]):
            act(cls(), network, tokens)
    else:
        acting, _ = act(cls(), network, tokens, torch.from_numpy(data.train.relevance))
        assert acting.index.shape == (6, 10 if name in SPENDING else 20)


@pytest.mark.parametrize("name", ["tome", "pitome", "mctf", "atc", "dpc_knn"])
@torch.no_grad()
def test_sizes_add_up_to_all_patches_where_nothing_is_dropped(network, name):
    acting, _ = act(SHIPPED[name](), network, images(), rate=0.6)
    assert acting.sizes.sum(dim=1).tolist() == [16.0] * 4 and acting.sizes.max() > 1


@pytest.mark.parametrize("name", ["tome", "tofu", "pitome", "mctf", "atc", "diffrate"])
@torch.no_grad()
def test_attention_weighs_sizes_where_it_is_asked_to(network, name):
    out = []
    for proportional in (True, False):
        strategy = pickle.loads(pickle.dumps(SHIPPED[name](proportional=proportional)))
        acting, logits = act(strategy, network, images(), rate=0.6, blocks=(2, 3))
        assert strategy.weighs_sizes == acting.weighs_sizes == proportional and acting.sizes.max() > 1
        out.append(logits)
    assert float((out[0] - out[1]).abs().max()) > 1e-3
    assert SHIPPED[name]().proportional == (name not in ("pitome", "tofu"))


def test_what_has_no_say_in_it_does_not_weigh_sizes():
    assert not SHIPPED["k_medoids"]().weighs_sizes and not SHIPPED["dpc_knn"]().weighs_sizes
    with pytest.raises(ValueError, match="proportional"):
        SHIPPED["k_medoids"](proportional=True)
