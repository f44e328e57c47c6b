"""timm models by name, and files of trained weights, read without running what is in them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import PretrainedCfg, eva, load_model_config_from_hf, vision_transformer
from timm.models._hub import load_model_config_from_path
from torch import Tensor

from sparsebench.errors import UserError, few, one_line, reason_of, unknown
from sparsebench.models.base import HEADS
from sparsebench.models.timm_parts import refuse

GIVE_A_FILE = "or give --weights FILE.safetensors"
HUB, FOLDER = "hf-hub:", "local-dir:"
PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
SAFE = ".safetensors"
USUAL = ("state_dict", "model", "model_state", "model_state_dict", "module", "net", "network", "weights")
"""What state dicts are called in checkpoints, in the order in which one is taken where several are there."""
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch's wrappers of compiled, sharded and checkpointed modules add, at any place."""
AVERAGED = "n_averaged"
"""The count that AveragedModel adds to the weights."""


def create_vit(
    name: str, canvas: int | tuple[int, int], classes: int, *, channels: int = 3, pretrained: bool = False
) -> Any:
    """Return a timm VisionTransformer by name, for images of canvas x canvas pixels.

    Args:
        name: NAME or NAME.TAG, hf-hub:USER/NAME or local-dir:DIR, as timm has it.
        canvas: side of the images in pixels, or height and width.
        classes: size of the head.
        channels: of its pixels.
        pretrained: the weights that timm fetches for that name, its position embedding resampled by timm where the
            canvas is another; a head of another size stays random. False for random weights.

    Raises:
        UserError: timm has no such model, cannot make it so large, or cannot fetch its weights.
        UnsupportedError: an architecture that no strategy can act on, see `deep.refuse`.
    """
    if not (is_external(name) or timm.models.is_model(name)):
        raise unknown("timm model", name, timm.list_models(["vit_*", "deit*", "eva02_*"]))
    height, width = (canvas, canvas) if isinstance(canvas, int) else canvas
    try:
        cfg = None if is_external(name) else timm.get_pretrained_cfg(name, allow_unregistered=False)
        if pretrained and not is_external(name) and (cfg is None or not cfg.has_weights):
            raise UserError(f"timm has no trained weights for '{name}'", next_step=f"name another model, {GIVE_A_FILE}")
        vit = timm.create_model(
            name, pretrained=pretrained, img_size=(height, width), num_classes=classes, in_chans=channels
        )
    except OSError as error:
        if name.startswith(FOLDER):
            raise UserError(f"timm cannot read '{name}': {reason_of(error)}") from error
        raise UserError(
            f"timm cannot fetch the trained weights of '{name}' ({reason_of(error)})",
            next_step=f"check the network, {GIVE_A_FILE}",
        ) from error
    except (AssertionError, ValueError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, TypeError):  # no image size can be said: an architecture of another kind
            with torch.device("meta"):
                refuse(timm.create_model(name))
        problem = f"timm cannot make '{name}' for {height} x {width} pixels"
        raise UserError(f"{problem}: {reason_of(error)}") from error
    refuse(vit)
    return vit


def is_external(name: str) -> bool:
    """Say whether a name is of a model on the Hugging Face Hub or in a folder, with a config.json of its own."""
    return name.startswith((HUB, FOLDER))


def published(name: str) -> PretrainedCfg:
    """Return what timm knows of the weights of a name: for 1000 classes and 224 pixels where it does not say."""
    cfg = None
    if not is_external(name):
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=True) if timm.models.is_model(name) else None
    else:
        load = load_model_config_from_hf if name.startswith(HUB) else load_model_config_from_path
        with suppress(OSError, ValueError, TypeError, KeyError, RuntimeError):  # said when the model is made
            cfg = PretrainedCfg(**load(name.partition(":")[2])[0])
    return cfg or PretrainedCfg()


def cut_of(name: str) -> dict[str, Any]:
    """Return how timm cuts test pictures for the weights it has under a name: canvas, crop, resize and filter.

    The canvas is left out where it is not square.
    """
    cfg = published(name)
    _, height, width = cfg.input_size
    resize = {"center": "short"}.get(cfg.crop_mode, cfg.crop_mode)
    crop = {"crop": cfg.crop_pct, "resize": resize, "filter": cfg.interpolation}
    return crop | ({"canvas": height} if height == width else {})


