"""Pooled features of the pictures in a folder, with a strategy or without, as one .npz file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.deploy.apply import apply, strategy_of
from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.errors import UserError
from sparsebench.files import whole_file
from sparsebench.models.deep import DeepViT
from sparsebench.models.timm_models import cut_of
from sparsebench.strategy.budget import AUTO
from sparsebench.tasks.folder import USUAL, Folder, cut_out
from sparsebench.tasks.sources.cache import BadPicturesError, in_threads
from sparsebench.tasks.sources.files import SPLITS, SUFFIXES, listing, read_rgb
from sparsebench.training.evaluation import halving
from sparsebench.training.schedules import MANY

ENDING = ".npz"
DENSE = "dense"


@dataclass(frozen=True)
class Pictures:
    """The pictures below a folder.

    Attributes:
        root: the folder.
        paths: their n paths in the folder, with "/", sorted.
        classes: the sorted names of the folders directly in it that have pictures; empty if all are loose.
    """

    root: Path
    paths: tuple[str, ...]
    classes: tuple[str, ...]

    def labels(self) -> np.ndarray:
        """Return (n,) int64, the number of the class folder of each picture; -1 for one that is in none."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        folders = [path.partition("/")[0] if "/" in path else "" for path in self.paths]
        return np.array([numbers.get(folder, -1) for folder in folders], dtype=np.int64)

    def without(self, paths: Sequence[str]) -> Pictures:
        """Return the pictures without some of them. The classes stay."""
        left_out = set(paths)
        return Pictures(self.root, tuple(path for path in self.paths if path not in left_out), self.classes)


@dataclass(frozen=True)
class Features:
    """Pooled features of n pictures.

    Attributes:
        values: (n, C) float32.
        pictures: the pictures, without those that could not be read.
        left_out: why pictures could not be read, by path.
        spec: the strategy with its budget and parameters.
        macs_ratio: MACs of a picture as a fraction of the dense MACs, mean over the pictures.
        cut: how pictures were cut: canvas, crop, resize, filter.
    """

    values: np.ndarray
    pictures: Pictures
    left_out: dict[str, str]
    spec: str
    macs_ratio: float
    cut: dict[str, Any]

    def write(self, file: Path, about: dict[str, Any]) -> None:
        """Write a .npz file with features, paths and about; if there are class folders, also with labels and classes.

        `about` is JSON: the given facts, and how the features were computed.
        """
        facts = {
            "strategy": self.spec,
            "macs_ratio": self.macs_ratio,
            "pictures": self.cut,
            "left_out": self.left_out,
        }
        arrays: dict[str, Any] = {
            "features": self.values,
            "paths": np.array(self.pictures.paths),
            "about": np.array(json.dumps(about | facts, ensure_ascii=False)),
        }
        if self.pictures.classes:
            arrays["labels"] = self.pictures.labels()
            arrays["classes"] = np.array(self.pictures.classes)
        with whole_file(file) as output:
            np.savez(output, **arrays)


def pictures_in(text: str) -> Pictures:
    """Return the pictures below a folder, DIR or folder:DIR.

    Raises:
        UserError: it is not a folder, has no pictures, or has splits in place of classes.
    """
    root = Path(text.removeprefix("folder:")).expanduser()
    if not root.is_dir():
        raise UserError("--images", got=f"'{text}', which is not a folder", allowed="folder:DIR")
    paths = tuple(listing(root).pictures)
    if not paths:
        raise UserError(f"{root} holds no pictures", allowed=", ".join(sorted(SUFFIXES)))
    classes = tuple(sorted({path.partition("/")[0] for path in paths if "/" in path}))
    if classes and SPLITS.issuperset(map(str.lower, classes)):
        raise UserError(
            f"{root} holds splits, not classes",
            got=", ".join(classes),
            next_step=f"name the folder of the classes, as in {root / classes[0]}",
        )
    return Pictures(root, paths, classes)


def extract(
    model: Any,
    cut: dict[str, Any],
    plugin: str,
    pictures: Pictures,
    *,
    learned: Path | None = None,
    batch: int = 32,
    device: str = "cpu",
    skip_bad: bool = False,
    on_done: Callable[[int], object] = lambda done: None,
) -> Features:
    """Return the pooled features of pictures: what the output layer of the model reads. The model loses its head.

    Pictures are read batch by batch. The random numbers of a strategy depend on the number of the picture only. With
    schedule=auto the schedule is chosen on some of the pictures.

    Args:
        model: the timm model.
        cut: how pictures are cut, see `cut_for`.
        plugin: the strategy with its budget, as for `apply`.
        pictures: the pictures.
        learned: tensors that the strategy has learned, see `apply`.
        batch: pictures per batch; halved while the device is out of memory.
        device: "cpu" or "cuda:i".
        skip_bad: whether pictures that cannot be read are left out; otherwise they are an error.
        on_done: called after each batch with its number of pictures.

    Raises:
        UserError: the strategy or the pictures do not fit the model, or pictures cannot be read.
    """
    model.reset_classifier(0)
    model.eval().to(device)
    sparse = _apply(model, plugin, learned, pictures, cut, skip_bad=skip_bad)
    _check_channels(sparse._network)
    reasons: dict[str, str] = {}
    parts: list[np.ndarray] = []
    macs: list[np.ndarray] = []
    for first in range(0, len(pictures.paths), batch):
        numbers = range(len(pictures.paths))[first : first + batch]
        pixels, bad = _read(pictures, numbers, cut, skip_bad=skip_bad)
        reasons |= bad
        if pixels:
            images = torch.from_numpy(np.stack(list(pixels.values()))).to(device)
            features, spent = _features(sparse, images, torch.tensor(list(pixels), device=device), batch)
            parts.append(features)
            macs.append(spent)
        on_done(len(numbers))
    if not parts:
        raise UserError(f"{pictures.root} holds no pictures that can be read", allowed=", ".join(sorted(SUFFIXES)))
    cost = sparse._network.cost
    return Features(
        values=np.concatenate(parts),
        pictures=pictures.without(list(reasons)),
        left_out=reasons,
        spec=sparse.spec,
        macs_ratio=float(np.concatenate(macs).mean() / cost.macs(cost.dense())),
        cut=cut,
    )


