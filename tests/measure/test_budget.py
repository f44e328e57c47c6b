import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from token_sets import SetCost

from sparsebench.errors import UserError
from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.measure.schedule import TokenSchedule, cap_counts, counts_at
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import AMOUNTS, FULL, Budget

BLOCK = BlockCost(qkv=3 * 64**2, proj=64**2, mlp=8 * 64**2, width=64)
VIT = VitCost(tokens=64, prefix=1, class_rows=1, embed=48 * 64, head=640, blocks=(BLOCK,) * 4)
CLASSLESS = VitCost(tokens=64, prefix=0, class_rows=0, embed=48 * 64, head=640, blocks=(BLOCK,) * 4)
SETS = SetCost(tokens=50, d=10, m=256)
RATES = st.integers(1, 100).map(lambda percent: Fraction(percent, 100))
CONVENTIONS = ("power-floor", "compound-ceil")


@given(RATES, st.integers(1, 400), st.integers(1, 4))
def test_counts_are_those_of_exact_arithmetic(rate, tokens, number):
    """Counts are those of exact arithmetic and rounding up that of floating point."""
    floor = tuple(max(1, math.floor(rate**s * tokens)) for s in range(1, number + 1))
    assert counts_at(float(rate), "power-floor", tokens, number) == floor
    ceil = [tokens]
    for _ in range(number):
        ceil.append(math.ceil(float(rate) * ceil[-1]))
    assert counts_at(float(rate), "compound-ceil", tokens, number) == tuple(ceil[1:])


def test_rounding_errors_of_a_product_are_rounded_away():
    """A product with rounding error is rounded down exactly and up as published."""
    assert 0.29 * 100 < 29 and counts_at(0.29, "power-floor", 100, 1) == (29,)
    assert 0.07 * 100 > 7 and counts_at(0.07, "compound-ceil", 100, 1) == (8,)


def test_a_budget_has_these_fields_and_whole_numbers_are_real_ones():
    for wrong in ({"macs": 0.5, "rate": 0.5}, {"keep_rate": 0.5, "convention": "round"}):
        with pytest.raises(ValidationError, match=list(wrong)[1]):
            Budget(**wrong)
    assert Budget(macs=1) == Budget(macs=1.0) == FULL and Budget(macs=1).model_dump_json() == FULL.model_dump_json()
    assert Budget.model_validate_json(Budget(keep_rate=0.7, blocks=(1, 2)).model_dump_json()).blocks == (1, 2)


def test_different_budgets_have_different_labels():
    keep, macs = Budget(keep_rate=0.5), Budget(macs=0.5)
    changes = ({}, {"convention": "compound-ceil"}, {"blocks": (1, 2)})
    budgets = [budget.model_copy(update=change) for budget in (keep, macs, Budget(macs=0.65)) for change in changes]
    assert len({budget.label for budget in budgets}) == len(budgets)


@pytest.mark.parametrize(
    ("budget", "amount"),
    [
        (Budget(macs=0.5), "macs 0.5"),
        (Budget(macs=0.5, blocks=(1, 12)), "macs 0.5"),
        (Budget(macs=0.5, schedule="late", gamma=2.5), "macs 0.5"),
        (Budget(macs=0.5, blocks=(0, 1), schedule="stages"), "macs 0.5"),
        (Budget(macs=0.65, schedule="every"), "macs 0.65"),
        (Budget(keep_rate=0.7, blocks=(3, 6, 9)), Budget(keep_rate=0.7).label),
        (Budget(per_block="26..0", blocks=(1,)), Budget(per_block="26..0").label),
    ],
    ids=lambda value: value.label if isinstance(value, Budget) else "",
)
def test_a_label_is_the_amount_and_then_where_tokens_leave(budget, amount):
    parts = [AMOUNTS[budget.amount].format(budget.value), budget.rounding]
    assert " ".join(filter(None, parts)) == amount
    assert budget.label == " ".join(filter(None, [amount, budget.places]))


