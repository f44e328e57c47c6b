"""Models of the transformers library as the same networks of timm, compared by their outputs."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from timm.models import PretrainedCfg
from torch import Tensor

from sparsebench.errors import UserError, few, one_line, plain, reason_of
from sparsebench.models.base import TRANSFORMERS
from sparsebench.models.transformers_families import CLASSES, FAMILIES, HEADS, JOINED, WITH_TEXT, Family, outputs_of
from sparsebench.tasks.folder import cut_out
from sparsebench.tasks.sources.files import DIGITS, sha256_of

log = logging.getLogger(__name__)

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of weights, and the one that names the files of weights in several parts."""
PROCESSOR_WITH_TEXTS = "processor_config.json"
"""The file of an image processor that was saved together with one for texts."""
LIMIT = 1e-5
"""Largest difference of outputs, absolute, or relative to the largest output if that exceeds 1."""
FILTERS = {2: "bilinear", 3: "bicubic"}
"""Filters by their numbers in Pillow, which image processors name."""
PIXEL_TOLERANCE = 0.02
"""Largest mean difference of a picture that is cut and normalised, in the range of pixels; see `_check_pictures`.

Libraries resize differently, and an image processor may cut out a middle that lies a pixel further."""
STEPS = ("do_resize", "do_rescale", "do_normalize")
"""Names of the steps that each image processor takes here."""
RESCALE_FACTOR, RESCALE_TOLERANCE = 1 / 255, 1e-3
"""Factor of the pixels, which become real numbers in [0, 1], and its relative tolerance: a quarter of a grey level."""
INSTALL = "pip install 'sparsebench[transformers]'"
HALF_PRECISION = {"BF16": "bfloat16", "F16": "float16"}
NUMBERS = {"F64", "F32", "I64", *HALF_PRECISION}
"""Types of weights that are not quantized, as safetensors names them; buffers with positions are I64."""
UNREAD = ("mask_token", "pooler.", "position_ids", "logit_scale", "logit_bias", "text_model.", "text_projection.")
"""Parts of names of weights that no output of an image reads."""


class Compared(NamedTuple):
    """What the comparison of a transformers model with its timm network found; see `Converted`."""

    output: type[Any]
    fields: tuple[str, ...]
    difference: float


_compared: dict[tuple[str, tuple[int, int]], Compared] = {}
"""By the hash of a folder and the size of the images, the comparisons of this process, see `load`."""


@dataclass(frozen=True)
class Converted:
    """A transformers model as a timm network.

    Attributes:
        module: the transformers model; of a model of images and texts the part for images.
        whole: the model that the user gave.
        vit: the timm network with its weights.
        family: its family.
        output: the class of the model's output.
        fields: the names of the fields that the output has.
        difference: the largest difference of the outputs, see `LIMIT`.
    """

    module: Any
    whole: Any
    vit: Any
    family: Family
    output: type[Any]
    fields: tuple[str, ...]
    difference: float

    def fields_of(self, tokens: Tensor, head: Any) -> dict[str, Tensor]:
        """Return the fields of the model's output from (B, P + M, C) tokens and the output of timm's head."""
        values = _fields(self.module, self.vit, tokens, head)
        return {name: values[name] for name in self.fields}

    @property
    def is_resampled(self) -> bool:
        """Whether position embeddings were resampled for another image size than that of the model."""
        config = getattr(self.module.config, "vision_config", self.module.config)
        positions = getattr(self.vit, "pos_embed", None)
        return positions is not None and tuple(self.vit.patch_embed.img_size) != pair(config.image_size)

    def write_back(self) -> Any:
        """Copy the weights of the timm network into the transformers model, and return the whole model.

        Position embeddings for another image size are left out.
        """
        parts = _parts_of(self.vit, self.module, self.family)
        with torch.no_grad():
            for key, target in self.module.state_dict().items():
                value = parts.get(part_of(self.family.names, key) or "")
                if value is not None and value.numel() == target.numel():
                    target.copy_(value.reshape(target.shape))
        return self.whole


