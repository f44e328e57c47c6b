"""timm models by name, and files of trained weights, read without running code from them."""

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

from sparsebench.errors import UserError, few, is_out_of_memory, reason_of, unknown
from sparsebench.models import transformers_models
from sparsebench.models.base import HEADS, TRANSFORMERS
from sparsebench.models.naflex import FixedNaFlex, of_one_size
from sparsebench.models.timm_parts import refuse
from sparsebench.models.transformers_models import folder_of, is_transformers

GIVE_A_FILE = "or give --weights FILE.safetensors"
HUB, FOLDER = "hf-hub:", "local-dir:"
PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
USUAL = ("state_dict", "model", "model_state", "model_state_dict", "module", "net", "network", "weights")
"""Usual keys of state dicts in checkpoints; if there are several, the first of these is used."""
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch's wrappers of compiled, sharded and checkpointed modules add, at any level."""
AVERAGED = "n_averaged"
"""The counter that torch's AveragedModel adds to the weights."""


def create_vit(
    name: str, canvas: int | tuple[int, int], classes: int, *, channels: int = 3, pretrained: bool = False
) -> Any:
    """Return a timm VisionTransformer by name, for images of canvas x canvas pixels.

    Args:
        name: NAME or NAME.TAG, hf-hub:USER/NAME or local-dir:DIR, as in timm.
        canvas: side of the images in pixels, or (height, width).
        classes: number of classes of the head.
        channels: number of input channels.
        pretrained: whether timm loads, and if needed downloads, trained weights. timm resamples their position
            embeddings for another canvas. A head with another number of classes stays random.

    Raises:
        UserError: timm has no such model, does not support this canvas, or cannot download the weights.
        UnsupportedError: no strategy can act on the architecture, see `timm_parts.refuse`.
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
        vit = of_one_size(vit, (height, width))
    except OSError as error:
        if name.startswith(FOLDER):
            raise UserError(f"timm cannot read '{name}': {reason_of(error)}") from error
        raise UserError(
            f"timm cannot download the trained weights of '{name}' ({reason_of(error)})",
            next_step=f"check the network connection, {GIVE_A_FILE}",
        ) from error
    except (AssertionError, ValueError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, TypeError):  # another kind of architecture, without the argument img_size
            with torch.device("meta"):
                refuse(timm.create_model(name))
        if is_external(name) and isinstance(error, KeyError) and error.args == ("architecture",):
            raise UserError(
                f"timm cannot build '{name}': its config.json names no architecture of timm",
                next_step=f"a model of the transformers library is {TRANSFORMERS}{name.partition(':')[2]}",
            ) from error
        problem = f"timm cannot build '{name}' for {height} x {width} pixels"
        raise UserError(f"{problem}: {reason_of(error)}") from error
    refuse(vit)
    return vit


def is_external(name: str) -> bool:
    """Return whether a name is of a model on the Hugging Face Hub or in a folder, with its own config.json."""
    return name.startswith((HUB, FOLDER))


def published(name: str) -> PretrainedCfg:
    """Return timm's configuration of a name's trained weights; its default is 1000 classes and 224 pixels."""
    cfg = None
    if is_external(name):
        load = load_model_config_from_hf if name.startswith(HUB) else load_model_config_from_path
        with suppress(OSError, ValueError, TypeError, KeyError, RuntimeError):  # create_vit reports the error
            cfg = PretrainedCfg(**load(name.partition(":")[2])[0])
    elif timm.models.is_model(name):
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return cfg or PretrainedCfg()


def cut_of(name: str) -> dict[str, Any]:
    """Return timm's transform of test images for a name: crop, resize, filter, and the canvas if it is square.

    The name is one of timm, or hf:FOLDER, see `transformers_models.published_cut`.
    """
    if is_transformers(name):
        return cut_from(transformers_models.published_cut(folder_of(name)))
    return cut_from(published(name))


def cut_from(cfg: PretrainedCfg) -> dict[str, Any]:
    """Return the transform of `cut_of` for timm's configuration of a model."""
    _, height, width = cfg.input_size
    resize = {"center": "short"}.get(cfg.crop_mode, cfg.crop_mode)
    crop = {"crop": cfg.crop_pct, "resize": resize, "filter": cfg.interpolation}
    return crop | ({"canvas": height} if height == width else {})