class Dimensions(NamedTuple):
    """What trained weights are made for; None where they do not say it.

    Attributes:
        size: (height, width) of its images in pixels, of weights with a position embedding.
        channels: of its pixels.
        classes: of its output layer.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    classes: int | None = None


def read_dimensions(name: str, path: Path, key: str = "") -> Dimensions:
    """Return what the weights of a file are made for, if they are those of a timm model.

    Position embeddings that are as many as the model has at its own size are arranged as these, else in a square.

    Args:
        name: of the model, as in `create_vit`.
        path, key: the file, see `read_weights`.

    Raises:
        UserError: it is not known how the position embeddings are arranged.
        UserError, UnsupportedError: as `create_vit` and `read_weights`.
    """
    vit = copy.deepcopy(meta_vit(name, tuple(published(name).input_size[1:]), 1))
    expected, embed = vit.state_dict(), vit.patch_embed
    vit.pos_embed = None  # else timm would resample the file's
    state = _rename(vit, read_weights(path, key).state, expected)
    classes = [len(state[head]) for head in ("head.weight", "head.bias") if head in state]
    patches = state.get(PATCHES)
    if patches is None or patches.ndim != 4 or not _names_match(state, expected):
        return Dimensions()  # of another architecture, which is said when they are taken
    dimensions = Dimensions(None, patches.shape[1], classes[0] if classes else None)
    if POSITIONS not in state or state[POSITIONS].ndim != 3:
        return dimensions
    prefix = 0 if getattr(vit, "no_embed_class", False) else vit.num_prefix_tokens
    tokens, grid = state[POSITIONS].shape[1] - prefix, embed.grid_size
    if grid[0] * grid[1] != tokens:
        grid = (isqrt(max(tokens, 0)),) * 2
    if not grid[0] * grid[1] == tokens > 0:
        raise UserError(
            f"{path.name} has {tokens} position embeddings, which make no square and are not as many as '{name}' has",
            next_step="name the model they were made with",
        )
    return dimensions._replace(size=(grid[0] * embed.patch_size[0], grid[1] * embed.patch_size[1]))


@lru_cache(maxsize=16)
def meta_vit(name: str, canvas: int | tuple[int, int], classes: int, channels: int = 3) -> Any:
    """Return what `create_vit` does, without numbers; to be read only.

    Kept: timm takes half a second for one, and a plan asks several times.
    """
    with torch.device("meta"):
        return create_vit(name, canvas, classes, channels=channels)


def load_weights(vit: Any, path: Path, key: str = "", *, fresh_head: bool) -> bool:
    """Put the weights of a file into a model; see `match_weights`. Numbers of another precision become the model's.

    Returns:
        whether the head is the file's too.
    """
    state, head = match_weights(vit, path, key, fresh_head=fresh_head)
    vit.load_state_dict(state)
    return head


def match_weights(vit: Any, path: Path, key: str = "", *, fresh_head: bool) -> tuple[dict[str, Tensor], bool]:
    """Return the weights of a file, one for each of the model's, and whether the head is the file's too.

    Names and sizes must be the model's but for what timm knows how to convert, and for a prefix that all other names
    have; a position embedding of another resolution is resampled as timm does it.

    Args:
        vit: the model; it may lie on the meta device.
        path, key: the file, see `read_weights`.
        fresh_head: whether a head that the file lacks, or has with other classes, may stay the model's own.

    Raises:
        UserError: the file's weights are not for this model, or are not finite.
    """
    expected = vit.state_dict()
    state = _rename(vit, read_weights(path, key).state, expected)
    heads = [key for key in expected if key.startswith(HEADS)]
    fits = all(key in state and state[key].shape == expected[key].shape for key in heads)
    sizes = [len(state[key]) for key in heads if key in state]
    if not fits:
        state = {key: value for key, value in state.items() if key not in heads} | {key: expected[key] for key in heads}
    shapes = [
        f"{key} {tuple(state[key].shape)} in place of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    missing, strange = [key for key in expected if key not in state], [key for key in state if key not in expected]
    wrong = {"missing": missing, "unexpected": strange, "of another shape": shapes}
    if problems := [f"{fault}: {few(names)}" for fault, names in wrong.items() if names]:
        arch = getattr(vit, "pretrained_cfg", {}).get("architecture", type(vit).__name__)
        raise UserError(
            f"{path.name} holds the weights of another architecture than {arch}: {'; '.join(problems)}",
            next_step="name the model they were made with, or with --weights-key the part of the file",
        )
    if not (fits or fresh_head):
        raise head_error(path.name, f"a head of {sizes[0]} classes" if sizes else "no head", vit.num_classes)
    whole = [key for key, value in state.items() if expected[key].is_floating_point() > value.is_floating_point()]
    if whole:
        raise UserError(
            f"{path.name} holds numbers of type {str(state[whole[0]].dtype).removeprefix('torch.')}, in {few(whole)}",
            allowed="real numbers, as of float32, float16 or bfloat16", next_step="give weights that are not quantized",
        )  # fmt: skip
    if bad := [key for key, value in state.items() if not value.is_meta and not bool(value.isfinite().all())]:
        raise UserError(f"{path.name} holds numbers that are not finite, in {few(bad)}")
    return state, fits


def _rename(vit: Any, weights: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names that the model has for them, as far as timm or one prefix of the others says which.

    The prefix is one behind which all names that the model has not become those that it lacks.
    """
    strange = zip(*(name.split(".")[:-1] for name in weights if name not in expected), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, strange)]
    prefixes = ["".join(f"{part}." for part in common[:n]) for n in range(len(common) + 1)]
    attempts = []
    for prefix in prefixes:
        plain = {name.removeprefix(prefix): value for name, value in weights.items()}
        if len(plain) == len(weights):
            attempts.append(_convert(plain, vit, expected))
            if _names_match(attempts[-1], expected):
                return attempts[-1]
    return attempts[0]


