"""How a budget becomes token counts on one network: where tokens leave, and how many go on after each place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import CostModel
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget, Convention, Schedule


def schedule_of(budget: Budget, traits: Traits) -> Schedule:
    """Return the schedule: the budget's, or the strategy's own; amounts that speak of each block leave every block."""
    if budget.per_block is not None or budget.ratio is not None or budget.counts is not None:
        return budget.schedule or "every"
    return budget.schedule or traits.schedule


def stages(budget: Budget, traits: Traits, depth: int) -> tuple[int, ...]:
    """Return the blocks in which a strategy acts: block 0 for the input, else the budget's, else the schedule's.

    The default stages are blocks round(depth s / 4), s = 1..3: 3, 6, 9 of 12, as published methods have it. One that
    chooses by the attention of the block before begins in block 1.

    Raises:
        UnsupportedError: there are several counts, and the network has one block.
        UserError: the network has fewer blocks, or another number of places than the budget has counts.
    """
    start = first_block(traits)
    if traits.site == "input" or depth == 1:
        blocks: tuple[int, ...] = (0,)
    elif budget.blocks is not None:
        blocks = budget.blocks
    elif schedule_of(budget, traits) != "stages":
        whole = budget.counts is not None and len(budget.counts) == depth
        blocks = tuple(range(0 if whole else max(start, min(round(traits.first * depth), depth - 1)), depth))
    else:
        blocks = tuple(sorted({max(start, min(depth - 1, round(depth * s / 4))) for s in (1, 2, 3)}))
    if blocks[-1] >= depth or (blocks[0] < start and depth > 1):
        raise UserError(
            "budget blocks", got="+".join(map(str, blocks)), allowed=f"{start} to {depth - 1} for this model",
            next_step="name blocks of these; where a strategy needs the attention of the block before, the first is 1",
        )  # fmt: skip
    if budget.counts is not None and len(budget.counts) > 1 and depth == 1:
        raise UnsupportedError(f"{len(budget.counts)} token counts are for a network of several blocks; this has one")
    if budget.counts is not None and len(budget.counts) != len(blocks):
        raise UserError(
            "token counts (counts)", got=f"{len(budget.counts)} of them",
            allowed=f"{len(blocks)}, one for each block in which tokens leave",
            next_step="name the blocks that they are for, as in blocks=3+6+9",
        )  # fmt: skip
    return blocks


def first_block(traits: Traits) -> int:
    """Return the first block in which such a strategy can act."""
    return int("previous_attention" in traits.needs)


def check_fits(budget: Budget, traits: Traits, tokens: int, depth: int) -> None:
    """Raise UserError if the budget is not for a network of that many patch tokens and blocks."""
    stages(budget, traits, depth)
    if budget.counts is None:
        return
    if (first := budget.counts[0]) > tokens:
        error = UserError("token counts (counts)", got=first, allowed=f"{tokens} at most, the model's patches")
        raise error if depth > 1 else UnsupportedError(str(error))
    for before, after in pairwise((tokens, *budget.counts)):
        if before - after > (can := math.floor(traits.most * before + 1e-9)):
            raise UserError(
                f"token counts (counts): of {before} tokens no more than {can} can leave this strategy at once",
                got=after, allowed=f"{before - can} or more",
            )  # fmt: skip


def counts_at(rate: float, convention: Convention, tokens: int, number: int, fuses: bool = False) -> tuple[int, ...]:
    """Return how many of the tokens stay after each of `number` stages; never fewer than one.

    By "compound-ceil" a fused token comes on top: K_s = ceil(r K_(s-1)) + 1, as EViT has it. The product is rounded up
    as floating-point numbers have it, as there: 0.07 * 100 comes to 8.
    """
    if convention == "power-floor":
        # The small amount keeps floor(0.7 * 10) at 7 where the product is 6.999...
        return tuple(max(1, math.floor(rate**s * tokens + 1e-9)) for s in range(1, number + 1))
    counts = [tokens]
    for _ in range(number):
        counts.append(min(counts[-1], max(1, math.ceil(rate * counts[-1])) + fuses))
    return tuple(counts[1:])


def spread(removed: float, tokens: int, blocks: Sequence[int], depth: int, gamma: float) -> tuple[int, ...]:
    """Return how many stay after each block when `removed` leave in all, in proportion to ((l + 1) / depth)^gamma.

    >>> spread(120, 196, blocks=(3, 6, 9), depth=12, gamma=0.0)
    (156, 116, 76)
    """
    weights = [((block + 1) / depth) ** gamma for block in blocks]
    total, gone, counts = sum(weights), 0.0, []
    for weight in weights:
        gone += removed * weight / total
        counts.append(max(1, tokens - math.floor(gone + 1e-9)))
    return tuple(counts)


def cap_counts(counts: Sequence[int], tokens: int, most: float, *, later: bool = False) -> tuple[int, ...]:
    """Return the counts when no more than the share `most` of the tokens can leave at once.

    As many leave each stage as was asked for there, or as can. What could not leave does so `later`, as soon as it
    can, or never.
    """
    out, targets = [tokens], [tokens, *counts]
    for before, after in pairwise(targets):
        leave = (out[-1] if later else before) - after
        out.append(out[-1] - min(leave, math.floor(most * out[-1] + 1e-9)))
    return tuple(out[1:])


def budget_traits(budget: Budget, cost: CostModel, traits: Traits) -> Traits:
    """Return the traits as a budget counts them: without own products where nothing is saved for them.

    Where the fewest tokens cost as much as the dense network, the nearest to any fraction would be to leave them all.
    Then a fraction of MACs is what may be spent but for own products. These are in the realised MACs all the same,
    which differ from the planned ones: a board says so.
    """
    if budget.macs is None:
        return traits
    blocks = stages(budget, traits, cost.depth)
    fewest = cap_counts((1,) * len(blocks), cost.tokens, traits.most, later=True)
    saves = cost.macs(cost.steps(traits, blocks, fewest)) < cost.macs(cost.dense())
    return traits if saves else traits._replace(own_macs=lambda place: 0.0)


def solve(budget: Budget, cost: CostModel, traits: Traits) -> tuple[int, ...]:
    """Return the token count of each stage.

    A fraction of MACs is reached with the same keep rate at every stage, or by as many tokens as it takes in every
    block; of all counts that can come out, those whose MACs lie nearest to the target are taken. The realised fraction
    is in the record.

    Raises:
        UserError: see `check_fits`.
    """
    return counts_of(budget, rate_of(budget, cost, traits), cost, traits)


def rate_of(budget: Budget, cost: CostModel, traits: Traits) -> float | None:
    """Return the keep rate that the counts follow from: as asked, or as a fraction of MACs needs it; None if neither.

    To spend few MACs where tokens leave every block, it may be so small that more are asked to leave than are there.
    """
    target = budget.macs
    if target is None or target == 1.0:
        return target or budget.keep_rate
    traits, blocks = budget_traits(budget, cost, traits), stages(budget, traits, cost.depth)
    dense = cost.macs(cost.dense())

    @cache  # as most of the rates that are tried have the same counts
    def share(counts: tuple[int, ...]) -> float:
        return cost.macs(cost.steps(traits, blocks, counts)) / dense

    def ratio(rate: float) -> float:
        return share(counts_of(budget, rate, cost, traits))

    low, high = 1e-6, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) <= target else (low, middle)
    return min((low, high, 1.0), key=lambda rate: abs(ratio(rate) - target))


def counts_of(budget: Budget, rate: float | None, cost: CostModel, traits: Traits) -> tuple[int, ...]:
    """Return the token count of each stage at that keep rate, or as the budget says it where it has none."""
    check_fits(budget, traits, cost.tokens, cost.depth)
    blocks, schedule, N = stages(budget, traits, cost.depth), schedule_of(budget, traits), cost.tokens
    if rate is None:
        return _block_counts(budget, N, len(blocks), traits.most)
    if schedule == "stages" or traits.site == "input" or cost.depth == 1:
        counts = counts_at(rate, budget.convention, N, len(blocks), traits.fuses)
    else:
        # To leave soon, tokens are asked to leave that are not there any more: the last blocks then have one.
        removed = (1 - rate if budget.macs is None else 1 / rate - 1) * N
        counts = spread(removed, N, blocks, cost.depth, budget.gamma if schedule == "late" else 0.0)
    # A keep rate means what it does in published methods. A fraction of MACs is searched for: there a smaller rate
    # must never cost more, as it would where what could not leave in one stage stays for good.
    return cap_counts(counts, N, traits.most, later=budget.macs is not None)


class Spending(NamedTuple):
    """What a budget comes to on a network, by the blocks in which tokens leave.

    Attributes:
        keep: how many tokens go on after each.
        shares: the share of the first tokens that is asked for after each: r^s, or where no rate is, K / N.
        scaled: the blocks in which one token alone is fused: as many go on as came, that one times its weight.
    """

    keep: dict[int, int]
    shares: dict[int, float]
    scaled: frozenset[int]


def spending(budget: Budget, rate: float | None, cost: CostModel, traits: Traits, way: float = 1.0) -> Spending:
    """Return what a budget comes to at the rate of `rate_of`, or the share `way` of the way there from all tokens."""
    N, blocks, staged = cost.tokens, stages(budget, traits, cost.depth), schedule_of(budget, traits) == "stages"
    if rate is not None and way < 1:
        rate = 1 - (1 - rate) * way
    counts = counts_of(budget, rate, cost, traits)
    if rate is None:
        counts = tuple(N - math.floor((N - count) * way) for count in counts)
    shares = [count / N if rate is None or not staged else rate**s for s, count in enumerate(counts, start=1)]
    scaled = frozenset[int]()
    if rate is not None and staged and traits.fuses and budget.convention == "compound-ceil":
        steps = zip(blocks, pairwise((N, *counts_at(rate, budget.convention, N, len(blocks), fuses=True))), strict=True)
        scaled = frozenset(block for block, (n, out) in steps if n == out > math.ceil(rate * n))
    return Spending(dict(zip(blocks, counts, strict=True)), dict(zip(blocks, shares, strict=True)), scaled)


def _block_counts(budget: Budget, tokens: int, number: int, most: float) -> tuple[int, ...]:
    """Return the counts of a budget that says how many tokens leave each block, or as many as can."""
    counts = [tokens]
    for place in range(number):
        n = counts[-1]
        if budget.counts is not None:
            leave = n - min(n, budget.counts[place])
        elif budget.ratio is not None:
            leave = math.floor(n - budget.ratio * n)
        elif isinstance(budget.per_block, str):
            first, last = map(int, budget.per_block.split(".."))
            leave = int(first + (last - first) / max(1, number - 1) * place)
        else:
            leave = budget.per_block or 0
        counts.append(max(1, n - min(leave, math.floor(most * n + 1e-9))))
    return tuple(counts[1:])
