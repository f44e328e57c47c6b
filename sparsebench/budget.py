"""How many tokens stay: budgets in one currency, solved into token counts for each stage."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel

Convention = Literal["power-floor", "compound-ceil"]


class Budget(BaseModel):
    """What a strategy may spend: a fraction of the dense model's MACs, or a keep rate.

    Attributes:
        macs: target fraction of the dense MACs, in (0, 1].
        keep_rate: share of the tokens that stays at every stage, in (0, 1]; instead of `macs`.
        convention: how a keep rate r becomes the count K_s of stage s: "power-floor" floor(r^s N)
            (DynamicViT, Rao et al. 2021) or "compound-ceil" ceil(r K_(s-1)) (EViT, Liang et al. 2022).
        blocks: the stages of strategies that act inside the network, from 0; by default after each quarter of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    macs: float | None = None
    keep_rate: float | None = None
    convention: Convention = "power-floor"
    blocks: tuple[int, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: data[key] for key in ("macs", "keep_rate") if data.get(key) is not None}
        if len(given) != 1:
            raise UserError("a budget is either a fraction of MACs or a keep rate", got=given or "neither")
        ((key, value),) = given.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise UserError("keep rate" if key == "keep_rate" else "fraction of MACs", got=value, allowed="(0, 1]")
        return data | {key: float(value)}

    @property
    def label(self) -> str:
        """What tables call it."""
        where = "" if self.blocks is None else " @" + ",".join(map(str, self.blocks))
        if self.macs is not None:
            return f"macs {self.macs:g}" + where
        return f"keep {self.keep_rate:g} {self.convention}" + where


FULL = Budget(macs=1.0)


def stages(budget: Budget, site: str, depth: int) -> tuple[int, ...]:
    """Return the blocks in which a strategy of that site acts: block 0 for the input, else the budget's stages.

    The default is blocks round(depth s / 4), s = 1..3: 3, 6, 9 of 12, as published methods have it.
    """
    if site == "input" or depth == 1:
        return (0,)
    if budget.blocks is None:
        return tuple(sorted({max(0, min(depth - 1, round(depth * s / 4))) for s in (1, 2, 3)}))
    if not budget.blocks or sorted(set(budget.blocks)) != list(budget.blocks):
        raise UserError("budget blocks must be rising and without repeats", got=budget.blocks)
    if budget.blocks[0] < 0 or budget.blocks[-1] >= depth:
        raise UserError("budget blocks", got=budget.blocks, allowed=f"0 to {depth - 1} for this model")
    return budget.blocks


def counts_at(rate: float, convention: Convention, tokens: int, number: int) -> tuple[int, ...]:
    """Return how many of the tokens stay after each of `number` stages; never fewer than one."""
    if convention == "power-floor":
        # The small amount keeps floor(0.7 * 10) at 7 where the product is 6.999...
        return tuple(max(1, math.floor(rate**s * tokens + 1e-9)) for s in range(1, number + 1))
    counts = [tokens]
    for _ in range(number):
        counts.append(max(1, math.ceil(rate * counts[-1] - 1e-9)))
    return tuple(counts[1:])


def solve(budget: Budget, cost: CostModel, site: str, needs: Collection[str]) -> tuple[int, ...]:
    """Return the token count of each stage.

    A fraction of MACs is reached with the same keep rate at every stage; of all counts that a rate can give, those
    whose MACs lie nearest to the target are taken. The realised fraction is in the record.
    """
    blocks = stages(budget, site, cost.depth)
    if budget.keep_rate is not None:
        return counts_at(budget.keep_rate, budget.convention, cost.tokens, len(blocks))
    assert budget.macs is not None
    target = budget.macs
    dense = cost.macs(cost.steps(site, blocks, [cost.tokens] * len(blocks), ()))

    def counts(rate: float) -> tuple[int, ...]:
        return counts_at(rate, "power-floor", cost.tokens, len(blocks))

    def ratio(rate: float) -> float:
        return cost.macs(cost.steps(site, blocks, counts(rate), needs)) / dense

    if target == 1.0:
        return counts(1.0)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) <= target else (low, middle)
    return counts(min((low, high, 1.0), key=lambda rate: abs(ratio(rate) - target)))
