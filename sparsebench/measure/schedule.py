"""Convert a budget into a schedule: the blocks in which tokens are removed, and the tokens that stay after each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import CostModel, Step, block_of_return
from sparsebench.strategy.base import Strategy, Traits
from sparsebench.strategy.budget import AUTO, Budget, Convention, Schedule

TINY = 1e-9
"""Added before rounding down: floor(0.7 * 10) could otherwise be 6, as the product may be 6.999..."""
HALVINGS = 50
"""Steps of the bisection for a keep rate."""
NEAR = 0.02
"""Largest relative difference of the MACs of a candidate from the budget."""


class BlockCounts(NamedTuple):
    """Token counts of a schedule, by the blocks in which the strategy acts.

    Attributes:
        keep: the token count after each block.
        shares: the requested share of the initial tokens after each block. In stages with a rate r it is r^s after
            stage s, before counts are rounded; otherwise it is count / tokens.
        scaled: the blocks in which only one token is fused: the token count does not change, and this token is
            multiplied by its weight.
    """

    keep: dict[int, int]
    shares: dict[int, float]
    scaled: frozenset[int]


class TokenSchedule:
    """The schedule of a strategy with a budget on a network.

    Blocks and given counts are checked when it is made. Counts for a share of the MACs are computed when they are first
    needed.

    Args:
        budget: the budget.
        traits: the properties of the strategy.
        cost: the cost model of the network, with its numbers of tokens and blocks.

    Attributes:
        kind: how tokens leave: "stages", "every" or "late".
        blocks: the blocks in which the strategy acts.

    Raises:
        UnsupportedError: the network has one block, and there are counts for several blocks, or for more tokens than it
            has.
        UserError: the network does not have these blocks, or the counts do not fit blocks, tokens or strategy.
    """

    def __init__(self, budget: Budget, traits: Traits, cost: CostModel):
        self.budget, self.traits, self.cost = budget, traits, cost
        self.kind = kind_of(budget, traits)
        self.blocks = self._blocks()
        self._check_blocks()
        self._check_counts()

    def _blocks(self) -> tuple[int, ...]:
        """Return block 0 for the input, else the budget's blocks, else those of the kind of schedule.

        The default stages are the blocks round(depth s / 4), s = 1..3: blocks 3, 6, 9 of 12, as in published methods.
        """
        budget = self.budget
        depth = self.cost.depth
        start = first_block(self.traits)
        if self.traits.site == "input" or depth == 1:
            return (0,)
        if budget.blocks is not None:
            return budget.blocks
        if self.kind == "stages":
            quarters = (round(depth * s / 4) for s in (1, 2, 3))
            last = last_allowed(self.traits, self.cost)
            return tuple(sorted({max(start, min(last, block)) for block in quarters}))
        if budget.counts is not None and len(budget.counts) == depth:
            return tuple(range(depth))
        last = last_allowed(self.traits, self.cost)
        first = min(round(self.traits.first * depth), last)
        return tuple(range(max(start, first), last + 1))

    def _check_blocks(self) -> None:
        depth = self.cost.depth
        start = first_block(self.traits)
        counts = self.budget.counts
        last = last_allowed(self.traits, self.cost)
        if self.blocks[-1] > last or (self.blocks[0] < start and depth > 1):
            raise UserError(
                "budget blocks",
                got="+".join(map(str, self.blocks)),
                allowed=f"{start} to {last} for this model",
                next_step=self._why_not_all(start, last),
            )
        if counts is None:
            return
        if len(counts) > 1 and depth == 1:
            raise UnsupportedError(f"{len(counts)} token counts are for a network of several blocks; this has one")
        if len(counts) != len(self.blocks):
            raise UserError(
                "token counts (counts)",
                got=f"{len(counts)} of them",
                allowed=f"{len(self.blocks)}, one for each block in which tokens are removed",
                next_step="name the blocks, as in blocks=3+6+9",
            )

    def _why_not_all(self, start: int, last: int) -> str:
        """Return what to do instead, if not all blocks of the network are allowed."""
        if start:
            return "choose from these; a strategy that reads the attention of the previous block begins in block 1"
        if last == self.cost.depth - 1:
            return "choose from these"
        return "choose from these; after them no block has fewer tokens"

    def _check_counts(self) -> None:
        counts, tokens = self.budget.counts, self.cost.tokens
        if counts is None:
            return
        if counts[0] > tokens:
            error = UserError("token counts (counts)", got=counts[0], allowed=f"{tokens} at most, the model's patches")
            if self.cost.depth == 1:
                # Such counts are for a deep network. The cell is not possible here, and the other cells run.
                raise UnsupportedError(str(error))
            raise error
        for before, after in pairwise((tokens, *counts)):
            removable = math.floor(self.traits.most * before + TINY)
            if before - after > removable:
                raise UserError(
                    f"token counts (counts): this strategy can remove at most {removable} of {before} tokens at once",
                    got=after,
                    allowed=f"{before - removable} or more",
                )

    @property
    def staged(self) -> bool:
        """Whether each block keeps the same share of its tokens."""
        return self.kind == "stages" or self.traits.site == "input" or self.cost.depth == 1

    @cached_property
    def rate(self) -> float | None:
        """One number from which the counts of all blocks follow, see `counts_for_rate`.

        It is one of three:

        - The keep rate of the budget.
        - For a share of the MACs: the rate with the closest MACs, found by bisection. If every block removes tokens, it
          is no share of the tokens: for few MACs it may request more removals than there are tokens.
        - None for amounts per block and counts: `counts` and `at` then take the counts from the budget, block by block.
        """
        target = self.budget.macs
        if target is None:
            return self.budget.keep_rate
        if target == 1.0:
            return 1.0
        dense = self.cost.macs(self.cost.dense())

        @cache  # most of the rates have the same counts
        def share(counts: tuple[int, ...]) -> float:
            return self.cost.macs(self.cost.steps(self._counted_traits, self.blocks, counts)) / dense

        def share_at(rate: float) -> float:
            return share(self.counts_for_rate(rate))

        low, high = 1e-6, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if share_at(middle) <= target:
                low = middle
            else:
                high = middle
        # 1.0: to keep all tokens may be closest, as the products of a strategy can cost more than a few removals save.
        return min((low, high, 1.0), key=lambda rate: abs(share_at(rate) - target))

    @cached_property
    def _counted_traits(self) -> Traits:
        """The traits for planning: without the strategy's own products if they cost all that is saved.

        This is so if even the fewest tokens cost as much as the dense network. Otherwise the search would keep all
        tokens. Own products then do not count for the budget, but for the realised MACs; a board shows the difference.
        """
        if self.budget.macs is None:
            return self.traits
        fewest = cap_counts((1,) * len(self.blocks), self.cost.tokens, self.traits.most, later=True)
        steps = self.cost.steps(self.traits, self.blocks, fewest)
        saves = self.cost.macs(steps) < self.cost.macs(self.cost.dense())
        return self.traits if saves else self.traits._replace(own_macs=lambda place: 0.0)

    def counts_for_rate(self, rate: float) -> tuple[int, ...]:
        """Return the token count after each block for a rate, see `rate`."""
        budget, tokens = self.budget, self.cost.tokens
        is_bisected = budget.macs is not None
        if self.staged:
            counts = counts_at(rate, budget.convention, tokens, len(self.blocks), self.traits.fuses)
        else:
            # A keep rate is the share of the tokens that stays after the last block. A bisected rate in (0, 1] requests
            # any number of removals: for small budgets more than there are tokens, and the last blocks have one token.
            share_removed = 1 / rate - 1 if is_bisected else 1 - rate
            gamma = budget.gamma if self.kind == "late" else 0.0
            counts = spread(share_removed * tokens, tokens, self.blocks, self.cost.depth, gamma)
        # A keep rate has the meaning of published methods. In a bisection the MACs must increase with the rate. They
        # would not if tokens that one stage cannot remove stayed for good.
        return cap_counts(counts, tokens, self.traits.most, later=is_bisected)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The token count after each block."""
        return self._amounts() if self.rate is None else self.counts_for_rate(self.rate)

    def _amounts(self) -> tuple[int, ...]:
        """Return the counts of a budget with an amount per block.

        Each block removes the requested number of tokens, or as many as possible.
        """
        counts = [self.cost.tokens]
        for place in range(len(self.blocks)):
            before = counts[-1]
            removed = min(self._amount(place, before), math.floor(self.traits.most * before + TINY))
            counts.append(max(1, before - removed))
        return tuple(counts[1:])

    def _amount(self, place: int, tokens: int) -> int:
        """Return how many of `tokens` tokens leave in an acting block. `place` counts acting blocks from 0."""
        budget = self.budget
        if budget.counts is not None:
            return tokens - min(tokens, budget.counts[place])
        if budget.ratio is not None:
            return math.floor(tokens - budget.ratio * tokens)
        if isinstance(budget.per_block, str):
            first, last = map(int, budget.per_block.split(".."))
            return int(first + (last - first) / max(1, len(self.blocks) - 1) * place)
        return budget.per_block or 0

    def at(self, ramp: float) -> BlockCounts:
        """Return the token counts between all tokens, ramp 0, and those of the budget, ramp 1; see `Strategy.ramp`."""
        tokens, rate = self.cost.tokens, self.rate
        if rate is None:
            counts = tuple(tokens - math.floor((tokens - count) * ramp) for count in self.counts)
        else:
            if ramp != 1:  # exactly the budget's rate at the end, without rounding
                rate = 1 - (1 - rate) * ramp
            counts = self.counts_for_rate(rate)
        if rate is not None and self.kind == "stages":
            shares = [rate**stage for stage in range(1, len(counts) + 1)]
        else:
            shares = [count / tokens for count in counts]
        keep = dict(zip(self.blocks, counts, strict=True))
        return BlockCounts(keep, dict(zip(self.blocks, shares, strict=True)), self._scaled(rate))

    def _scaled(self, rate: float | None) -> frozenset[int]:
        """Return the blocks in which only one token is fused at a keep rate, see `BlockCounts`."""
        adds_fused = self.traits.fuses and self.budget.convention == "compound-ceil"
        if rate is None or self.kind != "stages" or not adds_fused:
            return frozenset()
        # Of K tokens, ceil(r K) and one fused token stay. If these are K tokens again, one token was fused alone. If
        # ceil(r K) is K, none was fused.
        tokens = self.cost.tokens
        counts = counts_at(rate, self.budget.convention, tokens, len(self.blocks), fuses=True)
        pairs = pairwise((tokens, *counts))
        return frozenset(
            block
            for block, (before, after) in zip(self.blocks, pairs, strict=True)
            if before == after > math.ceil(rate * before)
        )

    @cached_property
    def steps(self) -> list[Step]:
        """The planned steps of all blocks of the network."""
        traits = self._counted_traits._replace(scaled=self._scaled(self.rate))
        return self.cost.steps(traits, self.blocks, self.counts)

    @property
    def macs(self) -> float:
        """The planned MACs of one image."""
        return self.cost.macs(self.steps)

    def __str__(self) -> str:
        """The token counts in words, such as "96, 65, 43 of 144 tokens after blocks 1, 4, 7"."""
        counts = ", ".join(map(str, self.counts))
        where = "at the input" if self.traits.site == "input" else f"after {blocks_text(self.blocks)}"
        return f"{counts} of {self.cost.tokens} tokens {where}"