@pytest.mark.parametrize(
    ("site", "depth", "given_", "blocks"),
    [
        *((site, *case) for site in ("attention", "block") for case in (
            (12, None, (3, 6, 9)), (24, None, (6, 12, 18)), (5, None, (1, 2, 4)), (3, None, (1, 2)))),
        ("input", 12, None, (0,)), ("attention", 1, None, (0,)), ("attention", 12, (0, 2, 11), (0, 2, 11)),
    ],
)  # fmt: skip
def test_stages_follow_each_quarter_of_the_depth_unless_others_are_given(site, depth, given_, blocks):
    cost = replace(VIT, blocks=(BLOCK,) * depth)
    assert TokenSchedule(Budget(macs=0.5, blocks=given_), Traits(site), cost).blocks == blocks


def ratios(cost, site, blocks, needs):
    dense = cost.macs(cost.dense())
    return {n: cost.macs(cost.steps(Traits(site, needs), blocks, [n])) / dense for n in range(1, cost.tokens + 1)}


ONE_STAGE = [("input", None), ("attention", (1,)), ("attention", (3,)), ("block", (2,))]


@pytest.mark.parametrize(
    ("cost", "site", "blocks", "needs"),
    [(VIT, *stage, needs) for stage in ONE_STAGE for needs in ((), ("tokens",), ("class_attention",))]
    + [(cost, site, blocks, ("received_attention",)) for cost, site, blocks in (
        (SETS, "input", None), (CLASSLESS, "attention", (0,)), (VIT, "attention", (1,)))],
)  # fmt: skip
@given(target=st.floats(0.05, 1))
@settings(max_examples=12, deadline=None)
def test_one_stage_has_the_count_nearest_to_the_target(cost, site, blocks, needs, target):
    """If the scores cost more than the removed tokens save, all tokens are kept."""
    result = ratios(cost, site, TokenSchedule(Budget(macs=0.5, blocks=blocks), Traits(site), cost).blocks, needs)
    (count,) = TokenSchedule(Budget(macs=target, blocks=blocks), Traits(site, needs), cost).counts
    assert abs(result[count] - target) <= min(abs(ratio - target) for ratio in result.values()) + 1e-12


@pytest.mark.parametrize("target", [0.4, 0.5, 0.6015625, 0.65, 0.8, 0.87, 0.95])
def test_several_stages_share_the_rate_nearest_to_the_target(target):
    blocks, needs = (1, 2, 3), ("class_attention",)
    dense = VIT.macs(VIT.dense())

    def distance(counts):
        return abs(VIT.macs(VIT.steps(Traits("attention", needs), blocks, counts)) / dense - target)

    counts = TokenSchedule(Budget(macs=target), Traits("attention", needs), VIT).counts
    every = {counts_at(k / 5000, "power-floor", 64, 3) for k in range(1, 5001)}
    assert min(max(abs(a - b) for a, b in zip(counts, other, strict=True)) for other in every) <= 1
    assert distance(counts) <= min(map(distance, every)) + 1e-12


HALVES = Budget(keep_rate=0.5, convention="compound-ceil")


@pytest.mark.parametrize(
    ("budget", "cost", "site", "needs", "counts"),
    [
        (Budget(macs=0.001), VIT, "attention", (), (1, 1, 1)),  # less than the MACs of one token
        (HALVES, VIT, "attention", (), (32, 16, 8)),
        (HALVES, VIT, "input", (), (32,)),
        (FULL, SETS, "input", ("attention",), (50,)),  # all tokens, although scores have a cost
        (FULL, VIT, "attention", ("received_attention",), (64, 64, 64)),
    ],
)
def test_a_keep_rate_is_taken_as_it_is_and_all_the_macs_keep_all_tokens(budget, cost, site, needs, counts):
    assert TokenSchedule(budget, Traits(site, needs), cost).counts == counts


