"""Checks of the plans that strategies return."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import StrategyError
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Plan, Rest, Shift

ROUNDING = 1e-5
"""Largest error of a hard 0 or 1 that has the gradient of a soft one, hard + soft - soft."""


def only_removes(plan: Plan) -> bool:
    """Return whether the tokens that stay are unchanged."""
    return isinstance(plan, Keep) and plan.fuse is None and plan.add is None and plan.sizes is None


def merges(plan: Plan) -> bool:
    """Return whether new tokens represent groups of patches."""
    return isinstance(plan, Merge) or (isinstance(plan, Keep | Mask) and plan.sizes is not None)


def _tensors(plan: Plan, B: int, N: int, keep: int, prefix: int) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the name, the value and the required shape of each tensor of the plan."""
    wide = getattr(plan, "by", getattr(plan, "values", getattr(plan, "add", None)))
    C = wide.shape[-1] if isinstance(wide, Tensor) and wide.ndim else 0
    fuses = isinstance(plan, Keep) and plan.fuse is not None
    shapes: dict[str, tuple[int, ...]] = {
        "index": (B, N - keep if isinstance(plan, Rest) else keep - fuses),
        "values": (B, N, C),
        "by": (B, N, C),
        "add": (B, keep, C),
        "weight": (B, keep, N) if isinstance(plan, Mix) else (B, N),
        "prefix": (B, prefix, C),
        "sizes": (B, keep) if isinstance(plan, Keep) else (B, N),
        **dict.fromkeys(("scores", "fuse", "target", "keep"), (B, N)),
    }
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name in shapes and (value is not None or field.default is not None):
            yield f"{type(plan).__name__}.{field.name}", value, shapes[field.name]


def check_form(plan: Plan, strategy: Strategy, index: Tensor, keep: int, *, training: bool, prefix: int) -> None:
    """Raise StrategyError if the plan is illegal in a way that shows without reading its numbers.

    A plan turns the (B, N) tokens into `keep` tokens. With an adaptive strategy any number may remain. With real-valued
    masks and shifts, in training, all tokens remain. There are `prefix` class and register tokens.
    """
    name = strategy.name
    if not isinstance(plan, Keep | Merge | Mix | Mask | Shift | Rest):
        kinds = "Keep, Merge, Mix, Mask, Shift, Rest or None"
        raise StrategyError(f"'{name}' returned {type(plan).__name__}, not a plan ({kinds})")
    if isinstance(plan, Rest) != strategy.rests:
        wants = "return Rest or None" if strategy.rests else "add how = 'rest' and site = 'block' to the class"
        raise StrategyError(f"'{name}' returned {type(plan).__name__}, and its how is {strategy.how!r}: {wants}")
    B, N = index.shape
    for field, value, shape in _tensors(plan, B, N, keep_of(plan, strategy, index, keep), prefix):
        _check_tensor(value, shape, index.device, f"'{name}': {field}")
        if field.endswith((".index", ".target")) and value.dtype != torch.int64:
            raise StrategyError(f"'{name}': {field} must be int64, got {value.dtype}")
    if isinstance(plan, Shift) and not training:
        raise StrategyError(f"'{name}': Shift is for training only, see view.training")
    if isinstance(plan, Keep) and plan.fuse is not None and (plan.add is not None or plan.sizes is not None):
        raise StrategyError(f"'{name}': a Keep either fuses the other tokens or has add and sizes")
    if isinstance(plan, Mask) and (wrong := _wrong_kind(plan, strategy, training)):
        raise StrategyError(f"'{name}': {wrong}")