def only_schedule(strategy: Strategy) -> str:
    """Return why a strategy has only one schedule; "" if it may have several."""
    if not strategy.budgeted:
        return "it has no budget"
    if strategy.site == "input":
        return "it acts at the input, once"
    if strategy.adaptive:
        return "it is adaptive: the numbers of tokens depend on the image"
    if strategy.trained or strategy.trains_only:
        return "it is trained at its own schedule"
    if strategy.fits():
        return "it learns from training images at its own schedule"
    return ""


def counts_text(strategy: Strategy, schedule: TokenSchedule) -> str:
    """Return the token counts of a strategy's schedule in words; those of an adaptive strategy are upper bounds."""
    return f"at most {schedule}" if strategy.adaptive else str(schedule)


def blocks_text(blocks: Sequence[int]) -> str:
    """Return block numbers in words, such as "blocks 1, 4, 7" or "blocks 0 to 11"."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    if len(blocks) > 3 and blocks[-1] - blocks[0] == len(blocks) - 1:
        return f"blocks {blocks[0]} to {blocks[-1]}"
    return f"blocks {', '.join(map(str, blocks))}"


class Candidate(NamedTuple):
    """A schedule that a strategy may have at a budget.

    Attributes:
        name: such as "default", "once in block 1".
        schedule: the schedule, with its budget.
        share: its MACs as a share of the dense MACs.
    """

    name: str
    schedule: TokenSchedule
    share: float


def candidates(budget: Budget, traits: Traits, cost: CostModel) -> list[Candidate]:
    """Return the schedules that a strategy may have at a share of the MACs, the strategy's default first.

    The candidates are: default; three stages from an early block; one early removal; every block; late. These did best,
    or are usual, see benchmarks/RESULTS.md. Their MACs differ from the budget by `NEAR` at most. If no schedule is that
    close, the closest is the only candidate. Of schedules with the same counts the first stays.

    Args:
        budget: the budget, with schedule=auto.
        traits: the properties of the strategy.
        cost: the cost model of the network.
    """
    amount = budget.model_copy(update={"schedule": None})
    first, last = first_block(traits), last_block(traits, cost)
    dense = cost.macs(cost.dense())
    different: dict[tuple[tuple[int, ...], tuple[int, ...]], Candidate] = {}
    for name, kind, blocks in _forms(TokenSchedule(amount, traits, cost), first, last):
        if blocks[0] < first or blocks[-1] > last:
            continue
        schedule = TokenSchedule(amount.model_copy(update={"schedule": kind, "blocks": blocks}), traits, cost)
        candidate = Candidate(name, schedule, schedule.macs / dense)
        different.setdefault(_removals(schedule), candidate)
    assert budget.macs is not None
    target = budget.macs

    def error(candidate: Candidate) -> float:
        return abs(candidate.share / target - 1)

    close = [candidate for candidate in different.values() if error(candidate) <= NEAR]
    return close or [min(different.values(), key=error)]


def _forms(default: TokenSchedule, first: int, last: int) -> list[tuple[str, Schedule, tuple[int, ...]]]:
    """Return the names, kinds and blocks of the schedules that are tried, in order.

    Args:
        default: the strategy's default schedule. Blocks after `last` are moved forward.
        first, last: the first block in which the strategy can act, and the last one in which it has an effect.
    """
    depth = default.cost.depth
    usual = _shift(default.blocks, first, last) if default.blocks[-1] > last else default.blocks
    every = tuple(range(first, last + 1))

    def stages_from(block: int) -> tuple[int, ...]:
        return tuple(block + round(depth * stage / 4) for stage in range(3))

    # Of candidates that are not clearly different the first is chosen, see `training.schedules.choose`. So the default
    # comes first: a strategy keeps its usual schedule unless another one is clearly closer. Of the others, those in
    # stages come before those in all blocks; the order is fixed, so that equal cells choose equally.
    return [
        ("default", default.kind, usual),
        ("stages from block 1", "stages", stages_from(1)),
        ("stages from block 2", "stages", stages_from(2)),
        ("once in block 1", "stages", (1,)),
        ("once in block 2", "stages", (2,)),
        ("once in block 0", "stages", (0,)),
        ("every block", "every", every),
        ("late", "late", every),
    ]


def _shift(blocks: Sequence[int], first: int, last: int) -> tuple[int, ...]:
    """Return as many different blocks from `first` to `last` as possible: these, moved forward as little as needed."""
    shifted: list[int] = []
    limit = last
    for block in reversed(blocks):
        block = min(block, limit)
        if block < first:
            break
        shifted.append(block)
        limit = block - 1
    return tuple(reversed(shifted))


def _removals(schedule: TokenSchedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of a schedule in which tokens leave, and the tokens after each of them."""
    counts = schedule.counts
    before = (schedule.cost.tokens, *counts[:-1])
    acting = [place for place, count in enumerate(counts) if count < before[place]]
    return tuple(schedule.blocks[place] for place in acting), tuple(counts[place] for place in acting)


