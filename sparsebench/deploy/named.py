"""A timm model by the words of `--model`, with its trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.models.timm_models import MadeFor, classes_of, load_weights, made_for, named_vit, size_of
from sparsebench.models.vits import Timm
from sparsebench.planning.weights import locate_all
from sparsebench.spec import parse

NAMES = "timm:NAME, timm:hf-hub:USER/NAME or timm:local-dir:DIR"


def named_model(text: str, weights: Path | None, key: str = "", *, fetched: bool = True) -> Any:
    """Return the timm model of the words `NAMES`, with the trained weights that timm has for it or those of a file.

    Its images, their channels and its classes are those that a file's weights are made for.

    Args:
        text: the words.
        weights, key: a file, see `locate_all`; None for the weights that timm fetches.
        fetched: whether there are to be weights without a file; otherwise they are random.

    Raises:
        UserError: there is no such model, or its weights are not to be had or do not fit.
    """
    spec = parse(text, positional=Timm.positional)
    if spec.name != Timm.name or set(spec.params) - {"arch"}:
        raise UserError("the model of an export", got=f"'{text}'", allowed=NAMES)
    (arch,) = spec.params.get("arch", ["vit_tiny_patch16_224"])
    if weights is not None:
        located = locate_all((weights,), key)
        if len(located) > 1:
            raise UserError("one file of weights makes the network", got=f"{len(located)} files in {weights}")
        (weights,) = located.values()
    try:
        made = MadeFor() if weights is None else made_for(arch, weights, key)
        if weights is not None and made.channels and made.classes is None:
            raise UserError(
                f"{weights.name} has no output layer", next_step="give weights with head.weight and head.bias"
            )
        classes, size = made.classes or classes_of(arch), made.size or size_of(arch)
        vit = named_vit(arch, size, classes, channels=made.channels or 3, pretrained=fetched and weights is None)
    except UnsupportedError as error:
        raise UserError(f"model '{text}' is not supported: {error}") from error
    if weights is not None:
        load_weights(vit, weights, key, fresh_head=False)
    return vit.eval()