def convert(model: Any, size: int | tuple[int, int] | None = None, compared: Compared | None = None) -> Converted:
    """Return a transformers model as the same network of timm. The outputs are compared on two random images.

    Of a model of images and texts it is the part for images. The weights are copied in their precision.

    Args:
        model: a model of one of the `CLASSES`, or a subclass.
        size: side or (height, width) of the images, if not that of the model's configuration. Position embeddings are
            then resampled as the model itself does it.
        compared: the result of an earlier comparison of this model at this size, which is then not made again.

    Raises:
        UserError: the class is unknown, weights are missing, the model cannot have this size, or outputs differ.
    """
    whole = model
    if _names_of(model) & set(WITH_TEXT):
        model = model.vision_model
    family = family_of(model)
    assert family is not None
    name = type(model).__name__
    config = getattr(model.config, "vision_config", model.config)
    own = pair(config.image_size)
    size = own if size is None else pair(size)
    check_size(name, size, pair(config.patch_size))
    with _in_one_line(f"timm cannot build the network of {name}"):
        vit = family.network(model, config, size)
        state = {key: value.detach() for key, value in model.state_dict().items()}
        if size != own:
            state |= _resampled(model, size)
        vit.load_state_dict(_complete(to_timm(family, state, vit), vit, name))
    like = next(model.parameters())
    vit = vit.to(like).train(model.training)
    vit.pretrained_cfg = {"architecture": name, **family.normalised}
    if compared is None:
        compared = _compare(model, vit, size, name, resampled=size != own)
    return Converted(model, whole, vit, family, *compared)


def family_of(model: Any) -> Family | None:
    """Return the family of a transformers model; None for a module of another library.

    Raises:
        UserError: it is a model of transformers of another family.
    """
    names = _names_of(model)
    for family in FAMILIES:
        if names & set(family.classes):
            return family
    if names & set(WITH_TEXT):
        return family_of(model.vision_model)
    if "PreTrainedModel" in names:
        raise unknown_class(type(model).__name__)
    return None


