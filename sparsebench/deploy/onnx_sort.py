"""Stable sorting in ONNX, for which torch has no translation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op


def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Return the values in order and where they were: of equal ones the first comes first, as TopK has it in ONNX."""
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def sort(self: Any, dim: int = -1, descending: bool = False) -> Any:
    """See `sort_stable`."""
    return sort_stable(self, None, dim, descending)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.sort.stable: sort_stable,
    torch.ops.aten.sort.default: sort,
}
