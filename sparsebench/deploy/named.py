"""A timm model by the words of `--model`, with its trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.layers.weight_files import read_weights
from sparsebench.models.timm_models import classes_of, cut_of, load_weights, named_vit
from sparsebench.models.vits import Timm
from sparsebench.spec import parse

HEAD = "head.bias"
NAMES = "timm:NAME, timm:hf-hub:USER/NAME or timm:local-dir:DIR"


def named_model(text: str, weights: Path | None, canvas: int | None = None, *, fetched: bool = True) -> Any:
    """Return the timm model of the words `NAMES`, with the trained weights that timm has for it or those of a file.

    Args:
        text: the words.
        weights: a file, see `read_weights`; None for those that timm fetches.
        canvas: side of its pictures in pixels; None for what timm has for it.
        fetched: whether there are to be weights without a file; otherwise they are random.

    Raises:
        UserError: there is no such model, or its weights are not to be had or do not fit.
    """
    spec = parse(text, positional=Timm.positional)
    if spec.name != Timm.name or set(spec.params) - {"arch"}:
        raise UserError("the model of an export", got=f"'{text}'", allowed=NAMES)
    (arch,) = spec.params.get("arch", ["vit_tiny_patch16_224"])
    side = canvas or cut_of(arch).get("canvas", 224)
    try:
        vit = named_vit(arch, side, _classes(arch, weights), pretrained=fetched and weights is None)
    except UnsupportedError as error:
        raise UserError(f"model '{text}' is not supported: {error}") from error
    if weights is not None:
        load_weights(vit, weights, fresh_head=False)
    return vit.eval()


def _classes(arch: str, weights: Path | None) -> int:
    """Return how many classes the weights know."""
    if weights is None:
        return classes_of(arch)
    try:
        if weights.suffix.lower() != ".safetensors" and weights.is_file():
            return len(read_weights(weights)[HEAD])
        with safe_open(weights, "pt") as file:
            if HEAD in file.keys():  # noqa: SIM118 - no mapping
                return int(file.get_slice(HEAD).get_shape()[0])
    except KeyError:
        pass
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights} is no file of weights that can be read", got=str(error)) from error
    raise UserError(f"{weights.name} has no output layer", next_step="give weights with head.weight and head.bias")