def last_block(traits: Traits, cost: CostModel) -> int:
    """Return the last block in which the choice of tokens can change the outputs.

    At the attention site tokens leave after the attention of a block. After the last attention nothing is passed
    between tokens, so there the choice has no effect if the head reads class tokens only.
    """
    last = last_allowed(traits, cost)
    after_last_attention = traits.site == "attention" and last == cost.depth - 1
    return max(0, last - (after_last_attention and not (cost.reads_patches or traits.reads_out)))


def last_allowed(traits: Traits, cost: CostModel) -> int:
    """Return the last block in which a strategy can act: after it a part of a block has fewer tokens to compute."""
    end = cost.depth
    if traits.returns is not None and end > 1:
        end = block_of_return(traits.returns, end)
    return max(0, end - 1 - (traits.site == "mlp"))


def kind_of(budget: Budget, traits: Traits) -> Schedule:
    """Return the budget's kind of schedule, else "every" for amounts per block, else the strategy's default.

    Until a schedule is chosen, the default stands for the schedule "auto".
    """
    if budget.schedule is not None and budget.schedule != AUTO:
        return budget.schedule
    per_block = budget.per_block is not None or budget.ratio is not None or budget.counts is not None
    return "every" if per_block else traits.schedule


def first_block(traits: Traits) -> int:
    """Return the first block in which a strategy can act: 1 if it reads the attention of the previous block."""
    return int("previous_attention" in traits.needs)