def _names_of(model: Any) -> set[str]:
    """Return the names of the classes of a model that the transformers library defines."""
    return {cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers.")}


def unknown_class(name: str) -> UserError:
    """Return the error for a class of transformers that has no family."""
    return UserError(
        f"{name} of the transformers library is not supported: its network in timm is unknown",
        allowed=", ".join([*CLASSES, *WITH_TEXT]),
    )


def check_size(name: str, size: tuple[int, int], patch: tuple[int, int]) -> None:
    """Raise UserError if images cannot be cut into whole patches."""
    if any(pixels < side or pixels % side for pixels, side in zip(size, patch, strict=True)):
        raise UserError(
            f"{name} at {size[0]} x {size[1]} pixels",
            allowed=f"multiples of the patch size, {patch[0]} x {patch[1]} pixels",
            next_step="give another image size",
        )


def pair(size: Any) -> tuple[int, int]:
    """Return a side or a (height, width) as (height, width); raise UserError for anything else."""
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    try:
        height, width = map(operator.index, sides)
    except (TypeError, ValueError) as error:
        raise UserError(
            "an image size or patch size", got=repr(size), allowed="a number of pixels, or (height, width)"
        ) from error
    return height, width


def part_of(names: Mapping[str, str], key: str) -> str | None:
    """Return the part of timm's network that a weight of transformers is, or None.

    >>> part_of(FAMILIES[0].names, "vit.encoder.layer.3.attention.attention.key.bias")
    'blocks.3.attn.k.bias'
    """
    key = re.sub(r"_(weight|bias)$", r".\1", key)
    for source, target in names.items():
        pattern = re.escape(source).replace(r"layer\.\*", r"layers?\.(\d+)")
        match = re.fullmatch(rf"(?:.*\.)?{pattern}(\.weight|\.bias)?", key)
        if match:
            *number, kind = match.groups(default="")
            return target.replace("*", "".join(number)) + kind
    return None


def to_timm(
    family: Family, weights: Mapping[str, Tensor], vit: Any, expected: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the weights of transformers with timm's names and shapes, as far as they are there.

    Position embeddings keep their number.

    Args:
        family: the family.
        weights: the weights by their names in transformers.
        vit: the timm network.
        expected: the weights of timm's names and shapes, if not those of `vit`.
    """
    expected = vit.state_dict() if expected is None else expected
    parts = {part_of(family.names, key): value for key, value in weights.items()}
    if "reg_token" in expected and "dist_token" in parts:
        parts["reg_token"] = parts.pop("dist_token")
    if "pos_embed" in parts:  # of a `position_embedding.weight` it has no batch dimension
        parts["pos_embed"] = parts["pos_embed"].reshape(1, -1, parts["pos_embed"].shape[-1])
    if getattr(vit, "no_embed_class", False):
        _fold_class_position(parts)
    state = {}
    for name, like in expected.items():
        value = _assembled(parts, name, like)
        if value is not None:
            state[name] = value.reshape(like.shape) if value.numel() == like.numel() else value
    return state


def _fold_class_position(parts: dict[str | None, Tensor]) -> None:
    """Add the position of the class token to it, for a timm network with positions of patches only."""
    if "pos_embed" in parts and "cls_token" in parts:
        positions = parts["pos_embed"]
        parts["cls_token"] = parts["cls_token"] + positions[:, :1]
        parts["pos_embed"] = positions[:, 1:]


def _assembled(parts: Mapping[str | None, Tensor], name: str, like: Tensor) -> Tensor | None:
    """Return the weight of a timm network from its parts, or None if they are missing."""
    part = re.sub(r"attn\.(q|v)_bias$", r"attn.\1.bias", name)
    part = part.replace("fc_norm.", "norm.")
    if part in parts:
        return parts[part]
    if name == "head.bias" and "head.weight" in parts:
        return torch.zeros_like(like)
    layer, _, kind = part.rpartition(".")
    if layer in ("attn_pool.q", "attn_pool.kv") and f"attn_pool.qkv.{kind}" in parts:
        rows = parts[f"attn_pool.qkv.{kind}"]
        width = len(rows) // 3
        return rows[:width] if layer == "attn_pool.q" else rows[width:]
    for whole, pieces in JOINED.items():
        if not layer.endswith(whole):
            continue
        places = [f"{layer.removesuffix(whole)}{piece}" for piece in pieces]
        weights = [parts[f"{place}.weight"] for place in places if f"{place}.weight" in parts]
        places = [place for place in places if f"{place}.weight" in parts]
        if kind == "weight":
            return torch.cat(weights) if weights else None
        if any(f"{place}.bias" in parts for place in places):  # a layer without a bias has a bias of 0
            zeros = [weight[:, 0] * 0 for weight in weights]
            biases = [parts.get(f"{place}.bias", zero) for place, zero in zip(places, zeros, strict=True)]
            return torch.cat(biases)
    return None


def _complete(state: dict[str, Tensor], vit: Any, name: str) -> dict[str, Tensor]:
    """Return a state dict; raise UserError if it lacks weights of a network, or has others of another shape."""
    expected = vit.state_dict()
    missing = [key for key in expected if key not in state]
    shapes = [key for key in state if state[key].shape != expected[key].shape]
    if missing or shapes:
        raise UserError(
            f"{name} does not have the weights of timm's network for {few(missing or shapes)}",
            next_step="if its layers have adapters, such as LoRA, merge them into the weights first",
        )
    return state


def _parts_of(vit: Any, module: Any, family: Family) -> dict[str, Tensor]:
    """Return the parts of a timm network that a transformers model has, see `part_of`; the inverse of `to_timm`."""
    old = {part_of(family.names, key) or "": value for key, value in module.state_dict().items()}
    state = vit.state_dict()
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        part = re.sub(r"attn\.(q|v)_bias$", r"attn.\1.bias", name).replace("fc_norm.", "norm.")
        parts[part] = value
        layer, _, kind = part.rpartition(".")
        for whole, pieces in JOINED.items():
            place = layer.removesuffix(whole)
            present = [f"{place}{piece}" for piece in pieces if f"{place}{piece}.weight" in old]
            if layer.endswith(whole) and present:
                values = value.chunk(len(present))
                parts |= {f"{piece}.{kind}": each for piece, each in zip(present, values, strict=True)}
        if layer == "attn_pool.q":
            parts[f"attn_pool.qkv.{kind}"] = torch.cat([value, state[f"attn_pool.kv.{kind}"]])
    if "dist_token" in old and "reg_token" in parts:
        parts["dist_token"] = parts["reg_token"]
    if getattr(vit, "no_embed_class", False) and "pos_embed" in parts and "cls_token" in parts:
        # The class token includes its position, see `_fold_class_position`. An unchanged one stays exactly as it is.
        first = old["pos_embed"][:, :1]
        is_unchanged = torch.equal(parts["cls_token"], old["cls_token"] + first)
        parts["cls_token"] = old["cls_token"] if is_unchanged else parts["cls_token"] - first
        parts["pos_embed"] = torch.cat([first, parts["pos_embed"]], dim=1)
    return parts


def _resampled(model: Any, size: tuple[int, int]) -> dict[str, Tensor]:
    """Return the position embeddings of a transformers model for another size, from its own function."""
    embeddings = _embeddings_of(model)
    if embeddings is None:  # it has only rotary positions
        return {}
    key, positions = next(
        (key, value) for key, value in model.state_dict().items() if "embeddings.position_embedding" in key
    )
    config = getattr(model.config, "vision_config", model.config)
    patch, own = pair(config.patch_size), pair(config.image_size)
    before, after = ((height // patch[0]) * (width // patch[1]) for height, width in (own, size))
    rows = positions.reshape(-1, positions.shape[-1])
    length = len(rows) - before + after
    with torch.no_grad():
        resampled = embeddings.interpolate_pos_encoding(rows.new_zeros(1, length, rows.shape[1]), *size)
    return {key: resampled}


def _embeddings_of(model: Any) -> Any:
    """Return the part of a transformers model that can resample its position embeddings, or None."""
    parts = (part for part in model.modules() if hasattr(part, "interpolate_pos_encoding"))
    return next(parts, None)


@torch.no_grad()
def _compare(model: Any, vit: Any, size: tuple[int, int], name: str, *, resampled: bool) -> Compared:
    """Compare a transformers model and its timm network on two random images, in float64.

    In float64 rounding hides no difference, such as that of an epsilon, and causes none.

    Returns:
        The class of the model's output, the names of its fields, and the largest difference.

    Raises:
        UserError: the outputs differ, or have other fields.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, vit.patch_embed.proj.in_channels, *size, generator=generator, dtype=torch.float64)
    options = _call_options(model, resampled)
    with in_float64(model) as device, _in_one_line(f"{name} cannot be called on {size[0]} x {size[1]} pixels"):
        expected = model(pixel_values=images.to(device), **options)
    if isinstance(expected, tuple):
        raise UserError(f"{name} returns a tuple", next_step="set return_dict=True in its configuration")
    with in_float64(vit) as device:
        tokens = vit.forward_features(images.to(device))
        actual = _fields(model, vit, tokens, vit.forward_head(tokens))
    strange = [field for field in expected if field not in actual]
    if strange:
        raise UserError(
            f"{name} returns {few(strange)}, which timm's network does not have",
            next_step="turn off what adds it to the output, such as output_hidden_states in the configuration",
        )
    fields = tuple(field for field, value in expected.items() if isinstance(value, Tensor))
    if not all(bool(expected[field].isfinite().all()) for field in fields):
        raise UserError(f"{name} has outputs that are not finite numbers", next_step="check its weights")
    differences = {field: difference(actual[field], expected[field]) for field in fields}
    return Compared(type(expected), fields, _largest(differences, name))


def _call_options(model: Any, resampled: bool) -> dict[str, bool]:
    """Return the options with which a model is called on images of another size, if it has such an option."""
    forward = getattr(_embeddings_of(model), "forward", len)
    if resampled and "interpolate_pos_encoding" in inspect.signature(forward).parameters:
        return {"interpolate_pos_encoding": True}
    return {}


def _largest(differences: Mapping[str, float], name: str) -> float:
    """Return the largest difference between the outputs; raise UserError if it is larger than rounding."""
    worst = max(differences, key=lambda field: differences[field])
    if not differences[worst] <= LIMIT:
        raise UserError(
            f"timm's network has other outputs than {name}, so the weights are not used",
            got=f"a difference of {differences[worst]:.2g} in {worst} on two random images",
            allowed=f"at most {LIMIT:g}",
            next_step="something in its class or configuration is not in timm's network, such as an activation; "
            "name a model without it",
        )
    return differences[worst]


@contextmanager
def in_float64(network: Any) -> Iterator[torch.device]:
    """Set a network to evaluation mode in float64 inside the block, and give its device.

    A copy would not do: functions that replace `forward`, as other libraries set them, call the network itself.
    """
    tensors = [*network.parameters(), *network.buffers()]
    data = [tensor.data for tensor in tensors]
    training = [part for part in network.modules() if part.training]
    device = tensors[0].device
    if device.type == "mps":  # which has no float64
        device = torch.device("cpu")
    try:
        network.eval()
        for tensor in tensors:
            tensor.data = tensor.data.to(device, torch.float64 if tensor.is_floating_point() else None)
        yield device
    finally:
        for tensor, old in zip(tensors, data, strict=True):
            tensor.data = old
        for part in training:
            part.training = True


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, over the largest expected value if that exceeds 1."""
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def _fields(model: Any, vit: Any, tokens: Tensor, head: Any) -> dict[str, Tensor]:
    """Return all fields of an output that a timm network gives, by their names in transformers; see `fields_of`."""
    fields = {"last_hidden_state": tokens}
    names = [field for layer, field in HEADS.items() if getattr(model, layer, None) is not None]
    if names:
        fields[names[0]] = head
    elif hasattr(vit, "pooler"):
        fields["pooler_output"] = vit.pooler(tokens)
    else:
        fields["pooler_output"] = head
    if hasattr(vit, "head_dist") and names:
        fields["cls_logits"], fields["distillation_logits"] = vit.head(tokens[:, 0]), vit.head_dist(tokens[:, 1])
        fields["logits"] = (fields["cls_logits"] + fields["distillation_logits"]) / 2
    return fields


@contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Raise a UserError in place of the errors of timm and transformers, which may be of any type."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {reason_of(error)}") from error


def report(converted: Converted) -> str:
    """Return the line about a conversion and its check."""
    name, network = type(converted.module).__name__, type(converted.vit).__mro__
    kind = next(cls.__name__ for cls in network if cls.__module__.startswith("timm."))
    height, width = converted.vit.patch_embed.img_size
    resampled = ", with position embeddings resampled as the model does it" if converted.is_resampled else ""
    return (
        f"{name} is used as timm's {kind} at {height} x {width} pixels{resampled}; checked: on two random images "
        f"the outputs differ by {converted.difference:.0e} from the model's own (limit {LIMIT:g})"
    )


def is_transformers(text: str) -> bool:
    """Return whether the name of a model is hf:FOLDER or hf:USER/NAME."""
    return text.startswith(TRANSFORMERS)


def folder_of(text: str) -> Path:
    """Return the folder of hf:FOLDER; of hf:USER/NAME the folder into which the Hugging Face Hub is downloaded.

    Raises:
        UserError: there is no such folder, or no config.json in it, and the Hub does not have it or is not reached.
    """
    name = text.removeprefix(TRANSFORMERS)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{folder} has no {CONFIG}", next_step="give a folder that save_pretrained of transformers wrote"
            )
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(
            f"'{text}': there is no such folder", allowed=f"{TRANSFORMERS}FOLDER, or {TRANSFORMERS}USER/NAME"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # of the network, the Hub or the file system
        raise UserError(
            f"'{text}' is no folder here, and cannot be downloaded from the Hugging Face Hub",
            got=plain(reason_of(error), 100),
            next_step=f"where there is a network: hf download {name} --local-dir DIR; then give {TRANSFORMERS}DIR",
        ) from error


def is_of_transformers(folder: Path) -> bool:
    """Return whether a folder has a model of transformers. A model of timm has another config.json beside it."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


def fingerprint(folder: Path) -> str:
    """Return a short hash of the files of a model: its configuration, its image processor and its weights."""
    digest = hashlib.sha256()
    processor = _processor_files(folder)
    for file in sorted(folder.iterdir()):
        if file.name == CONFIG or file in processor or file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()[:DIGITS]


def check_unchanged(folder: Path, name: str) -> None:
    """Raise UserError if the files of a model changed since it got its name, which ends with their hash."""
    if fingerprint(folder) != name.rpartition("-")[2]:
        raise UserError(f"{folder} changed while the run was under way", next_step="run it again")


def load(folder: Path, size: int | tuple[int, int] | None = None) -> Converted:
    """Return the model in a folder of transformers as the same network of timm, checked; see `convert`.

    Half precision becomes float32. Without a size, images have that of the folder's image processor, else of its
    configuration. How pictures are cut is not checked, see `published_cut`. A run loads a model for each of its cells.
    The outputs, which take most of the time, are compared once in a process. The conversion itself is made anew: it
    draws random numbers, on which a random head depends.

    Raises:
        UserError: transformers is not installed, the model is not supported, or its weights are missing or damaged.
    """
    cfg = published(folder)
    size = pair(cfg.input_size[1:] if size is None else size)
    case = fingerprint(folder), size
    converted = convert(read(folder), size, _compared.get(case))
    _compared[case] = Compared(converted.output, converted.fields, converted.difference)
    converted.vit.pretrained_cfg = cfg.to_dict()
    return converted


def read(folder: Path) -> Any:
    """Return the transformers model in a folder, in float32 and evaluation mode; see `load`."""
    with quiet_transformers() as transformers:
        cls, config = _class_of(transformers, folder)
        types = _types_in(folder, config)  # before transformers converts them
        model, info = _from_pretrained(cls, folder)
        missing = info["missing_keys"]
        if missing and all("pooler." in key for key in missing):
            model, info = _from_pretrained(cls, folder, add_pooling_layer=False)
    _check_names(folder, cls.__name__, info)
    if half := sorted(types & HALF_PRECISION.keys()):
        _warn_once(f"{folder}: {' and '.join(HALF_PRECISION[kind] for kind in half)} becomes float32")
    return model.eval()


def _check_names(folder: Path, name: str, info: Mapping[str, Any]) -> None:
    """Raise UserError if a folder lacks weights of a model, or has others.

    Args:
        folder, name: the folder, and the class of the model.
        info: what transformers says of the names of the weights.
    """
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{folder} lacks weights of {name}: {few(missing)}",
            next_step=f"name the class of these weights under 'architectures' in {CONFIG}",
        )
    shapes = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    if shapes:
        raise UserError(
            f"{folder} has weights of other shapes than {CONFIG} gives {name}: {few(sorted(shapes))}",
            next_step=f"correct {CONFIG}",
        )
    read_elsewhere = (*UNREAD, *HEADS)
    unread = [key for key in info["unexpected_keys"] if not any(word in key for word in read_elsewhere)]
    if unread:
        raise UserError(
            f"{folder} has weights that {name} does not have as {CONFIG} describes it: {few(sorted(unread))}",
            next_step=f"correct {CONFIG}, or load the model with transformers and save it without them",
        )


