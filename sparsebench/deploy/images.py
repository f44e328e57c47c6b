"""Images of a user's that a strategy looks at before it acts on a network of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.strategy import Strategy
from sparsebench.tasks.base import Recipe
from sparsebench.training.fit import fit
from sparsebench.view import Images


def check_given(strategy: Strategy, learned: Any, images: Any, labels: Any) -> None:
    """Raise UserError unless a strategy with a `fit` is given either what it learned or what it is to learn from."""
    name, words = strategy.name, "images=... and labels=..." if strategy.fit_labels else "images=..."
    if learned is None and images is None:
        raise UserError(
            f"'{name}' looks at training images before it acts, and there are none", got="neither images nor a file",
            allowed=f"about {strategy.fit_images} pictures, normalised as for the network",
            next_step=f"give {words}, or learned=FILE.safetensors of what it learned before",
        )  # fmt: skip
    if learned is not None and (images is not None or labels is not None):
        raise UserError(
            f"'{name}' is given what it learned, and images to learn from", got="learned and images or labels",
            next_step="leave out one of them",
        )  # fmt: skip
    if images is not None and strategy.fit_labels and labels is None:
        raise UserError(f"'{name}' learns from images with their labels", got="images alone", next_step=f"give {words}")
    if labels is not None and not strategy.fit_labels:
        raise UserError(f"'{name}' learns from images alone", got="labels", next_step="leave labels out")


def fit_on_images(network: DeepViT, actor: Actor, images: Any, labels: Any, seed: int) -> None:
    """Fit the actor's strategy on a user's images (n, channels, height, width), normalised as for the model.

    Raises:
        UserError: they are not what the model takes, or what the strategy does wrong, see `fit`.
    """
    weight = next(network.module.parameters())
    size = network.pixels
    if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != size or not len(images):
        got = str(tuple(images.shape)) if isinstance(images, Tensor) else type(images).__name__
        allowed = "(n, {}, {}, {}), n of 1 or more".format(*size)
        raise UserError("images to learn from", got=got, allowed=allowed, next_step="give them as one tensor")
    if images.dtype != weight.dtype or not bool(images.isfinite().all()):
        got = str(images.dtype).removeprefix("torch.") if images.dtype != weight.dtype else "NaN or infinity"
        kind = str(weight.dtype).removeprefix("torch.")
        raise UserError("images to learn from", got=got, allowed=f"{kind}, normalised as for the network")
    inputs = network.restore(images.to(weight.device))
    given = None if labels is None else _labels(labels, len(images), network).to(weight.device)
    recipe = Recipe("cross-entropy", "adamw", 0.0, 0, epochs=0, steps=0)
    if actor.acts:
        rows = torch.arange(len(images), device=weight.device)
        fit(network, actor, Images(inputs, rows, given), recipe, seeds.seed_of("fit", "apply", seed))


def _labels(labels: Any, n: int, network: DeepViT) -> Tensor:
    """Return (n,) class numbers.

    Raises:
        UserError: they are something else.
    """
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or tuple(labels.shape) != (n,):
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError("labels to learn from", got=got, allowed=f"({n},) int64, one an image")
    classes = network.module.num_classes
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        got = f"{int(labels.min())}..{int(labels.max())}"
        raise UserError("labels to learn from", got=got, allowed=f"0..{classes - 1}, the network's classes")
    return labels
