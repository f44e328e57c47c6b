"""Pictures that encode the number of their class, and the weights of a network that reads it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from suite_text import suite_text

ARCH, CANVAS, BITS, BLOCK = "test_vit", 32, 10, 4
TASK = f"folder:canvas={CANVAS},crop=1"
"""The task, which neither resizes nor crops these pictures."""
GREY = 15
"""The position in a patch of the grey block, which bits are compared with."""


def picture(number: int) -> Image.Image:
    """Return a picture in which each patch encodes a number below 1024 as white and black blocks, one for each bit."""
    bits = [255 if number >> bit & 1 else 0 for bit in range(BITS)]
    patch = np.array([*bits, *[128] * (16 - BITS)], dtype=np.uint8).reshape(4, 4).repeat(BLOCK, 0).repeat(BLOCK, 1)
    return Image.fromarray(np.tile(patch, (2, 2))).convert("RGB")


def write_pictures(root: Path, folders: Mapping[str, int], each: int = 1) -> Path:
    """Write `each` pictures into each folder; `folders` maps its name to the number that they encode."""
    for name, number in folders.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(each):
            picture(number).save(root / name / f"{i}.png")
    return root


def write_weights(path: Path, numbers: Sequence[int]) -> Path:
    """Write the weights of a network that predicts class k for a picture of numbers[k]."""
    model = timm.create_model(ARCH, num_classes=len(numbers))
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in state.items():
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            value.fill_(1)
    dim = model.embed_dim
    for bit in range(BITS):
        for channel, sign in ((bit, 1), (BITS + bit, -1)):
            for block, factor in ((bit, sign), (GREY, -sign)):
                top, left = BLOCK * (block // 4), BLOCK * (block % 4)
                place = state["patch_embed.proj.weight"][channel, 0, top : top + BLOCK, left : left + BLOCK]
                place.fill_(factor / BLOCK**2)
            signs = torch.tensor([2.0 * (number >> bit & 1) - 1 for number in numbers])
            state["head.weight"][:, channel] = sign * signs
    # The class token sees the mean of all patches, which are equal, because queries and keys are 0.
    state["blocks.0.attn.qkv.weight"][2 * dim :] = torch.eye(dim)
    state["blocks.0.attn.proj.weight"][:] = torch.eye(dim)
    save_file(state, path)
    return path


def write_noise(root: Path, folders: Sequence[str], each: int = 7) -> Path:
    """Write folders of noise pictures of 48 x 40 pixels."""
    rng = np.random.default_rng(0)
    for name in folders:
        (root / name).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def write_random_weights(path: Path, arch: str = ARCH, classes: int = 1000, seed: int = 1) -> Path:
    """Write random weights of a timm model whose predictions differ between pictures."""
    torch.manual_seed(seed)
    model = timm.create_model(arch, num_classes=classes)
    with torch.no_grad():
        model.head.weight.normal_()  # otherwise it predicts the same class for all pictures
    save_file(model.state_dict(), path)
    return path


def write_suite(path: Path) -> Path:
    """Write a suite that tests only dense on a folder."""
    path.write_text(suite_text('name = "folder"\nmodel = "timm"\nn_train = [0]', budget="macs = 0.7"))
    return path
