"""timm models by name, and the trained weights they can start from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg, eva, load_model_config_from_hf, vision_transformer
from timm.models._hub import load_model_config_from_path
from torch import Tensor

from sparsebench.errors import UserError, unknown
from sparsebench.layers.weight_files import read_weights
from sparsebench.models.base import HEADS
from sparsebench.models.timm_parts import refuse

GIVE_A_FILE = "or give --weights FILE.safetensors"
HUB, FOLDER = "hf-hub:", "local-dir:"


def named_vit(name: str, canvas: int, classes: int, *, pretrained: bool = False) -> Any:
    """Return a timm VisionTransformer by name, for images of canvas x canvas pixels.

    Args:
        name: NAME or NAME.TAG, hf-hub:USER/NAME or local-dir:DIR, as timm has it.
        canvas: side of the images in pixels.
        classes: size of the head.
        pretrained: the weights that timm fetches for that name, its position embedding resampled by timm where the
            canvas is another; a head of another size stays random. False for random weights.

    Raises:
        UserError: timm has no such model, cannot make it so large, or cannot fetch its weights.
        UnsupportedError: an architecture that no strategy can act on, see `deep.refuse`.
    """
    if not (elsewhere(name) or timm.models.is_model(name)):
        raise unknown("timm model", name, timm.list_models(["vit_*", "deit*", "eva02_*"]))
    try:
        cfg = None if elsewhere(name) else timm.get_pretrained_cfg(name, allow_unregistered=False)
        if pretrained and not elsewhere(name) and (cfg is None or not cfg.has_weights):
            raise UserError(f"timm has no trained weights for '{name}'", next_step=f"name another model, {GIVE_A_FILE}")
        with _no_retries_told():
            vit = timm.create_model(name, pretrained=pretrained, img_size=canvas, num_classes=classes)
    except OSError as error:
        if name.startswith(FOLDER):
            raise UserError(f"timm cannot read '{name}': {_first_line(error)}") from error
        raise UserError(
            f"timm cannot fetch the trained weights of '{name}' ({_first_line(error)})",
            next_step=f"check the network, {GIVE_A_FILE}",
        ) from error
    except (AssertionError, ValueError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, TypeError):  # no image size can be said: an architecture of another kind
            with torch.device("meta"):
                refuse(timm.create_model(name))
        what = f"timm cannot make '{name}' for {canvas} x {canvas} pixels"
        raise UserError(f"{what}: {_first_line(error)}") from error
    refuse(vit)
    return vit


def elsewhere(name: str) -> bool:
    """Say whether a name is of a model on the Hugging Face Hub or in a folder, with a config.json of its own."""
    return name.startswith((HUB, FOLDER))


def _cfg(name: str) -> Any:
    """Return what timm knows of the weights of a name, or None."""
    if not elsewhere(name):
        return timm.get_pretrained_cfg(name, allow_unregistered=True) if timm.models.is_model(name) else None
    load = load_model_config_from_hf if name.startswith(HUB) else load_model_config_from_path
    try:
        with _no_retries_told():
            return PretrainedCfg(**load(name.partition(":")[2])[0])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None  # what is wrong is said when the model is made


def classes_of(name: str) -> int:
    """Return how many classes the weights know that timm has under a name; 1000 where it does not say."""
    cfg = _cfg(name)
    return 1000 if cfg is None else cfg.num_classes


def classes_in(path: Path) -> int | None:
    """Return how many classes the head has of a file of weights, or None where it has none; see `read_weights`."""
    given = read_weights(path)
    return next((len(given[f"{head}weight"]) for head in HEADS if f"{head}weight" in given), None)


def cut_of(name: str) -> dict[str, Any]:
    """Return how timm cuts test pictures for the weights it has under a name: canvas, crop, resize and filter.

    The canvas is left out where it is not square. Nothing of an unknown name.
    """
    if (cfg := _cfg(name)) is None:
        return {}
    _, height, width = cfg.input_size
    resize = {"center": "short"}.get(cfg.crop_mode, cfg.crop_mode)
    crop = {"crop": cfg.crop_pct, "resize": resize, "filter": cfg.interpolation}
    return crop | ({"canvas": height} if height == width else {})


@contextmanager
def _no_retries_told() -> Iterator[None]:
    """Keep what the hub's client tells of each new try to itself: one error says it all in the end."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_head(vit: Any, what: str) -> None:
    """Raise UserError unless the weights that timm has for the model come with a head of its size."""
    classes, size = vit.pretrained_cfg["num_classes"], vit.num_classes
    if classes != size:
        raise _other_head(what, f"a head of {classes} classes", size)


