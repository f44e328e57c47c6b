"""What is noted of a strategy's choice."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsebench.plans import Plan


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice of a strategy.

    Attributes:
        block: where it was made.
        before, after: (B, N) and (B, M) of the tokens there, see `TokenView.index`; where tokens rest, of those that
            take part in the block.
        plan: what it was; the positions of a `Keep` in the order in which the tokens go on, rising unless `ordered`.
    """

    block: int
    before: Tensor
    after: Tensor
    plan: Plan