def counts_at(rate: float, convention: Convention, tokens: int, number: int, fuses: bool = False) -> tuple[int, ...]:
    """Return the token counts after each of `number` stages, at least 1.

    With "compound-ceil" a fused token is added: K_s = ceil(r K_(s-1)) + 1, as in EViT. As there, the floating-point
    product is rounded up: 0.07 * 100 gives 8.
    """
    if convention == "power-floor":
        return tuple(max(1, math.floor(rate**s * tokens + TINY)) for s in range(1, number + 1))
    counts = [tokens]
    for _ in range(number):
        counts.append(min(counts[-1], max(1, math.ceil(rate * counts[-1])) + fuses))
    return tuple(counts[1:])


def spread(removed: float, tokens: int, blocks: Sequence[int], depth: int, gamma: float) -> tuple[int, ...]:
    """Return the token counts after each block. Removals add up to `removed`, in proportion to ((l + 1) / depth)^gamma.

    Here l is the number of a block, from 0.

    >>> spread(120, 196, blocks=(3, 6, 9), depth=12, gamma=0.0)
    (156, 116, 76)
    """
    weights = [((block + 1) / depth) ** gamma for block in blocks]
    total, gone, counts = sum(weights), 0.0, []
    for weight in weights:
        gone += removed * weight / total
        counts.append(max(1, tokens - math.floor(gone + TINY)))
    return tuple(counts)


def cap_counts(counts: Sequence[int], tokens: int, most: float, *, later: bool = False) -> tuple[int, ...]:
    """Return the counts if at most the share `most` of the tokens can be removed at once.

    Each stage removes the requested number of tokens, or as many as possible, as ToMe does (Bolya et al. 2023). With
    `later`, the remaining ones are removed in the next stages in which this is possible; otherwise they stay.
    """
    capped = [tokens]
    for before, after in pairwise([tokens, *counts]):
        present = capped[-1]
        removed = (present if later else before) - after
        capped.append(present - min(removed, math.floor(most * present + TINY)))
    return tuple(capped[1:])