def _names_match(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Say whether weights have the model's names, whatever its output layers are called."""
    return all(name.startswith(HEADS) for name in state.keys() ^ expected.keys())


def _convert(weights: dict[str, Tensor], vit: Any, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by timm's names, where it knows how to convert them; else as they are."""
    patches, target = weights.get(PATCHES), expected.get(PATCHES)
    if patches is not None and patches.ndim == 4 and (target is None or patches.shape[2:] != target.shape[2:]):
        return weights  # timm would resample them, which are part of the architecture here
    try:
        if isinstance(vit, eva.Eva):
            return eva.checkpoint_filter_fn(weights, vit)
        return vision_transformer.checkpoint_filter_fn(weights, vit, adapt_layer_scale=True)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return weights  # what does not fit is named later


def head_error(owner: str, head: str, size: int) -> UserError:
    """Return the error for weights whose head is not the one of `size` classes that a test needs."""
    return UserError(
        f"{owner} has {head}, and the task, which trains nothing, has {size}",
        next_step="give weights made for these classes, or name class folders as ImageNet does where the head is "
        "ImageNet's",
    )


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
    states = _states(content_of(path))
    most = max(map(len, states.values()), default=0)
    states = {at: state for at, state in states.items() if 2 * len(state) >= most}  # others are no networks
    if not states:
        raise _no_weights(path, "no weights by name")
    usual = _default_key(states)
    if key:
        prefix = f"{key}."
        flat = {f"{at}.{name}" if at else name: value for at, state in states.items() for name, value in state.items()}
        selection = {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}
    else:
        selection = {} if usual is None else states[usual]
    if not selection:
        names = ", ".join(at or "the file itself" for at in sorted(states))
        raise UserError(
            f"{path.name} holds no weights under '{key}'" if key else f"{path.name} holds several state dicts",
            got=names, next_step="name one with --weights-key",
        )  # fmt: skip
    parts = {name: [part for part in name.split(".") if part not in WRAPPERS] for name in selection}
    state = {".".join(parts[name]): value for name, value in selection.items() if name != AVERAGED}
    odd = [name for name, x in state.items() if x.is_meta or x.is_quantized or x.layout != torch.strided]
    if odd:
        raise _no_weights(path, f"{odd[0]} quantized, sparse or without numbers")
    source = key or usual or ""
    return Weights(state, source, tuple(sorted(states.keys() - {source})))


def content_of(path: Path) -> Any:
    """Return what is in a file of safetensors or of torch.save, of which no program is run.

    Raises:
        UserError: it cannot be read, or holds anything but weights and numbers.
    """
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


def _states(content: Any, place: str = "") -> dict[str, dict[str, Tensor]]:
    """Return the state dicts in the content of a file, by the keys that lead to them."""
    if not isinstance(content, Mapping):
        return {}
    entries = {key: value for key, value in content.items() if isinstance(key, str)}
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    states = {place: tensors} if tensors else {}
    for key, value in entries.items():
        states |= _states(value, f"{place}.{key}" if place else key)
    return states


def _default_key(states: Mapping[str, Any]) -> str | None:
    """Return the key of the state dict that is meant unless the user names one, or None if that is not known."""
    if len(states) == 1:
        return next(iter(states))
    if "" in states:
        return ""
    for usual in USUAL:
        inside = [place for place in states if place.startswith(f"{usual}.")]
        if usual in states or len(inside) == 1:
            return usual if usual in states else inside[0]
    return None
