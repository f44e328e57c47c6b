"""What networks cost, from the parameters of a cell alone. But for timm's none is built, and no torch imported."""

from __future__ import annotations

from itertools import pairwise

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import BlockCost, CostModel, PositionalCost, ShallowCost, TwoLayerCost, VitCost
from sparsebench.models.base import Model
from sparsebench.models.shipped import Positional, Shallow, TwoLayer
from sparsebench.models.vits import Timm, Vit
from sparsebench.models.widths import stem_widths
from sparsebench.tasks.base import Task

MLP_RATIO = 4
"""Neurons of a block's MLP over its width, in timm's VisionTransformer unless told otherwise."""


def cost_of(task: Task, model: Model, classes: int) -> CostModel:
    """Return the closed form of the network that a model builds for a task's data.

    Args:
        task: its parameters have the number and the width of the tokens, or the pixels of the images.
        model: one that comes with sparsebench.
        classes: how many classes the data have.

    Raises:
        UserError: the model cannot be built for the task.
    """
    if isinstance(model, Vit):
        return _vit(model, _number(task, "canvas"), classes)
    if isinstance(model, Timm):
        return _timm(model, task, classes)
    tokens, d = _number(task, "tokens"), _number(task, "d")
    if isinstance(model, Shallow):
        return ShallowCost(tokens, d, d, d, model.m, model.heads, {2: 1, 4: 2}.get(classes, classes))
    if isinstance(model, TwoLayer):
        return TwoLayerCost(tokens, d, model.d_h, model.d_v)
    if isinstance(model, Positional):
        return PositionalCost(tokens, d)
    raise UserError(f"what model '{model.name}' costs is not known from its parameters")


def _number(task: Task, name: str) -> int:
    found = getattr(task, name, None)
    if not isinstance(found, int):
        raise UserError(f"task '{task.name}' has no {name}, which the model needs")
    return found


def _vit(model: Vit, canvas: int, classes: int) -> VitCost:
    """Return the closed form of `deep.small_vit`, biases not counted."""
    C = model.dim
    tokens, block = (canvas // model.patch) ** 2, BlockCost(3 * C * C, C * C, 2 * MLP_RATIO * C * C, C)
    return VitCost(tokens, 1, 1, _patch(model), C * classes, (block,) * model.depth, C, model.heads)


def _patch(model: Vit) -> int:
    """Return the MACs of making one patch: of a projection, or of the convolutions of `stem.ConvStem`."""
    if model.stem == "linear":
        return 3 * model.patch**2 * model.dim
    widths = stem_widths(model.dim, model.patch)
    places = [(model.patch >> k) ** 2 for k in range(1, len(widths))]
    return model.dim**2 + sum(n * 9 * C * wider for n, (C, wider) in zip(places, pairwise(widths), strict=True))


def _timm(model: Timm, task: Task, classes: int) -> CostModel:
    """Return the closed form of a timm model, which is made without numbers for that. Imports torch."""
    from sparsebench.models.deep import DeepViT

    try:
        return DeepViT(model.empty(task, classes)).cost
    except UnsupportedError as error:
        raise UserError(str(error)) from error
