"""Convert a budget into token counts: the blocks in which tokens are removed, and the counts after them."""

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
    """Return the budget's schedule, else "every" for amounts per block, else the strategy's default."""
    per_block = budget.per_block is not None or budget.ratio is not None or budget.counts is not None
    return budget.schedule or ("every" if per_block else traits.schedule)


def stages(budget: Budget, traits: Traits, depth: int) -> tuple[int, ...]:
    """Return the blocks in which a strategy acts: block 0 for the input, else the budget's, else the schedule's.

    The default stages are the blocks round(depth s / 4), s = 1..3: blocks 3, 6, 9 of 12, as in published methods. A
    strategy that reads the attention of the previous block begins in block 1.

    Raises:
        UnsupportedError: there are several counts, but the network has one block.
        UserError: the network does not have these blocks, or the number of counts is not the number of blocks.
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
            next_step="choose from these; a strategy that reads the attention of the previous block begins in block 1",
        )  # fmt: skip
    if budget.counts is not None and len(budget.counts) > 1 and depth == 1:
        raise UnsupportedError(f"{len(budget.counts)} token counts are for a network of several blocks; this has one")
    if budget.counts is not None and len(budget.counts) != len(blocks):
        raise UserError(
            "token counts (counts)", got=f"{len(budget.counts)} of them",
            allowed=f"{len(blocks)}, one for each block in which tokens are removed",
            next_step="name the blocks, as in blocks=3+6+9",
        )  # fmt: skip
    return blocks


def first_block(traits: Traits) -> int:
    """Return the first block in which the strategy can act."""
    return int("previous_attention" in traits.needs)


def check_fits(budget: Budget, traits: Traits, tokens: int, depth: int) -> None:
    """Raise UserError or UnsupportedError if the budget does not fit these numbers of patches and blocks."""
    stages(budget, traits, depth)
    if budget.counts is None:
        return
    if (first := budget.counts[0]) > tokens:
        error = UserError("token counts (counts)", got=first, allowed=f"{tokens} at most, the model's patches")
        raise error if depth > 1 else UnsupportedError(str(error))
    for before, after in pairwise((tokens, *budget.counts)):
        if before - after > (removable := math.floor(traits.most * before + 1e-9)):
            raise UserError(
                f"token counts (counts): this strategy can remove at most {removable} of {before} tokens at once",
                got=after, allowed=f"{before - removable} or more",
            )  # fmt: skip


def counts_at(rate: float, convention: Convention, tokens: int, number: int, fuses: bool = False) -> tuple[int, ...]:
    """Return the token counts after each of `number` stages, at least 1.

    With "compound-ceil" a fused token is added: K_s = ceil(r K_(s-1)) + 1, as in EViT. As there, the floating-point
    product is rounded up: 0.07 * 100 gives 8.
    """
    if convention == "power-floor":
        # Without the small amount floor(0.7 * 10) could be 6, as the product may be 6.999...
        return tuple(max(1, math.floor(rate**s * tokens + 1e-9)) for s in range(1, number + 1))
    counts = [tokens]
    for _ in range(number):
        counts.append(min(counts[-1], max(1, math.ceil(rate * counts[-1])) + fuses))
    return tuple(counts[1:])


def spread(removed: float, tokens: int, blocks: Sequence[int], depth: int, gamma: float) -> tuple[int, ...]:
    """Return the token counts after each block. Removals add up to `removed`, in proportion to ((l + 1) / depth)^gamma.

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
    """Return the counts if at most the share `most` of the tokens can be removed at once.

    Each stage removes the requested number of tokens, or as many as possible. With `later`, the remaining ones are
    removed in the next stages in which this is possible; otherwise they stay.
    """
    out, targets = [tokens], [tokens, *counts]
    for before, after in pairwise(targets):
        leave = (out[-1] if later else before) - after
        out.append(out[-1] - min(leave, math.floor(most * out[-1] + 1e-9)))
    return tuple(out[1:])


def budget_traits(budget: Budget, cost: CostModel, traits: Traits) -> Traits:
    """Return the traits for planning: without the strategy's own products if they cost all that is saved.

    If even the fewest tokens cost as much as the dense network, the closest to any fraction of MACs would be to keep
    all tokens. Then own products do not count for the budget, but for the realised MACs; a board shows the difference.
    """
    if budget.macs is None:
        return traits
    blocks = stages(budget, traits, cost.depth)
    fewest = cap_counts((1,) * len(blocks), cost.tokens, traits.most, later=True)
    saves = cost.macs(cost.steps(traits, blocks, fewest)) < cost.macs(cost.dense())
    return traits if saves else traits._replace(own_macs=lambda place: 0.0)