class Dimensions(NamedTuple):
    """Dimensions of a network, as far as its trained weights determine them; otherwise None.

    Attributes:
        size: (height, width) of the images in pixels, from the position embeddings.
        channels: number of input channels.
        classes: number of classes of the output layer; 0 without one.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    classes: int | None = None


def read_dimensions(name: str, path: Path, key: str = "") -> Dimensions:
    """Return the dimensions of the network for the weights of a file.

    The position embeddings form the grid of the model at its default size if their number is the same, else a square.

    Args:
        name: name of the model, see `create_vit`.
        path, key: the file, see `read_weights`.

    Raises:
        UserError: the grid of the position embeddings is unknown.
        UserError, UnsupportedError: as in `create_vit` and `read_weights`.
    """
    vit = copy.deepcopy(meta_vit(name, tuple(published(name).input_size[1:]), 1))
    expected, embed = vit.state_dict(), vit.patch_embed
    vit.pos_embed = None  # otherwise timm would resample the position embeddings of the file
    state = _rename(vit, read_weights(path, key).state, expected)
    classes = [len(state[head]) for head in ("head.weight", "head.bias") if head in state]
    patches = state.get(PATCHES)
    if patches is None or patches.ndim != 4 or not _names_match(state, expected):
        return Dimensions()  # another architecture: loading the weights reports the error
    dimensions = Dimensions(None, patches.shape[1], classes[0] if classes else 0)
    if POSITIONS not in state or state[POSITIONS].ndim != 3:
        return dimensions
    prefix = 0 if getattr(vit, "no_embed_class", False) else vit.num_prefix_tokens
    tokens = state[POSITIONS].shape[1] - prefix
    grid = embed.grid_size
    if grid[0] * grid[1] != tokens:
        grid = (isqrt(max(tokens, 0)),) * 2
    if not grid[0] * grid[1] == tokens > 0:
        raise UserError(
            f"{path.name} has {tokens} position embeddings: neither a square nor the number of '{name}'",
            next_step="name the model that was trained",
        )
    return dimensions._replace(size=(grid[0] * embed.patch_size[0], grid[1] * embed.patch_size[1]))


@lru_cache(maxsize=16)
def meta_vit(name: str, canvas: int | tuple[int, int], classes: int, channels: int = 3) -> Any:
    """Return the model of `create_vit` on the meta device. Do not change it: it is cached.

    It is cached because timm needs half a second to build it, and planning needs it several times.
    """
    with torch.device("meta"):
        return create_vit(name, canvas, classes, channels=channels)


def load_weights(vit: Any, path: Path, key: str = "", *, fresh_head: bool) -> bool:
    """Load the weights of a file into a model, converted to its precision; see `match_weights`.

    Returns:
        Whether the head was loaded too.
    """
    state, head = match_weights(vit, path, key, fresh_head=fresh_head)
    vit.load_state_dict(state)
    return head


def match_weights(vit: Any, path: Path, key: str = "", *, fresh_head: bool) -> tuple[dict[str, Tensor], bool]:
    """Return the state dict for a model from the weights of a file, and whether the head is from the file.

    Names and shapes must be those of the model, except for conversions that timm supports, a common prefix of all other
    names, and the names of the transformers library. timm resamples position embeddings of another resolution.

    Args:
        vit: the model; may be on the meta device.
        path, key: the file, see `read_weights`.
        fresh_head: whether the model may keep its own head if the file has none, or one with other classes.

    Raises:
        UserError: the weights do not fit the model, or are not finite.
    """
    expected = vit.state_dict()
    state = _rename(vit, read_weights(path, key).state, expected)
    heads = [key for key in expected if key.startswith(HEADS)]
    fits = all(key in state and state[key].shape == expected[key].shape for key in heads)
    sizes = [len(state[key]) for key in heads if key in state]
    if not fits:
        others = {key: value for key, value in state.items() if key not in heads}
        state = others | {key: expected[key] for key in heads}
    problems = _differences(state, expected)
    if problems:
        arch = getattr(vit, "pretrained_cfg", {}).get("architecture", type(vit).__name__)
        raise UserError(
            f"{path.name} holds the weights of another architecture than {arch}: {'; '.join(problems)}",
            next_step="name the model that was trained, or choose a part of the file with --weights-key",
        )
    # After the other names and shapes: weights of another architecture have another head too.
    if not (fits or fresh_head):
        raise head_error(path.name, sizes[0] if sizes else 0, vit.num_classes)
    _check_numbers(state, expected, path.name)
    return state, fits


def _differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return in what names and shapes of weights differ from the expected ones, or nothing."""
    missing = [key for key in expected if key not in state]
    extra = [key for key in state if key not in expected]
    shapes = [
        f"{key} {tuple(state[key].shape)} in place of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    wrong = {"missing": missing, "unexpected": extra, "of another shape": shapes}
    return [f"{fault}: {few(names)}" for fault, names in wrong.items() if names]


def _check_numbers(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str) -> None:
    """Raise UserError if weights of a file are quantized or not finite. Those on the meta device have no numbers."""
    quantized = [
        key for key, value in state.items() if expected[key].is_floating_point() and not value.is_floating_point()
    ]
    if quantized:
        dtype = str(state[quantized[0]].dtype).removeprefix("torch.")
        raise UserError(
            f"{name} holds numbers of type {dtype}, in {few(quantized)}",
            allowed="real numbers, as of float32, float16 or bfloat16",
            next_step="give weights that are not quantized",
        )
    bad = [key for key, value in state.items() if not value.is_meta and not bool(value.isfinite().all())]
    if bad:
        raise UserError(f"{name} holds numbers that are not finite, in {few(bad)}")


def _rename(vit: Any, weights: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the names of the model, after timm's conversions and without a common prefix.

    The prefix is common to all names that the model does not have. It is removed if the names then match.
    """
    unknown_parts = zip(*(name.split(".")[:-1] for name in weights if name not in expected), strict=False)
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, unknown_parts)]
    prefixes = [""]
    for part in common:
        prefixes.append(f"{prefixes[-1]}{part}.")
    attempts = []
    for prefix in prefixes:
        plain = {name.removeprefix(prefix): value for name, value in weights.items()}
        if len(plain) == len(weights):
            attempts.append(_convert(plain, vit, expected))
            if _names_match(attempts[-1], expected):
                return attempts[-1]
    state = transformers_models.renamed(weights, vit, expected)
    return attempts[0] if state is None else _convert(state, vit, expected)


def _names_match(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether the names are those of the model, except for the output layers."""
    return all(name.startswith(HEADS) for name in state.keys() ^ expected.keys())


def _convert(weights: dict[str, Tensor], vit: Any, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as converted by timm, or unchanged if timm cannot convert them."""
    try:
        weights = vit.from_naflex(weights) if isinstance(vit, FixedNaFlex) else weights
    except RuntimeError:  # match_weights reports what does not fit
        return weights
    patches, target = weights.get(PATCHES), expected.get(PATCHES)
    if patches is not None and patches.ndim == 4 and (target is None or patches.shape[2:] != target.shape[2:]):
        return weights  # timm would resample the patch embedding, but the patch size is part of the architecture
    try:
        if isinstance(vit, eva.Eva):
            return eva.checkpoint_filter_fn(weights, vit)
        return vision_transformer.checkpoint_filter_fn(weights, vit, adapt_layer_scale=True)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return weights  # match_weights reports what does not fit


def head_error(owner: str, classes: int, size: int) -> UserError:
    """Return the error for weights whose head does not have the `size` classes of a test without training.

    Args:
        owner: what has the weights.
        classes: number of classes of its head; 0 without a head.
        size: number of classes of the task.
    """
    head = f"a head of {classes} classes" if classes else "no head"
    step = "give weights for these classes; for a head of ImageNet, name class folders as ImageNet does"
    if not classes:
        step = "compare strategies by probes on its features, with --suite probe; or give weights with a head"
    return UserError(f"{owner} has {head}, and the task, which trains nothing, has {size}", next_step=step)


class Weights(NamedTuple):
    """The weights of a file.

    Attributes:
        state: the weights by name, without the parts of names that torch's wrappers add.
        key: the key of this state dict in the file; "" if the file itself is the state dict.
        others: keys of other state dicts in the file.
    """

    state: dict[str, Tensor]
    key: str = ""
    others: tuple[str, ...] = ()

    def plain(self) -> dict[str, Tensor]:
        """Return the weights in float32, without a prefix that all names have, except those of the output layers."""
        modules = [name.split(".")[:-1] for name in self.state if not name.startswith(HEADS)]
        prefix = ""
        for parts in zip(*modules, strict=False):
            if len(set(parts)) > 1:
                break
            prefix += f"{parts[0]}."
        values = {name: value.float() if value.is_floating_point() else value for name, value in self.state.items()}
        plain = {name.removeprefix(prefix): value for name, value in values.items()}
        are_unique = len(plain) == len(values)
        return plain if are_unique else values


def read_weights(path: Path, key: str = "") -> Weights:
    """Return the weights of a safetensors file or a checkpoint of torch.save.

    A checkpoint is read with weights_only=True, so no code in it runs.

    Args:
        path: the file.
        key: the key of a state dict, such as `model_ema`, or a prefix of names; "" for the first of `USUAL`.

    Raises:
        UserError: the file cannot be read, has no weights or not only numbers, does not have this key, or has several
            state dicts but none with a usual key.
    """
    states = _states(content_of(path))
    most = max(map(len, states.values()), default=0)
    # Much smaller state dicts do not belong to a network.
    states = {place: state for place, state in states.items() if 2 * len(state) >= most}
    if not states:
        raise _no_weights(path, "no weights by name")
    usual = _default_key(states)
    if key:
        prefix = f"{key}."
        flat = {f"{place}.{name}".removeprefix("."): value for place in states for name, value in states[place].items()}
        selection = {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}
    else:
        selection = {} if usual is None else states[usual]
    if not selection:
        names = ", ".join(place or "the file itself" for place in sorted(states))
        raise UserError(
            f"{path.name} holds no weights under '{key}'" if key else f"{path.name} holds several state dicts",
            got=names,
            next_step="name one with --weights-key",
        )
    parts = {name: [part for part in name.split(".") if part not in WRAPPERS] for name in selection}
    state = {".".join(parts[name]): value for name, value in selection.items() if name != AVERAGED}
    if odd := [name for name, x in state.items() if x.is_meta or x.layout != torch.strided]:
        raise _no_weights(path, f"{odd[0]} sparse or without numbers")
    source = key or usual or ""
    return Weights(state, source, tuple(sorted(states.keys() - {source})))


def content_of(path: Path) -> Any:
    """Return the content of a safetensors file or a checkpoint of torch.save, without running code from it.

    Raises:
        UserError: the file cannot be read, or contains something other than weights and numbers.
        MemoryError: the file does not fit the memory or the address space.
    """
    try:
        if path.name.lower().endswith(".safetensors"):
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's checkpoints contain their arguments
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        if is_out_of_memory(error):
            raise MemoryError(f"{path.name} does not fit the memory") from error
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if isinstance(error, SafetensorError):
            raise UserError(f"{path} is truncated or is not a safetensors file ({error})") from error
        unsafe: list[str] = []
        with suppress(Exception):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise _no_weights(path, ", ".join(unsafe[:3])) from error


def _no_weights(path: Path, got: str) -> UserError:
    kind = "with only weights" if got else "of torch.save: it is damaged, or another kind of file, such as TorchScript"
    return UserError(
        f"{path.name} is not a checkpoint {kind}",
        got=got or None,
        next_step="save only model.state_dict(), with safetensors.torch.save_file or torch.save",
    )


def _states(content: Any, place: str = "") -> dict[str, dict[str, Tensor]]:
    """Return the state dicts in the content of a file, by their dotted keys."""
    if not isinstance(content, Mapping):
        return {}
    entries = {key: value for key, value in content.items() if isinstance(key, str)}
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    states = {place: tensors} if tensors else {}
    for key, value in entries.items():
        states |= _states(value, f"{place}.{key}" if place else key)
    return states


def _default_key(states: Mapping[str, Any]) -> str | None:
    """Return the key of the state dict to use if the user names none, or None if that is ambiguous."""
    if len(states) == 1:
        return next(iter(states))
    if "" in states:
        return ""
    for usual in USUAL:
        inside = [place for place in states if place.startswith(f"{usual}.")]
        if usual in states or len(inside) == 1:
            return usual if usual in states else inside[0]
    return None