def load_weights(vit: Any, path: Path, *, fresh_head: bool) -> bool:
    """Put the weights of a file into a model; see `match_weights`. Numbers of another precision become the model's.

    Returns:
        whether the head is the file's too.
    """
    state, expected = match_weights(vit, path, fresh_head=fresh_head), vit.state_dict()
    head = all(state[key].data_ptr() != value.data_ptr() for key, value in expected.items() if key.startswith(HEADS))
    vit.load_state_dict(state)
    return head


def match_weights(vit: Any, path: Path, *, fresh_head: bool) -> dict[str, Tensor]:
    """Return the weights of a file, one for each of the model's.

    Names and sizes must be the model's but for what timm knows how to convert; a position embedding of another
    resolution is resampled as timm does it.

    Args:
        vit: the model; it may lie on the meta device.
        path: a file, see `read_weights`.
        fresh_head: whether a head that the file lacks, or has with other classes, may stay the model's own.

    Raises:
        UserError: the file's weights are not for this model, or are not finite.
    """
    given, expected = read_weights(path), vit.state_dict()
    patches = "patch_embed.proj.weight"
    try:
        # timm would resample the patches as well, which are part of the architecture here.
        same = given[patches].shape == expected[patches].shape if patches in given else True
        state = _as_timm_names_them(given, vit) if same else given
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        state = given  # not to be converted: what does not fit is named below
    heads = [key for key in expected if key.startswith(HEADS)]
    fits = all(key in state and state[key].shape == expected[key].shape for key in heads)
    sizes = [len(state[key]) for key in heads if key in state]
    if not fits:
        state = {key: value for key, value in state.items() if key not in heads} | {key: expected[key] for key in heads}
    if problems := _problems(state, expected):
        arch = getattr(vit, "pretrained_cfg", {}).get("architecture", type(vit).__name__)
        raise UserError(
            f"{path.name} holds the weights of another architecture than {arch}: {'; '.join(problems)}",
            next_step="name the model they were made with",
        )
    if not (fits or fresh_head):
        raise _other_head(path.name, f"a head of {sizes[0]} classes" if sizes else "no head", vit.num_classes)
    whole = [key for key, value in state.items() if expected[key].is_floating_point() > value.is_floating_point()]
    if whole:
        raise UserError(
            f"{path.name} holds numbers of type {str(state[whole[0]].dtype).removeprefix('torch.')}, in {_few(whole)}",
            allowed="real numbers, as of float32, float16 or bfloat16", next_step="give weights that are not quantized",
        )  # fmt: skip
    if bad := [key for key, value in state.items() if not value.is_meta and not bool(value.isfinite().all())]:
        raise UserError(f"{path.name} holds numbers that are not finite, in {_few(bad)}")
    return state


def _as_timm_names_them(given: dict[str, Tensor], vit: Any) -> dict[str, Tensor]:
    if isinstance(vit, eva.Eva):
        return eva.checkpoint_filter_fn(given, vit)
    return vision_transformer.checkpoint_filter_fn(given, vit, adapt_layer_scale=True)


def _problems(state: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return what does not fit between given weights and a model's own, the first few of each kind by name."""
    missing, strange = [k for k in expected if k not in state], [k for k in state if k not in expected]
    sizes = [
        f"{key} {tuple(state[key].shape)} in place of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    kinds = {"missing": missing, "unexpected": strange, "of another shape": sizes}
    return [f"{kind}: {_few(names)}" for kind, names in kinds.items() if names]


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _other_head(whose: str, head: str, size: int) -> UserError:
    return UserError(
        f"{whose} has {head}, and the task, which trains nothing, has {size}",
        next_step="give weights made for these classes, or name class folders as ImageNet does where the head is "
        "ImageNet's",
    )
