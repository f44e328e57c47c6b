"""The schedules that a strategy may have at a share of the MACs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.measure.schedule import NEAR, Candidate, candidates, last_block
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget


def network(depth: int = 12, tokens: int = 144, channels: int = 64, reads_patches: bool = False) -> VitCost:
    block = BlockCost(3 * channels**2, channels**2, 8 * channels**2, channels)
    return VitCost(
        tokens, 1, 1, 48 * channels, 10 * channels, (block,) * depth, channels, 4, reads_patches=reads_patches
    )


def proposed(traits: Traits, cost: VitCost, macs: float) -> list[Candidate]:
    return candidates(Budget(macs=macs, schedule="auto"), traits, cost)


TRAITS = st.builds(
    lambda site, needs, schedule, most, fuses: Traits(site, needs, schedule, most, fuses),
    st.sampled_from(["attention", "block"]),
    st.sampled_from([(), ("class_attention",), ("keys",)]),
    st.sampled_from(["stages", "every", "late"]),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)


@given(
    TRAITS,
    st.integers(2, 24),
    st.sampled_from([16, 64, 144, 196]),
    st.booleans(),
    st.floats(0.2, 0.99),
)
def test_candidates_differ_have_the_macs_of_the_budget_and_act_where_it_has_an_effect(
    traits: Traits, depth: int, tokens: int, reads_patches: bool, macs: float
) -> None:
    cost = network(depth, tokens, reads_patches=reads_patches)
    found = proposed(traits, cost, macs)
    dense = cost.macs(cost.dense())
    assert 1 <= len(found) <= 8
    counts = [(each.schedule.blocks, each.schedule.counts) for each in found]
    assert len(set(counts)) == len(counts)
    for each in found:
        steps = cost.steps(traits, each.schedule.blocks, each.schedule.counts)
        assert each.share == pytest.approx(cost.macs(steps) / dense)
        assert len(found) == 1 or abs(each.share / macs - 1) <= NEAR
        last = depth - 1 if reads_patches or traits.site == "block" else max(0, depth - 2)
        assert each.schedule.blocks[0] >= 0 and each.schedule.blocks[-1] <= last


def test_the_default_comes_first_and_leaves_the_last_block_where_it_has_no_effect() -> None:
    cost = network(5, 64)
    first, *_ = proposed(Traits("attention", ("class_attention",)), cost, 0.5)
    assert (first.name, first.schedule.blocks) == ("default", (1, 2, 3))
    first, *_ = proposed(Traits("block"), cost, 0.5)
    assert (first.name, first.schedule.blocks) == ("default", (1, 2, 4))
    first, *_ = proposed(Traits("attention"), network(12), 0.5)
    assert (first.name, first.schedule.blocks) == ("default", (3, 6, 9))


def test_one_removal_and_stages_that_begin_early_are_among_them() -> None:
    found = {each.name: each.schedule.blocks for each in proposed(Traits("attention"), network(12), 0.45)}
    assert found["stages from block 1"] == (1, 4, 7) and found["once in block 2"] == (2,)
    assert found["every block"] == tuple(range(11))


def test_a_strategy_that_reads_the_attention_before_it_never_acts_in_block_0() -> None:
    found = proposed(Traits("block", ("previous_attention",)), network(12), 0.45)
    assert len(found) > 1 and min(each.schedule.blocks[0] for each in found) == 1


def test_if_no_schedule_has_the_macs_the_closest_is_the_only_one() -> None:
    pairs = Traits("attention", ("keys",), schedule="every", most=0.5)
    (only,) = proposed(pairs, network(2, 16), 0.3)
    assert abs(only.share / 0.3 - 1) > NEAR


@pytest.mark.parametrize(
    ("traits", "reads_patches", "last"),
    [
        (Traits("attention"), False, 4),
        (Traits("attention"), True, 5),
        (Traits("attention", reads_out=True), False, 5),
        (Traits("block"), False, 5),
    ],
)
def test_the_last_block_with_an_effect(traits: Traits, reads_patches: bool, last: int) -> None:
    assert last_block(traits, network(6, reads_patches=reads_patches)) == last
