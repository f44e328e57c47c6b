"""What a plan must be for the harness to carry it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import StrategyError
from sparsebench.plans import Keep, Mask, Merge, Mix, Plan, Shift
from sparsebench.strategy import Strategy

ROUNDING = 1e-5
"""What a hard 0 or 1 with the gradient of a soft one, hard + soft - soft, may be off."""


def only_removes(plan: Plan) -> bool:
    """Say whether what stays is as it was."""
    return isinstance(plan, Keep) and plan.fuse is None


def check_only_removes(plan: Plan, name: str) -> None:
    """Raise StrategyError for a plan that does more, of a strategy at the attention site that reads no tokens."""
    if not only_removes(plan):
        raise StrategyError(
            f"'{name}' fuses, merges or mixes tokens and does not read them: add tokens to `needs`, as what is only "
            "removed leaves before the attention and costs less"
        )


def _tensors(
    plan: Plan, B: int, N: int, keep: int, prefix: int | None
) -> Iterator[tuple[str, object, tuple[int, ...]]]:
    """Yield the name, the value and the right shape of what the plan holds."""
    kind, a_token = type(plan).__name__, []
    if plan.scores is not None:
        yield "scores", plan.scores, (B, N)
    if isinstance(plan, Keep):
        yield "Keep.index", plan.index, (B, keep - (plan.fuse is not None))
        a_token += ["fuse"]
    elif isinstance(plan, Merge):
        yield "Merge.target", plan.target, (B, N)
        a_token += ["weight", "sizes"]
    elif isinstance(plan, Mix):
        yield "Mix.weight", plan.weight, (B, keep, N)
    elif isinstance(plan, Mask):
        yield "Mask.keep", plan.keep, (B, N)
        a_token += ["sizes"]
    else:
        yield "Shift.by", plan.by, (B, N, _width(plan.by))
        if plan.prefix is not None and prefix is not None:
            yield "Shift.prefix", plan.prefix, (B, prefix, _width(plan.by))
    for what in a_token:
        if (value := getattr(plan, what)) is not None:
            yield f"{kind}.{what}", value, (B, N)
    if (values := getattr(plan, "values", None)) is not None:
        yield f"{kind}.values", values, (B, N, _width(values))


def _width(values: object) -> int:
    return values.shape[-1] if isinstance(values, Tensor) and values.ndim else 0


def check_plan(
    plan: Plan, strategy: Strategy, index: Tensor, keep: int, *, training: bool, prefix: int | None = None
) -> None:
    """Raise StrategyError unless the plan turns the (B, N) tokens into `keep` of them, legally.

    An adaptive strategy may let any number go on; and masks and shifts, in training, all of them. There are `prefix`
    class and register tokens; None where that is not known.
    """
    name = strategy.name
    if not isinstance(plan, Keep | Merge | Mix | Mask | Shift):
        kinds = "Keep, Merge, Mix, Mask, Shift or None"
        raise StrategyError(f"'{name}' returned {type(plan).__name__}, not a plan ({kinds})")
    B, N = index.shape
    if strategy.adaptive and (count := went_on(plan)) is not None:
        keep = min(N, max(1, count))
    for part in _tensors(plan, B, N, keep, prefix):
        _check_tensor(name, *part, index.device)
    if isinstance(plan, Keep):
        _check_index(plan.index, name, N)
    elif isinstance(plan, Merge):
        _check_groups(plan.target, name, keep)
    elif isinstance(plan, Mask):
        _check_mask(plan, strategy, training)
    elif isinstance(plan, Shift) and not training:
        raise StrategyError(f"'{name}': Shift is for training only, see view.training")


def _check_tensor(name: str, what: str, value: object, expected: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != expected:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise StrategyError(f"'{name}': {what} must have shape {expected}, got {got}")
    if value.device != device:
        raise StrategyError(f"'{name}': {what} is on {value.device}, the tokens are on {device}")
    if value.is_floating_point() and bool(value.isnan().any()):
        raise StrategyError(f"'{name}': {what} holds NaN")


def went_on(plan: Plan) -> int | None:
    """Return how many tokens a plan lets go on, legal or not; None where that is not to be seen."""
    if isinstance(plan, Keep) and isinstance(plan.index, Tensor) and plan.index.ndim == 2:
        return plan.index.shape[1] + (plan.fuse is not None)
    if isinstance(plan, Mix) and isinstance(plan.weight, Tensor) and plan.weight.ndim == 3:
        return plan.weight.shape[1]
    if isinstance(plan, Merge) and isinstance(plan.target, Tensor) and plan.target.dtype == torch.int64:
        return int(plan.target.max()) + 1 if plan.target.numel() else 0
    return None


def _check_mask(plan: Mask, strategy: Strategy, training: bool) -> None:
    name, keep = strategy.name, plan.keep
    if keep.dtype == torch.bool:
        if plan.values is not None or plan.sizes is not None:
            raise StrategyError(f"'{name}': a Mask of booleans has neither values nor sizes")
        if not strategy.adaptive:
            raise StrategyError(f"'{name}': only an adaptive strategy keeps a number of its own of each image")
        if not bool(keep.any(dim=1).all()):
            raise StrategyError(f"'{name}': Mask.keep leaves an image without a token")
    elif not keep.is_floating_point():
        raise StrategyError(f"'{name}': Mask.keep must be booleans, or real numbers in training, got {keep.dtype}")
    elif not training:
        raise StrategyError(f"'{name}': a Mask of real numbers is for training only, see view.training")
    elif bool(((keep < -ROUNDING) | (keep > 1 + ROUNDING)).any()):
        raise StrategyError(f"'{name}': Mask.keep must lie in [0, 1]")
    elif plan.sizes is not None and not bool((plan.sizes > 0).all()):
        raise StrategyError(f"'{name}': Mask.sizes must be positive")


def _check_index(index: Tensor, name: str, N: int) -> None:
    if index.dtype != torch.int64:
        raise StrategyError(f"'{name}': Keep.index must be int64, got {index.dtype}")
    if index.numel() == 0:
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= N:
        raise StrategyError(f"'{name}': Keep.index must lie in 0..{N - 1}, got {low}..{high}")
    ordered = index.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise StrategyError(f"'{name}': Keep.index names a token twice")


def _check_groups(target: Tensor, name: str, keep: int) -> None:
    if target.dtype != torch.int64:
        raise StrategyError(f"'{name}': Merge.target must be int64, got {target.dtype}")
    low, high = (int(x) for x in target.aminmax())
    if low < -1 or high >= keep:
        raise StrategyError(f"'{name}': Merge.target must lie in 0..{keep - 1}, or be -1, got {low}..{high}")
    members = torch.zeros(target.shape[0], keep + 1, device=target.device)
    if bool((members.scatter(1, target + 1, 1.0)[:, 1:] == 0).any()):
        raise StrategyError(f"'{name}': Merge.target leaves one of its {keep} groups empty")


def check_own_macs(macs: Any, strategy: Strategy) -> Any:
    """Return the MACs that a strategy says a choice costs: one number, or one of each sample.

    Raises:
        StrategyError: one is negative, infinite or no number.
    """
    numbers = np.asarray(macs, dtype=np.float64)
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise StrategyError(f"'{strategy.name}': own_macs must be numbers of 0 or more, got {macs}")
    return macs
