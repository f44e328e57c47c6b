"""Sorting along the last dimension, in a form that torch.compile compiles in a fraction of a second."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNROLLED = 512
"""The longest row for which torch.compile generates a sort kernel on a GPU; longer rows are sorted by a library."""


class Sorted(NamedTuple):
    """The sorted values and their positions in the input; both have the shape of the input."""

    values: Tensor
    indices: Tensor


def sort(values: Tensor, *, descending: bool = False) -> Sorted:
    """Return (..., N) values sorted along the last dimension, stably, with NaN as the largest, exactly as `torch.sort`.

    In a network compiled for a GPU, short rows are sorted by comparing all pairs. The compiler needs up to half a
    minute for the kernel of a sort, and a fifth of a second for that of the comparisons.
    """
    if _compares(values):
        return _by_comparisons(values, descending)
    return Sorted(*values.sort(dim=-1, descending=descending, stable=True))


def ranks(order: Tensor) -> Tensor:
    """Return (..., N), the inverse permutations of `order` (..., N): the rank of each position."""
    return order.scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def _compares(values: Tensor) -> bool:
    compiles = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiles and values.is_cuda and values.shape[-1] <= UNROLLED


def _by_comparisons(values: Tensor, descending: bool) -> Sorted:
    """Return the same as `sort`: the rank of a value is the number of values before it."""
    left = values[..., None, :]
    right = values[..., :, None]
    left_nan, right_nan = left != left, right != right
    before = (left > right) | (left_nan & ~right_nan) if descending else (left < right) | (right_nan & ~left_nan)
    position = torch.arange(values.shape[-1], device=values.device)
    ties = (left == right) | (left_nan & right_nan)
    rank = (before | (ties & (position < position[:, None]))).sum(dim=-1)
    order = ranks(rank)
    return Sorted(values.gather(-1, order), order)
