"""What networks show a strategy, and what of its pass they tell; for those of one attention layer above all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import DivergedError, UnsupportedError
from sparsebench.measure.cost import CostModel, projected_for
from sparsebench.models.actor import Given, Pass
from sparsebench.strategy.plan_checks import only_removes
from sparsebench.strategy.plans import Keep
from sparsebench.strategy.view import Outputs


@dataclass(frozen=True, eq=False)
class SplitPass:
    """A split as a network is shown it to tell of itself: inputs (n, ..), labels (n,), relevance (n, N), and the pass.

    Attributes:
        relevance: None where nobody knows it.
        acting: a pass over the whole split of the strategy that acts on it, or None.
    """

    inputs: Tensor
    labels: Tensor
    relevance: Tensor | None
    acting: Pass | None


def kept_only(acting: Pass, cost: CostModel, tokens_in: int, given: Given, because: str) -> Tensor | None:
    """Return the (B, M) positions that stay before the one attention layer of a network, or None where all do.

    Raises:
        UnsupportedError: the strategy does more than remove tokens, with the network's reason against it.
    """
    acts = acting.acts(0)
    scoring = cost.scoring(acting.requires) if acts else ""
    projected = projected_for(acting.requires, scoring) if acts else ""
    plan = acting.decide(0, given)
    acting.went(tokens_in, early=plan is not None, scoring=scoring, projected=projected)
    if plan is None:
        return None
    if not isinstance(plan, Keep) or not only_removes(plan):
        raise UnsupportedError(f"{because}: tokens can be kept or removed, not fused, merged or mixed")
    return plan.index


def in_chunks(answer: Callable[[Tensor, Tensor], Tensor], rows: int) -> Outputs:
    """Return what the view has as `outputs`, from what answers so many rows at a time."""

    @torch.no_grad()
    def outputs(tokens: Tensor, sample: Tensor) -> Tensor:
        pairs = zip(tokens.split(rows), sample.split(rows), strict=True)
        logits = torch.cat([answer(*pair) for pair in pairs])
        return logits if logits.ndim == 2 else logits[:, None]

    return outputs


def finite(seen: Tensor) -> Tensor:
    """Return what a strategy is to see; DivergedError where it is not finite, which is not the strategy's doing."""
    if not bool(seen.isfinite().all()):
        raise DivergedError("training diverged: what the network shows a strategy is not finite")
    return seen
