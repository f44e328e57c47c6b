"""Export of sparse networks to ONNX or torch.export, and which strategies can be exported."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebench.errors import UserError, one_line
from sparsebench.strategy.base import Strategy

if TYPE_CHECKING:
    from sparsebench.deploy.sparse_model import SparseModel

# torch is imported only for an export, because `sparsebench list` calls `exportable`.

FORMS = (".onnx", ".pt2")
INPUT = "pixels"
"""The name of the input in ONNX files."""
NOT_FIXED = "its token counts are not fixed, as they depend on the image or are learned"


def export_obstacle(cls: type[Strategy]) -> str:
    """Return why a strategy cannot be exported, as far as its class shows it, or ""."""
    if cls.kind == "oracle":
        return "it reads the relevance mask"
    return NOT_FIXED if cls.adaptive else ""


def exportable(cls: type[Strategy]) -> str:
    """Return "yes" or "no"; "?" for a strategy that does not come with sparsebench: `sparsebench check` tests it."""
    if export_obstacle(cls):
        return "no"
    return "yes" if cls.__module__.startswith("sparsebench_plugins.") else "?"


def export(sparse: SparseModel, file: str | os.PathLike[str], batch: int = 1) -> Path:
    """Export the network in evaluation mode with a fixed batch size, see `SparseModel.export`."""
    import torch

    path = Path(file)
    _check(sparse, path, batch)
    network = copy.deepcopy(sparse).eval()
    weight = next(network.parameters())
    pixels = torch.zeros(batch, *sparse._network.pixels, device=weight.device, dtype=weight.dtype)
    try:
        with torch.no_grad():
            program = torch.export.export(network, (pixels,), strict=False)
        if path.suffix == ".pt2":
            torch.export.save(program, path)
        else:
            _write_onnx(program, path, sparse.output_names)
    except Exception as error:  # torch raises many types of errors
        path.unlink(missing_ok=True)
        raise UserError(
            f"'{sparse.spec}' cannot be exported as {path.suffix}",
            got=first_cause(error),
            next_step=f"use another strategy, or the other of {', '.join(FORMS)}",
        ) from error
    return path


def first_cause(error: BaseException) -> str:
    """Return the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)[:300]


def _check(sparse: SparseModel, path: Path, batch: int) -> None:
    """Raise UserError if an export is impossible, before it is tried."""
    if path.suffix not in FORMS:
        raise UserError("the ending of the file name", got=path.name, allowed=FORMS)
    if batch < 1:
        raise UserError("batch size (batch)", got=batch, allowed="1 or more")
    if sparse._actor.strategy.adaptive and sparse._actor.acts:
        raise UserError(
            f"'{sparse.spec}' cannot be exported: {NOT_FIXED}",
            next_step="use a strategy with fixed counts; see sparsebench list plugins",
        )
    libraries = ("onnx", "onnxscript") if path.suffix == ".onnx" else ()
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"ONNX files need {', '.join(missing)}",
            got="not installed",
            next_step="pip install 'sparsebench[export]', or write a .pt2 file",
        )
    if path.exists():
        raise UserError(f"{path} already exists", next_step="give another name")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist", next_step="create it first")


def _write_onnx(program: Any, path: Path, outputs: Sequence[str]) -> None:
    """Write a program as ONNX, with these names of its outputs, without log messages and warnings of torch."""
    import torch

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.onnx.export(
                program,
                dynamo=True,
                custom_translation_table=_translations(),
                input_names=[INPUT],
                output_names=list(outputs),
                verbose=False,
                optimize=True,
            )
        assert model is not None
        model.save(path, external_data=False)
    finally:
        logging.disable(before)


def _translations() -> dict[Any, Any]:
    """Return ONNX translations that strategies need and torch does not have: stable sorting and distances."""
    import torch
    from onnxscript import opset18

    op: Any = opset18

    def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        # ONNX's TopK is stable: among equal values the first comes first.
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    def sort(self: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort_stable(self, None, dim, descending)

    def distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
        if p != 2:
            raise NotImplementedError(f"distances of order {p}")
        diff = op.Sub(op.Unsqueeze(x1, op.Constant(value_ints=[-2])), op.Unsqueeze(x2, op.Constant(value_ints=[-3])))
        return op.ReduceL2(diff, op.Constant(value_ints=[-1]), keepdims=0)

    aten = torch.ops.aten
    return {aten.sort.stable: sort_stable, aten.sort.default: sort, aten._cdist_forward.default: distances}
