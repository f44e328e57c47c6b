"""What strategies use and torch has no translation of to ONNX: stable sorting and distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18

op: Any = opset18


def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Return the values in order and where they were: of equal ones the first comes first, as TopK has it in ONNX."""
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def sort(self: Any, dim: int = -1, descending: bool = False) -> Any:
    """See `sort_stable`."""
    return sort_stable(self, None, dim, descending)


def distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """Return (.., n, m) Euclidean distances of (.., n, d) to (.., m, d)."""
    if p != 2:
        raise NotImplementedError(f"distances of order {p}")
    apart = op.Sub(op.Unsqueeze(x1, op.Constant(value_ints=[-2])), op.Unsqueeze(x2, op.Constant(value_ints=[-3])))
    return op.ReduceL2(apart, op.Constant(value_ints=[-1]), keepdims=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.aten.sort.default: sort,
    torch.ops.aten._cdist_forward.default: distances,
}