def versions() -> dict[str, str]:
    """Return the versions of the libraries on which features depend."""
    from sparsebench import __version__

    return {"sparsebench": __version__, "timm": timm.__version__, "torch": torch.__version__}


def cut_for(model: Any, arch: str) -> dict[str, Any]:
    """Return how pictures are cut for a timm model of this name: as timm states it, at the size of the model.

    Raises:
        UserError: the images of the model are not square, or it needs another way of cutting.
    """
    height, width = model.patch_embed.img_size
    if height != width:
        raise UserError(
            f"the model takes {height} x {width} pixels, but pictures are cut to squares",
            next_step="give --image-size SIDE; position embeddings are then resampled",
        )
    task = Folder().with_cut(cut_of(arch) | {"canvas": height})
    return {key: getattr(task, key) for key in USUAL}


def _check_channels(network: DeepViT) -> None:
    """Raise UserError unless the network takes colour or grey images."""
    if network.channels not in (1, 3):
        raise UserError(
            "pictures are read in colour, or in grey for a network with one channel",
            got=f"a network of {network.channels} channels",
            allowed="3, 1",
        )


def _apply(
    model: Any, plugin: str, learned: Path | None, pictures: Pictures, cut: dict[str, Any], *, skip_bad: bool
) -> SparseModel:
    """Apply a strategy to a model; with schedule=auto on some of the pictures, without labels.

    Raises:
        UserError: the strategy does not fit the model, or the pictures for the schedule cannot be read.
    """
    _, budget, _ = strategy_of(plugin, {})
    if budget is None or budget.schedule != AUTO:
        return apply(model, plugin, learned=learned)
    order = seeds.generator("schedule", "features").permutation(len(pictures.paths))[:MANY]
    pixels, bad = _read(pictures, sorted(order.tolist()), cut, skip_bad=skip_bad)
    if not pixels:
        raise UserError(
            "no picture on which to choose the schedule can be read",
            got=f"{len(bad):,} pictures of {pictures.root}, all unreadable",
            next_step="repair the pictures, or give another schedule than auto",
        )
    with apply(model, DENSE) as dense:
        network = dense._network
        _check_channels(network)
        images = torch.from_numpy(np.stack(list(pixels.values()))).to(next(model.parameters()).device)
        normed = network.normalise(images)
    return apply(model, plugin, learned=learned, images=normed)


def _read(
    pictures: Pictures, numbers: Sequence[int], cut: dict[str, Any], *, skip_bad: bool
) -> tuple[dict[int, np.ndarray], dict[str, str]]:
    """Read pictures by their numbers; return their (3, side, side) uint8 pixels, and why others cannot be read.

    Raises:
        BadPicturesError: some cannot be read, without `skip_bad`.
    """
    ways = {key: value for key, value in cut.items() if key != "canvas"}

    def pixels_of(number: int) -> np.ndarray:
        rgb = read_rgb(pictures.root / pictures.paths[number])
        return cut_out(rgb, cut["canvas"], **ways).transpose(2, 0, 1)

    good, bad = in_threads(pixels_of, numbers, lambda: None)
    reasons = {pictures.paths[number]: next(iter(error.reasons.values())) for number, error in bad.items()}
    if reasons and not skip_bad:
        in_full = {str(pictures.root / path): reason for path, reason in reasons.items()}
        raise BadPicturesError(in_full, len(pictures.paths))
    return good, reasons


@torch.no_grad()
def _features(sparse: SparseModel, images: Tensor, numbers: Tensor, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (B, C) features and the (B,) MACs of (B, 3, side, side) uint8 images with these (B,) numbers."""
    network = sparse._network
    cost = network.cost

    def work(size: int) -> tuple[np.ndarray, np.ndarray]:
        features, macs = [], []
        for part, items in zip(images.split(size), numbers.split(size), strict=True):
            acting = sparse._actor.begin(items, 0, None, training=False) if sparse._acts else None
            steps = cost.dense()
            features.append(network(part, acting).float())
            if acting is not None:
                acting.check_network()
                steps = acting.steps
            macs.append(np.broadcast_to(cost.macs(steps), len(items)))
        return torch.cat(features).cpu().numpy(), np.concatenate(macs)

    return halving(batch, work)