def solve(budget: Budget, cost: CostModel, traits: Traits) -> tuple[int, ...]:
    """Return the token count of each stage.

    For a fraction of MACs, one keep rate gives the counts of all stages or blocks. Of all such counts, those with the
    closest MACs are returned. Records have the realised fraction.

    Raises:
        UnsupportedError, UserError: see `check_fits`.
    """
    return counts_of(budget, rate_of(budget, cost, traits), cost, traits)


def rate_of(budget: Budget, cost: CostModel, traits: Traits) -> float | None:
    """Return the keep rate of the budget, or the one with the closest MACs; None for amounts per block and counts.

    If every block removes tokens, the rate for few MACs may be so small that it requests more removals than tokens.
    """
    target = budget.macs
    if target is None or target == 1.0:
        return target or budget.keep_rate
    traits, blocks = budget_traits(budget, cost, traits), stages(budget, traits, cost.depth)
    dense = cost.macs(cost.dense())

    @cache  # most of the rates have the same counts
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
    """Return the token count of each stage at this keep rate; without a rate, the counts of the budget."""
    check_fits(budget, traits, cost.tokens, cost.depth)
    blocks, schedule, N = stages(budget, traits, cost.depth), schedule_of(budget, traits), cost.tokens
    if rate is None:
        return _block_counts(budget, N, len(blocks), traits.most)
    if schedule == "stages" or traits.site == "input" or cost.depth == 1:
        counts = counts_at(rate, budget.convention, N, len(blocks), traits.fuses)
    else:
        # For small budgets, more removals are requested than there are tokens; the last blocks then have one token.
        removed = (1 - rate if budget.macs is None else 1 / rate - 1) * N
        counts = spread(removed, N, blocks, cost.depth, budget.gamma if schedule == "late" else 0.0)
    # A keep rate has the meaning of published methods. A fraction of MACs is found by bisection, so the MACs must
    # increase with the rate. They would not if tokens that one stage cannot remove stayed for good.
    return cap_counts(counts, N, traits.most, later=budget.macs is not None)


class Spending(NamedTuple):
    """Token counts of a budget on a network, by the blocks in which the strategy acts.

    Attributes:
        keep: the token count after each block.
        shares: the requested share of the initial tokens after each block: r^s, or K / N without a keep rate.
        scaled: the blocks in which only one token is fused: the token count does not change, and this token is
            multiplied by its weight.
    """

    keep: dict[int, int]
    shares: dict[int, float]
    scaled: frozenset[int]


def spending(budget: Budget, rate: float | None, cost: CostModel, traits: Traits, ramp: float = 1.0) -> Spending:
    """Return the token counts at the rate of `rate_of`, or between all tokens and these, see `Strategy.ramp`."""
    N, blocks, staged = cost.tokens, stages(budget, traits, cost.depth), schedule_of(budget, traits) == "stages"
    if rate is not None and ramp < 1:
        rate = 1 - (1 - rate) * ramp
    counts = counts_of(budget, rate, cost, traits)
    if rate is None:
        counts = tuple(N - math.floor((N - count) * ramp) for count in counts)
    shares = [count / N if rate is None or not staged else rate**s for s, count in enumerate(counts, start=1)]
    scaled = frozenset[int]()
    if rate is not None and staged and traits.fuses and budget.convention == "compound-ceil":
        steps = zip(blocks, pairwise((N, *counts_at(rate, budget.convention, N, len(blocks), fuses=True))), strict=True)
        scaled = frozenset(block for block, (n, out) in steps if n == out > math.ceil(rate * n))
    return Spending(dict(zip(blocks, counts, strict=True)), dict(zip(blocks, shares, strict=True)), scaled)


def _block_counts(budget: Budget, tokens: int, number: int, most: float) -> tuple[int, ...]:
    """Return the counts of a budget with an amount per block; each block removes as many tokens, or as is possible."""
    counts = [tokens]
    for place in range(number):
        n = counts[-1]
        if budget.counts is not None:
            removed = n - min(n, budget.counts[place])
        elif budget.ratio is not None:
            removed = math.floor(n - budget.ratio * n)
        elif isinstance(budget.per_block, str):
            first, last = map(int, budget.per_block.split(".."))
            removed = int(first + (last - first) / max(1, number - 1) * place)
        else:
            removed = budget.per_block or 0
        counts.append(max(1, n - min(removed, math.floor(most * n + 1e-9))))
    return tuple(counts[1:])