@given(st.lists(st.integers(1, 196), min_size=1, max_size=12), st.sampled_from([0.3, 0.5, 1.0]))
def test_tokens_above_the_limit_per_block_leave_as_soon_as_possible(targets, most):
    """Tokens above the limit per block stay or leave as soon as possible."""
    targets = sorted(targets, reverse=True)
    never, later = cap_counts(targets, 196, most), cap_counts(targets, 196, most, later=True)
    for counts, removed in ((never, [a - b for a, b in pairwise([196, *targets])]), (later, None)):
        before = 196
        for stage, after in enumerate(counts):
            can = math.floor(most * before + 1e-9)
            assert before - after == min(before - targets[stage] if removed is None else removed[stage], can)
            before = after
    assert all(a <= b for a, b in zip(later, never, strict=True))


def test_a_budget_without_newer_fields_has_its_old_json():
    """The hash of a cell is that of its JSON, so older records must keep it."""
    old = {"macs": 0.5, "keep_rate": None, "convention": "power-floor", "blocks": None}
    assert Budget(macs=0.5).model_dump(mode="json") == old and Budget(**old) == Budget(macs=0.5)
    late = Budget(macs=0.5, schedule="late", gamma=3)
    assert late.model_dump(mode="json") == old | {"schedule": "late", "gamma": 3.0}
    assert Budget.model_validate_json(late.model_dump_json()) == late
    assert Budget(per_block=8).model_dump(mode="json") == old | {"macs": None, "per_block": 8}


ATTENTION = Traits("attention", ("tokens",), "every", 0.5)
DEEP = VitCost(tokens=196, prefix=1, class_rows=1, embed=1, head=1, blocks=(BLOCK,) * 12)


@pytest.mark.parametrize(
    ("budget", "counts"),
    [
        (Budget(per_block="26..0"), (170, 147, 126, 108, 92, 78, 67, 58, 51, 47, 45, 45)),
        (Budget(per_block="0..26"), (196, 194, 190, 183, 174, 163, 149, 133, 115, 94, 71, 45)),
        (Budget(per_block="4..2", blocks=(3, 6, 9)), (192, 189, 187)),
        (Budget(per_block=13, blocks=(3, 6, 9)), (183, 170, 157)),
        (Budget(ratio=0.9), (177, 160, 144, 130, 117, 106, 96, 87, 79, 72, 65, 59)),
        (Budget(ratio=1.0), (196,) * 12),
        (Budget(ratio=0.3, blocks=(0, 1)), (98, 49)),  # at most half at once
        (Budget(counts=(196, 150, 100), blocks=(2, 3, 11)), (196, 150, 100)),
        (Budget(counts=tuple(range(196, 184, -1))), tuple(range(196, 184, -1))),
    ],
    ids=lambda value: value.label if isinstance(value, Budget) else "",
)
def test_amounts_per_block_give_their_counts(budget, counts):
    assert TokenSchedule(budget, ATTENTION, DEEP).counts == counts
    again = Budget.model_validate_json(budget.model_dump_json())
    assert again == budget and TokenSchedule(again, ATTENTION, DEEP).counts == counts