def _check_tensor(value: Any, shape: tuple[int, ...], device: torch.device, what: str) -> None:
    """Raise StrategyError unless a value is a tensor of this shape on this device."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise StrategyError(f"{what} must have shape {shape}, got {got}")
    if value.device != device:
        raise StrategyError(f"{what} is on {value.device}, the tokens are on {device}")


def check_nothing(strategy: Strategy, N: int, keep: int) -> None:
    """Raise StrategyError if a strategy returns no plan, which leaves all N tokens, and only `keep` may stay.

    Without a plan an adaptive strategy decides to keep all tokens, and one with `Rest` lets none rest in this block.
    Strategies of training alone are dense in the test.
    """
    may = strategy.adaptive or strategy.rests or strategy.trains_only or not strategy.budgeted
    if keep < N and not may:
        raise StrategyError(
            f"'{strategy.name}' returned None, which leaves all {N} tokens, but {keep} must stay: return a plan"
        )


def _wrong_kind(mask: Mask, strategy: Strategy, training: bool) -> str:
    """Return why the strategy may not use a mask of this dtype here, or ""."""
    if mask.keep.dtype == torch.bool:
        if mask.values is not None or mask.sizes is not None:
            return "a boolean Mask has neither values nor sizes"
        return "" if strategy.adaptive else "a boolean Mask keeps different counts in each image: add adaptive = True"
    if not mask.keep.is_floating_point():
        return f"Mask.keep must be booleans, or real numbers in training, got {mask.keep.dtype}"
    return "" if training else "a Mask of real numbers is for training only, see view.training"


def in_range(plan: Plan, N: int, keep: int) -> Plan:
    """Return the plan with positions and groups clamped to those that exist.

    On a GPU one past the end would abort the process, instead of failing the cell.
    """
    if isinstance(plan, Keep | Rest):
        return replace(plan, index=plan.index.clamp(0, N - 1))
    return replace(plan, target=plan.target.clamp(-1, keep - 1)) if isinstance(plan, Merge) else plan


def keep_of(plan: Plan, strategy: Strategy, index: Tensor, keep: int) -> int:
    """Return how many of the (B, N) tokens must remain: `keep`, or the number in an adaptive strategy's plan."""
    if not strategy.adaptive:
        return keep
    if isinstance(plan, Keep) and isinstance(plan.index, Tensor) and plan.index.ndim == 2:
        keep = plan.index.shape[1] + (plan.fuse is not None)
    elif isinstance(plan, Mix) and isinstance(plan.weight, Tensor) and plan.weight.ndim == 3:
        keep = plan.weight.shape[1]
    elif isinstance(plan, Merge) and isinstance(plan.target, Tensor) and plan.target.dtype == torch.int64:
        keep = int(plan.target.max()) + 1 if plan.target.numel() else 0
    return min(index.shape[1], max(1, keep))


def check_numbers(plan: Plan, strategy: Strategy, index: Tensor, keep: int, prefix: int) -> None:
    """Raise StrategyError for illegal numbers in a plan that passed `check_form`; reading them waits for a GPU."""
    B, N = index.shape
    keep = keep_of(plan, strategy, index, keep)
    for field, value, _ in _tensors(plan, B, N, keep, prefix):
        if value.is_floating_point() and bool(value.isnan().any()):
            raise StrategyError(f"'{strategy.name}': {field} holds NaN")
        if field.endswith((".weight", ".fuse")) and bool(value.isinf().any()):
            raise StrategyError(f"'{strategy.name}': {field} holds infinity")
    if wrong := _wrong_numbers(plan, N, keep):
        raise StrategyError(f"'{strategy.name}': {wrong}")


def _wrong_numbers(plan: Plan, N: int, keep: int) -> str:
    """Return which numbers of a plan are illegal, except NaN, or ""."""
    if isinstance(plan, Keep | Shift) and plan.sizes is not None and not bool((plan.sizes >= 0).all()):
        return f"{type(plan).__name__}.sizes must be 0 or more"
    if isinstance(plan, Keep | Rest) and plan.index.numel():
        positions = plan.index.sort(dim=1).values
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= N:
            return f"{type(plan).__name__}.index must lie in 0..{N - 1}, got {low}..{high}"
        repeats = bool((positions[:, 1:] == positions[:, :-1]).any())
        return f"{type(plan).__name__}.index names a token twice" if repeats else ""
    if isinstance(plan, Merge):
        low, high = int(plan.target.min()), int(plan.target.max())
        if low < -1 or high >= keep:
            return f"Merge.target must lie in 0..{keep - 1}, or be -1, got {low}..{high}"
        if not _reaches_all(plan.target, keep):
            return f"Merge.target leaves one of its {keep} groups empty"
        if plan.weight is not None and not _reaches_all(plan.target.where(plan.weight != 0, -1), keep):
            return "Merge.weight is 0 for all tokens of a group, so the group's token would be 0"
        return ""
    return _wrong_mask(plan) if isinstance(plan, Mask) else ""


def _reaches_all(target: Tensor, keep: int) -> bool:
    """Return whether each group 0..keep-1 of each sample has a member; -1 is in no group."""
    members = torch.zeros(len(target), keep + 1, device=target.device).scatter(1, target + 1, 1.0)
    return bool(members[:, 1:].all())


def _wrong_mask(mask: Mask) -> str:
    if mask.keep.dtype == torch.bool:
        return "" if bool(mask.keep.any(dim=1).all()) else "Mask.keep leaves an image without a token"
    if bool(((mask.keep < -ROUNDING) | (mask.keep > 1 + ROUNDING)).any()):
        return "Mask.keep must lie in [0, 1]"
    return "" if mask.sizes is None or bool((mask.sizes > 0).all()) else "Mask.sizes must be positive"


def check_own_macs(macs: Any, strategy: Strategy) -> Any:
    """Return the result of `own_macs`: one number, or one per sample.

    Raises:
        StrategyError: a number is negative, infinite or NaN.
    """
    if isinstance(macs, int | float):
        legal = 0 <= macs < math.inf
    else:
        numbers = np.asarray(macs, dtype=np.float64)
        legal = bool(np.isfinite(numbers).all() and (numbers >= 0).all())
    if not legal:
        raise StrategyError(f"'{strategy.name}': own_macs must be numbers of 0 or more, got {macs}")
    return macs
