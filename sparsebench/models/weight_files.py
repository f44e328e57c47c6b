"""Files of trained weights, read without running what is in them."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sparsebench.errors import UserError, one_line

SAFE = ".safetensors"
USUAL = ("state_dict", "model", "model_state", "model_state_dict", "module", "net", "network", "weights")
"""What state dicts are called in checkpoints, in the order in which one is taken where several are there."""
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch's wrappers of compiled, sharded and checkpointed modules add, at any place."""
AVERAGED = "n_averaged"
"""The count that AveragedModel adds to the weights."""


class Weights(NamedTuple):
    """What a file of weights holds.

    Attributes:
        state: the weights by name, without what wrappers add within names.
        key: of the state dict that they are, "" where it is the file itself.
        others: keys of other state dicts in the file.
    """

    state: dict[str, Tensor]
    key: str = ""
    others: tuple[str, ...] = ()


def content_name(path: Path) -> str:
    """Return the name that cells have for a file of weights, from its content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return f"weights-{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def read_weights(path: Path, key: str = "") -> Weights:
    """Return the weights of a file: of safetensors, or of a checkpoint of torch.save.

    A checkpoint is read with weights_only=True, so that no program in it runs.

    Args:
        path: the file.
        key: of one of several state dicts, as `model_ema`, or what its names begin with; "" for the first of `USUAL`.

    Raises:
        UserError: the file cannot be read, holds no weights or anything but numbers, or has not that key, or several
            state dicts of which none is the usual one.
    """
    found = _states(_content(path))
    most = max(map(len, found.values()), default=0)
    found = {each: state for each, state in found.items() if 2 * len(state) >= most}  # others are no networks
    if not found:
        raise _no_weights(path, "no weights by name")
    chosen = _chosen(found, key)
    if chosen is None and key:
        flat, before = found.get("", {}), f"{key}."
        if inside := {name.removeprefix(before): value for name, value in flat.items() if name.startswith(before)}:
            found[key], chosen = inside, key
    if chosen is None:
        names = ", ".join(each or "the file itself" for each in sorted(found))
        raise UserError(
            f"{path.name} holds no weights under '{key}'" if key else f"{path.name} holds several state dicts",
            got=names, next_step="name one with --weights-key",
        )  # fmt: skip
    parts = {name: [part for part in name.split(".") if part not in WRAPPERS] for name in found[chosen]}
    state = {".".join(parts[name]): value for name, value in found[chosen].items() if name != AVERAGED}
    odd = [name for name, x in state.items() if x.is_meta or x.is_quantized or x.layout != torch.strided]
    if odd:
        raise _no_weights(path, f"{odd[0]} quantized, sparse or without numbers")
    return Weights(state, chosen, tuple(sorted(found.keys() - {chosen})))


def _content(path: Path) -> Any:
    """Return what is in a file."""
    try:
        if path.name.lower().endswith(SAFE):
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's own checkpoints have their arguments
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or no safetensors file ({error})") from error
    except Exception as error:  # a damaged pickle may raise anything
        strange: list[str] = []
        with suppress(Exception):
            strange = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise _no_weights(path, ", ".join(strange[:3]) or one_line(error)[:200]) from error


def _no_weights(path: Path, got: str) -> UserError:
    return UserError(
        f"{path.name} is no checkpoint of weights alone", got=got,
        next_step="save model.state_dict() alone, with safetensors.torch.save_file or torch.save",
    )  # fmt: skip


def _states(content: Any, at: str = "") -> dict[str, dict[str, Tensor]]:
    """Return the state dicts in the content of a file, by the keys that lead to them."""
    if not isinstance(content, Mapping):
        return {}
    named = {key: value for key, value in content.items() if isinstance(key, str)}
    own = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    found = {at: own} if own else {}
    for key, value in named.items():
        found |= _states(value, f"{at}.{key}" if at else key)
    return found


def _chosen(found: Mapping[str, Any], key: str) -> str | None:
    """Return which of several state dicts is meant, or None."""
    if not key and len(found) == 1:
        return next(iter(found))
    for wanted in (key,) if key else ("", *USUAL):
        inside = [each for each in found if each.startswith(f"{wanted}.")]
        if wanted in found or (wanted and len(inside) == 1):
            return wanted if wanted in found else inside[0]
    return None