def _types_in(folder: Path, config: Any) -> set[str]:
    """Return the types of the numbers in the weights of a folder, as safetensors names them.

    Raises:
        UserError: weights are quantized, or their files are damaged.
    """
    types = set()
    with _in_one_line(f"cannot load the weights of {folder}"):
        for file in _weight_files(folder, config):
            with safe_open(file, "pt") as content:
                names = list(content.keys())
                types |= {content.get_slice(name).get_dtype() for name in names}
    if quantized := sorted(types - NUMBERS):
        raise UserError(
            f"{folder} has weights of type {few(quantized)}",
            allowed=sorted(NUMBERS),
            next_step="give weights that are not quantized",
        )
    return types


def _weight_files(folder: Path, config: Any) -> list[Path]:
    """Return the files of safetensors that transformers reads; a folder may have others, such as quantized ones.

    There are none if the weights are in other files, as of PyTorch.
    """
    names = (getattr(config, "transformers_weights", None), WEIGHTS, WEIGHTS_INDEX)
    for name in names:
        if name is None or not (folder / name).is_file():
            continue
        if not name.endswith(".json"):
            return [folder / name]
        parts = json.loads((folder / name).read_bytes())["weight_map"].values()
        return [folder / part for part in sorted(set(parts))]
    return []


def _class_of(transformers: Any, folder: Path) -> tuple[Any, Any]:
    """Return the class and the configuration of the model in a folder. No code in the folder runs."""
    if not is_of_transformers(folder):
        raise UserError(
            f"{folder / CONFIG} is not of the transformers library: it is no JSON object with 'model_type'",
            next_step="give a folder that save_pretrained of transformers wrote; a model of timm is timm:NAME with "
            "--weights FILE, or timm:hf-hub:USER/NAME",
        )
    with _in_one_line(f"transformers cannot read {folder / CONFIG}"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str):
        raise UserError(
            f"{folder / CONFIG} does not name the class of the model under 'architectures'",
            got=repr(names),
            allowed=(*CLASSES, *WITH_TEXT),
        )
    if name not in (*CLASSES, *WITH_TEXT) or not hasattr(transformers, name):
        raise unknown_class(name)
    return getattr(transformers, name), config