@pytest.mark.parametrize("schedule", ["stages", "every", "late"])
def test_blocks_hold_with_every_schedule(schedule):
    budget = Budget(keep_rate=0.5, schedule=schedule, blocks=(3, 4, 11))
    schedule_of_budget = TokenSchedule(budget, Traits("attention", ("tokens",)), DEEP)
    assert schedule_of_budget.blocks == (3, 4, 11)
    expected = {"stages": (98, 49, 24), "every": (164, 131, 98), "late": (188, 175, 98)}
    assert schedule_of_budget.counts == expected[schedule]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"counts": (5, 6)}, r"token counts .*; got 5\+6; allowed: 1 or more each, never more than before"),
        ({"counts": (5, 0)}, "token counts"),
        ({"counts": ()}, "token counts"),
        ({"counts": (5, 4), "blocks": (1,)}, "2 counts for 1 blocks; allowed: one count a block"),
        ({"counts": (5,), "schedule": "every"}, "counts says how many tokens leave each block, and schedule=every"),
        ({"ratio": 0.9, "schedule": "late"}, "ratio says .* schedule=late .*; allowed: schedule=every"),
        ({"per_block": 3, "schedule": "late"}, "per_block says"),
        ({"ratio": 0}, r"got 0; allowed: \(0, 1\]"),
        ({"ratio": 1.5}, r"allowed: \(0, 1\]"),
        ({"ratio": math.nan}, r"allowed: \(0, 1\]"),
        ({"per_block": "0..0"}, "per_block.*26..0"),
        ({"per_block": "-1..3"}, "per_block.*26..0"),
        ({"per_block": 1.5}, "per_block.*26..0"),
        ({"macs": 0.5, "blocks": (3, 3)}, r"budget blocks; got 3\+3; allowed: rising numbers from 0, none twice"),
        *(({"macs": 0.5, "blocks": blocks}, "budget blocks") for blocks in ((6, 3), (-1, 3), ())),
        ({"macs": 0.5, "ratio": 0.5}, "a budget is one amount; got macs=0.5, ratio=0.5"),
        ({}, "a budget is one amount"),
        ({"macs": None}, "a budget is one amount"),
        *(
            ({key: value}, r"allowed: \(0, 1\]")
            for key in ("macs", "keep_rate")
            for value in (0, -0.1, 1.0001, 2, math.nan, math.inf, True, "0.5", [0.5])
        ),
    ],
)
def test_a_budget_that_contradicts_itself_is_a_user_error(given_, message):
    with pytest.raises(UserError, match=message):
        Budget(**given_)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(counts=(5, 4)), "token counts .*; got 2 of them; allowed: 12, one for each block"),
        (Budget(counts=(197,), blocks=(3,)), "got 197; allowed: 196 at most, the model's patches"),
        (Budget(macs=0.5, blocks=(3, 12)), r"budget blocks; got 3\+12; allowed: 0 to 11 for this model"),
    ],
)
def test_a_budget_for_another_network_is_a_user_error(budget, message):
    with pytest.raises(UserError, match=message):
        TokenSchedule(budget, ATTENTION, DEEP)


@given(rate=RATES.map(float), tokens=st.integers(2, 200), convention=st.sampled_from(CONVENTIONS))
def test_a_single_fused_token_is_scaled(rate, tokens, convention):
    traits = Traits("attention", ("tokens", "attention"), fuses=True)
    budget = Budget(keep_rate=rate, convention=convention, blocks=(0, 1))
    scaled = TokenSchedule(budget, traits, replace(DEEP, tokens=tokens)).at(1.0).scaled
    before = tokens
    for block in (0, 1):
        kept = math.ceil(rate * before)
        assert (block in scaled) == (convention == "compound-ceil" and kept == before - 1)
        before = min(before, kept + 1) if convention == "compound-ceil" else before


@pytest.mark.parametrize(
    ("budget", "ramp", "counts"),
    [
        (Budget(keep_rate=0.5, blocks=(0, 1)), 0.5, (147, 110)),  # the rate is halfway to 1
        (Budget(keep_rate=0.5), 0.0, (196,) * 3),
        (Budget(counts=(100, 51), blocks=(0, 1)), 0.5, (148, 124)),
    ],
)
def test_on_the_way_to_the_budget_fewer_tokens_leave(budget, ramp, counts):
    keep = TokenSchedule(budget, Traits("attention", ("tokens",)), DEEP).at(ramp).keep
    assert tuple(keep.values()) == counts


@pytest.mark.parametrize("budget", [Budget(keep_rate=0.7), Budget(keep_rate=0.7, blocks=(1, 2)), Budget(macs=0.6)])
def test_the_requested_share_is_the_rate_before_rounding(budget):
    schedule = TokenSchedule(budget, Traits("block", ()), VIT)
    shares = schedule.at(1.0).shares
    assert tuple(shares.values()) == tuple(schedule.rate**s for s in range(1, 1 + len(shares)))
    every = TokenSchedule(budget.model_copy(update={"schedule": "every"}), Traits("block", ()), VIT).at(1.0)
    assert every.shares == {block: k / 64 for block, k in every.keep.items()}
