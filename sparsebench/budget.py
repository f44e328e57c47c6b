"""How many tokens stay: budgets in one currency, solved into token counts for each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel
from sparsebench.strategy import Habits, Schedule

Convention = Literal["power-floor", "compound-ceil"]
AMOUNTS = ("macs", "keep_rate", "per_block")
LATER: dict[str, Any] = {"per_block": None, "schedule": None, "gamma": 2.0}
"""Parameters that budgets of older records do not have, with what they mean there."""


class Budget(BaseModel):
    """What a strategy may spend: a fraction of the dense model's MACs, a keep rate, or tokens that leave each block.

    Attributes:
        macs: target fraction of the dense MACs, in (0, 1].
        keep_rate: share of the tokens that stays, in (0, 1]; instead of `macs`. At every stage, or, where tokens leave
            every block, after the last one.
        per_block: tokens that leave each block, r of ToMe (Bolya et al. 2023); instead of `macs`.
        convention: how a keep rate r becomes the count K_s of stage s: "power-floor" floor(r^s N)
            (DynamicViT, Rao et al. 2021) or "compound-ceil" ceil(r K_(s-1)) (EViT, Liang et al. 2022).
        schedule: "stages": in some blocks, the same share in each; "every": in every block, as many in each; "late": in
            every block, in proportion to (l / L)^gamma in block l of L. None leaves the strategy's own.
        gamma: of the late schedule.
        blocks: the stages of strategies that act inside the network, from 0; by default after each quarter of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    macs: float | None = None
    keep_rate: float | None = None
    per_block: int | None = None
    convention: Convention = "power-floor"
    schedule: Schedule | None = None
    gamma: float = Field(2.0, ge=0)
    blocks: tuple[int, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: data[key] for key in AMOUNTS if data.get(key) is not None}
        if len(given) != 1:
            raise UserError(
                "a budget is either a fraction of MACs or a keep rate, or a number per_block", got=given or "neither"
            )
        ((key, value),) = given.items()
        if key == "per_block":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError("tokens that leave each block (per_block)", got=value, allowed="1 or more")
            return data
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise UserError("keep rate" if key == "keep_rate" else "fraction of MACs", got=value, allowed="(0, 1]")
        return data | {key: float(value)}

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what came later and is not used, so that the hashes of cells from before it still hold."""
        own: dict[str, Any] = dump(self)
        return {key: value for key, value in own.items() if key not in LATER or value != LATER[key]}

    @property
    def label(self) -> str:
        """What tables call it."""
        where = "" if self.blocks is None else " @" + ",".join(map(str, self.blocks))
        if self.schedule is not None:
            where += {"stages": " in stages", "every": " every block", "late": f" late {self.gamma:g}"}[self.schedule]
        if self.macs is not None:
            return f"macs {self.macs:g}" + where
        if self.per_block is not None:
            return f"{self.per_block} a block" + where
        return f"keep {self.keep_rate:g} {self.convention}" + where


FULL = Budget(macs=1.0)


def schedule_of(budget: Budget, habits: Habits) -> Schedule:
    """Return the schedule: the budget's, or the strategy's own; so many tokens a block leave every block."""
    if budget.per_block is not None:
        return budget.schedule or "every"
    return budget.schedule or habits.schedule


def stages(budget: Budget, habits: Habits, depth: int) -> tuple[int, ...]:
    """Return the blocks in which a strategy acts: block 0 for the input, else the schedule's.

    The default stages are blocks round(depth s / 4), s = 1..3: 3, 6, 9 of 12, as published methods have it.
    """
    if habits.site == "input" or depth == 1:
        return (0,)
    if budget.blocks is None:
        if schedule_of(budget, habits) != "stages":
            return tuple(range(depth))
        return tuple(sorted({max(0, min(depth - 1, round(depth * s / 4))) for s in (1, 2, 3)}))
    if not budget.blocks or sorted(set(budget.blocks)) != list(budget.blocks):
        raise UserError("budget blocks must be rising and without repeats", got=budget.blocks)
    if budget.blocks[0] < 0 or budget.blocks[-1] >= depth:
        raise UserError("budget blocks", got=budget.blocks, allowed=f"0 to {depth - 1} for this model")
    return budget.blocks


def counts_at(rate: float, convention: Convention, tokens: int, number: int, fuses: bool = False) -> tuple[int, ...]:
    """Return how many of the tokens stay after each of `number` stages; never fewer than one.

    By "compound-ceil" a fused token comes on top: K_s = ceil(r K_(s-1)) + 1, as EViT has it.
    """
    if convention == "power-floor":
        # The small amount keeps floor(0.7 * 10) at 7 where the product is 6.999...
        return tuple(max(1, math.floor(rate**s * tokens + 1e-9)) for s in range(1, number + 1))
    counts = [tokens]
    for _ in range(number):
        counts.append(min(counts[-1], max(1, math.ceil(rate * counts[-1] - 1e-9)) + fuses))
    return tuple(counts[1:])


def spread(removed: float, tokens: int, blocks: Sequence[int], depth: int, gamma: float) -> tuple[int, ...]:
    """Return how many stay after each block when `removed` leave in all, in proportion to ((l + 1) / depth)^gamma."""
    weights = [((block + 1) / depth) ** gamma for block in blocks]
    total, gone, counts = sum(weights), 0.0, []
    for weight in weights:
        gone += removed * weight / total
        counts.append(max(1, tokens - math.floor(gone + 1e-9)))
    return tuple(counts)


def capped(counts: Sequence[int], tokens: int, most: float, *, later: bool = False) -> tuple[int, ...]:
    """Return the counts when no more than the share `most` of the tokens can leave at once.

    As many leave each stage as was asked for there, or as can. What could not leave does so `later`, as soon as it
    can, or never.
    """
    out, asked = [tokens], [tokens, *counts]
    for before, after in pairwise(asked):
        wanted = (out[-1] if later else before) - after
        out.append(out[-1] - min(wanted, math.floor(most * out[-1] + 1e-9)))
    return tuple(out[1:])


def counted(budget: Budget, cost: CostModel, habits: Habits) -> Habits:
    """Return the habits as a budget counts them: without own products where nothing is saved for them.

    Where the fewest tokens cost as much as the dense network, the nearest to any fraction would be to leave them all.
    Then a fraction of MACs is what may be spent but for own products. These are in the realised MACs all the same,
    which differ from the planned ones: a board says so.
    """
    if budget.macs is None:
        return habits
    blocks = stages(budget, habits, cost.depth)
    fewest = capped((1,) * len(blocks), cost.tokens, habits.most, later=True)
    saves = cost.macs(cost.steps(habits, blocks, fewest)) < cost.macs(cost.dense())
    return habits if saves else habits._replace(own_macs=lambda place: 0.0)


def solve(budget: Budget, cost: CostModel, habits: Habits) -> tuple[int, ...]:
    """Return the token count of each stage.

    A fraction of MACs is reached with the same keep rate at every stage, or by as many tokens as it takes in every
    block; of all counts that can come out, those whose MACs lie nearest to the target are taken. The realised fraction
    is in the record.
    """
    blocks, schedule = stages(budget, habits, cost.depth), schedule_of(budget, habits)
    N, inside = cost.tokens, habits.site != "input" and cost.depth > 1

    def counts(rate: float, removed: float) -> tuple[int, ...]:
        if schedule == "stages" or not inside:
            made = counts_at(rate, budget.convention, N, len(blocks), habits.fuses)
        else:
            made = spread(removed, N, blocks, cost.depth, budget.gamma if schedule == "late" else 0.0)
        # A keep rate means what it does in published methods. A fraction of MACs is searched for: there a smaller rate
        # must never cost more, as it would where what could not leave in one stage stays for good.
        return capped(made, N, habits.most, later=budget.macs is not None)

    if budget.per_block is not None:
        return _falling(budget.per_block, N, len(blocks), habits.most)
    if budget.keep_rate is not None:
        return counts(budget.keep_rate, (1 - budget.keep_rate) * N)
    assert budget.macs is not None
    habits = counted(budget, cost, habits)
    # To leave soon, tokens are asked to leave that are not there any more: the last blocks then have one.
    return _nearest(budget.macs, lambda rate: counts(rate, (1 / rate - 1) * N), cost, habits, blocks)


def _falling(r: int, tokens: int, number: int, most: float) -> tuple[int, ...]:
    """Return the counts when r tokens leave each block, or as many as can."""
    counts = [tokens]
    for _ in range(number):
        counts.append(max(1, counts[-1] - min(r, math.floor(most * counts[-1] + 1e-9))))
    return tuple(counts[1:])


def _nearest(
    target: float, counts: Callable[[float], tuple[int, ...]], cost: CostModel, habits: Habits, blocks: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the counts whose MACs lie nearest to a fraction of the dense ones."""
    dense = cost.macs(cost.dense())

    def ratio(rate: float) -> float:
        return cost.macs(cost.steps(habits, blocks, counts(rate))) / dense

    if target == 1.0:
        return counts(1.0)
    low, high = 1e-6, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) <= target else (low, middle)
    return counts(min((low, high, 1.0), key=lambda rate: abs(ratio(rate) - target)))