def meta_network(folder: Path, size: int | tuple[int, int]) -> Any:
    """Return the timm network of the model in a folder on the meta device, without weights.

    Raises:
        UserError: see `load`.
    """
    model, config = _skeleton(folder)
    family = family_of(model)
    assert family is not None
    size = pair(size)
    check_size(type(model).__name__, size, pair(config.patch_size))
    with torch.device("meta"), _in_one_line(f"timm cannot build the network of {folder}"):
        return family.network(model, config, size)


def _skeleton(folder: Path) -> tuple[Any, Any]:
    """Return the part for images of the model in a folder, on the meta device, and its configuration for images."""
    model = skeleton(folder)
    model = model.vision_model if type(model).__name__ in WITH_TEXT else model
    return model, getattr(model.config, "vision_config", model.config)


def skeleton(folder: Path) -> Any:
    """Return the transformers model in a folder on the meta device, without weights."""
    with quiet_transformers() as transformers:
        cls, config = _class_of(transformers, folder)
        with torch.device("meta"), _in_one_line(f"transformers cannot build the model in {folder}"):
            return cls(config)


def _from_pretrained(cls: Any, folder: Path, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model, and what transformers says of the names of its weights."""
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _in_one_line(f"transformers cannot load {folder}"):
        model, info = cls.from_pretrained(folder, **options, **more)
    return model, info


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Import transformers, without its messages and progress bars inside the block.

    Raises:
        UserError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "models of the transformers library need transformers",
            got=one_line(error),
            next_step=f"{INSTALL}; or give its weights with --weights FILE and timm's name with --model timm:NAME",
        ) from error
    logging_ = transformers.utils.logging
    level, bars = logging_.get_verbosity(), logging_.is_progress_bar_enabled()
    logging_.set_verbosity_error()
    logging_.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging_.set_verbosity(level)
        if bars:
            logging_.enable_progress_bar()


def published(folder: Path) -> PretrainedCfg:
    """Return timm's configuration of the model in a folder: its classes, the size of images, and their mean and std.

    Size, mean and std are those of the folder's image processor. Without one, they are that of the configuration, and
    those that are usual for the family.

    Raises:
        UserError: the configuration or the image processor of the folder cannot be used.
    """
    return _published(folder, _image_processor(folder))


def _published(folder: Path, processor: Any) -> PretrainedCfg:
    """Return `published` for a folder with this image processor, or with None."""
    model, config = _skeleton(folder)
    family = family_of(model)
    assert family is not None
    cfg = PretrainedCfg(
        architecture=type(model).__name__,
        num_classes=outputs_of(model),
        input_size=(config.num_channels, *pair(config.image_size)),
        mean=family.normalised["mean"],
        std=family.normalised["std"],
    )
    if processor is None:
        return cfg
    with _in_one_line(f"the image processor of {folder} has no usual size, mean and std"):
        return replace(cfg, **_pixels_of_processor(processor.to_dict(), cfg))


def published_cut(folder: Path) -> PretrainedCfg:
    """Return `published` with how pictures are cut: as the folder's image processor does it, which is checked.

    Without one, pictures are squashed.

    Raises:
        UserError: see `published`, or the image processor does something else.
    """
    processor = _image_processor(folder)
    cfg = _published(folder, processor)
    if processor is None:
        what = f"pictures are squashed, and normalised as is usual for {cfg.architecture}"
        _warn_once(f"{folder} has no image processor ({PROCESSOR}): {what}")
        return replace(cfg, interpolation="bicubic", crop_pct=1.0, crop_mode="squash")
    values = processor.to_dict()
    _check_steps(folder, values)
    with _in_one_line(f"the image processor of {folder} has no usual size"):
        cfg = replace(cfg, **_cut_of_processor(values, cfg))
    _check_pictures(folder, processor, cfg)
    return cfg


@cache
def _warn_once(line: str) -> None:
    """Log a line about a folder once in a process: a run loads a model for each of its cells."""
    log.warning("%s", line)


def _processor_files(folder: Path) -> list[Path]:
    """Return the files of a folder that describe its image processor."""
    alone, with_texts = folder / PROCESSOR, folder / PROCESSOR_WITH_TEXTS
    files = [alone] if alone.is_file() else []
    if with_texts.is_file() and b'"image_processor"' in with_texts.read_bytes():
        files.append(with_texts)
    return files


def _image_processor(folder: Path) -> Any:
    """Return the image processor of a folder, with the usual values of its class; None if the folder has none."""
    if not _processor_files(folder):
        return None
    what = f"transformers cannot read the image processor of {folder}"
    with quiet_transformers() as transformers, _in_one_line(what):
        return transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)


def _pixels_of_processor(values: Mapping[str, Any], cfg: PretrainedCfg) -> dict[str, Any]:
    """Return the size, mean and std of an image processor's values for timm's configuration of a model."""
    channels, height, width = cfg.input_size
    image = values.get("crop_size" if values.get("do_center_crop") else "size") or {}
    if "height" in image:
        height, width = int(image["height"]), int(image["width"])
    mean, std = (0.0,) * channels, (1.0,) * channels
    if values.get("do_normalize"):
        mean, std = (tuple(map(float, values[name])) for name in ("image_mean", "image_std"))
    if not (height > 0 and width > 0 and min(std) > 0):
        raise ValueError(f"{height} x {width} pixels, std {std}")
    return {"input_size": (channels, height, width), "mean": mean, "std": std}


def _cut_of_processor(values: Mapping[str, Any], cfg: PretrainedCfg) -> dict[str, Any]:
    """Return how pictures are cut by an image processor's values for timm's configuration of a model with its size."""
    _, height, _ = cfg.input_size
    size = values.get("size") or {}
    shorter = size.get("shortest_edge")
    resized = int(shorter or size.get("height", height))
    if height > resized:
        raise ValueError(f"{height} of {resized} pixels")
    crop = height / resized
    if int(height / crop) < resized:  # `cut_out` rounds down
        crop = math.nextafter(crop, 0)
    return {
        "interpolation": FILTERS[values["resample"]],
        "crop_pct": crop,
        "crop_mode": "center" if shorter else "squash",
    }


def _check_steps(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise UserError unless an image processor resizes pictures, divides them by 255, and normalises them."""
    allowed = {step: "True" for step in STEPS if not values.get(step)}
    if values.get("resample") not in tuple(FILTERS):  # a list, which may be the value, has no hash
        allowed["resample"] = " or ".join(f"{number} ({name})" for number, name in FILTERS.items())
    factor = values.get("rescale_factor")
    if not isinstance(factor, float) or not math.isclose(factor, RESCALE_FACTOR, rel_tol=RESCALE_TOLERANCE):
        allowed["rescale_factor"] = "1/255"
    if allowed:
        got = ", ".join(f"{name} {plain(repr(values.get(name)), 40)}" for name in allowed)
        raise _another_cut(folder, got, ", ".join(f"{name} {value}" for name, value in allowed.items()))


def _another_cut(folder: Path, got: str, allowed: str) -> UserError:
    """Return the error for an image processor that pictures cannot be cut by."""
    files = " or ".join(file.name for file in _processor_files(folder))
    return UserError(
        f"the image processor of {folder} does something else than to resize pictures, cut out their middle and "
        "normalise them by mean and std",
        got=got,
        allowed=allowed,
        next_step=f"correct {files}",
    )


def _check_pictures(folder: Path, processor: Any, cfg: PretrainedCfg) -> None:
    """Compare how a picture is cut and normalised with the folder's image processor.

    It is compared for squares in colour. Others are cut to another size or made grey before a network reads them.

    Raises:
        UserError: the pixels differ by more than `PIXEL_TOLERANCE`.
    """
    channels, height, width = cfg.input_size
    if channels != 3 or height != width:
        return
    # Without sharp edges, one that is shifted by a pixel, as it may be by rounding, is nearly the same.
    colours = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize((height * 2, height * 3 // 2), Image.Resampling.BILINEAR)
    resize: Any = {"center": "short"}.get(cfg.crop_mode, cfg.crop_mode)
    with _in_one_line(f"the image processor of {folder} cannot be used"):
        expected = processor(images=picture, return_tensors="np")["pixel_values"][0]
        rgb = cut_out(picture, height, cfg.crop_pct, resize, cast(Any, cfg.interpolation))
        actual = ((rgb / 255 - cfg.mean) / cfg.std).transpose(2, 0, 1)
    difference = np.inf  # another size
    if expected.shape == actual.shape:
        difference = (np.abs(expected - actual).mean((1, 2)) * cfg.std).max()
    if not difference <= PIXEL_TOLERANCE:
        got = f"a mean difference of {difference:.2g} on a random picture, in the range of pixels"
        raise _another_cut(folder, got, f"at most {PIXEL_TOLERANCE:g}")


def renamed(weights: Mapping[str, Tensor], vit: Any, expected: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return weights in the names of transformers with the names of a timm network, or None if they do not fit.

    Nothing checks that the network computes what the transformers model does.

    Args:
        weights: the weights of a file.
        vit: the timm network, which may lack some of the expected weights.
        expected: the weights of timm's names and shapes.
    """
    images = {key: value for key, value in weights.items() if not any(word in key for word in UNREAD)}
    for family in FAMILIES:
        if None in {part_of(family.names, key) for key in images}:
            continue
        state = to_timm(family, images, vit, expected)
        if {key for key in expected if key not in state} <= {"head.weight", "head.bias"}:
            return state
    return None


def has_names_of_transformers(weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights have the names of a transformers model, and not those of timm."""
    return any(re.search(r"(^|\.)embeddings\.(cls_token|patch_embedding|class_embedding)", key) for key in weights)
