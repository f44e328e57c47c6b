"""Two ways to make the same images: picture by picture with PIL, as many datasets do, and by sparsebench in batches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from sparsebench.files import CACHE
from sparsebench.models.deep import DeepViT
from sparsebench.tasks.base import Locations
from sparsebench.tasks.images import Composite
from sparsebench.tasks.sources.composites import locate_backgrounds, locate_images
from sparsebench.training.steps import Augmentation

SIDE, FOREGROUND, PATCH, CLASSES, BATCH = 32, 26, 4, 10, 128
GRID = (SIDE // PATCH, SIDE // PATCH)


class Made:
    """Random pictures in a folder, like those of a user, and in memory.

    Attributes:
        pictures: (n, 32, 32, 3) uint8, of 10 classes in turn.
        scenes: (n / 4, 32, 32, 3) uint8 backgrounds.
        task: the composite task on these pictures.
        locations: their folders.
    """

    def __init__(self, root: Path, n: int):
        rng = np.random.default_rng(0)
        self.pictures, self.scenes = (rng.integers(0, 256, (k, SIDE, SIDE, 3), dtype=np.uint8) for k in (n, n // 4))
        for k, pixels in enumerate(np.split(self.pictures, CLASSES)):
            for split, some in (("train", pixels), ("test", pixels[:1])):
                folder = root / "pictures" / split / f"class {k}"
                folder.mkdir(parents=True)
                for i, picture in enumerate(some):
                    Image.fromarray(picture).save(folder / f"{i:06}.ppm")
        np.savez(root / "scenes.npz", self.scenes)
        images, folder = locate_images(f"folder:{root / 'pictures'}")
        backgrounds, file = locate_backgrounds(str(root / "scenes.npz"))
        assert folder is not None and file is not None
        self.task = Composite(
            images=images, backgrounds=backgrounds, canvas=SIDE, foreground=FOREGROUND, patch=PATCH, test=1
        )
        self.locations: Locations = {images: folder, backgrounds: file}


@contextmanager
def made(n: int) -> Iterator[Made]:
    """Make n pictures in a temporary folder, with their own cache."""
    before = os.environ.get(CACHE)
    with TemporaryDirectory() as root:
        os.environ[CACHE] = str(Path(root) / "cache")
        try:
            yield Made(Path(root), n)
        finally:
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before


class PilComposite(Dataset):
    """Resizes each picture, flips it at random and pastes it on a background. The patch mask comes from a table."""

    def __init__(self, of: Made):
        self.pictures, self.scenes = of.pictures, of.scenes
        covered = np.zeros((SIDE - FOREGROUND + 1, SIDE), dtype=np.float32)
        for start, line in enumerate(covered):
            line[start : start + FOREGROUND] = 1
        self.covered = torch.from_numpy(covered.reshape(len(covered), GRID[0], PATCH).mean(axis=2))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[Tensor, int, Tensor]:
        picture = Image.fromarray(self.pictures[i]).resize((FOREGROUND, FOREGROUND), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        top, left = (random.randint(0, SIDE - FOREGROUND) for _ in range(2))
        scene = Image.fromarray(self.scenes[random.randrange(len(self.scenes))])
        scene.paste(picture, (left, top))
        pixels = torch.from_numpy(np.array(scene)).permute(2, 0, 1).contiguous()
        return pixels, i % CLASSES, torch.outer(self.covered[top], self.covered[left]).flatten()


class PilAugmented(Dataset):
    """Shifts and flips each picture at random by torchvision, and normalises it."""

    def __init__(self, pictures: np.ndarray):
        self.pictures = pictures
        self.change = transforms.Compose(
            [
                transforms.RandomCrop(SIDE, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5,) * 3, (0.5,) * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.change(Image.fromarray(self.pictures[i])), i % CLASSES


def loaded(dataset: Dataset) -> None:
    """Load a dataset once in batches, without worker processes."""
    for _ in DataLoader(dataset, batch_size=BATCH):
        pass


def composed(of: Made) -> None:
    """Draw the composite task's images and masks, and flip both in batches."""
    train = of.task.draw(len(of.pictures), 0, of.locations).train
    train.relevance_on(GRID)
    assert train.boxes is not None
    items, images = torch.arange(len(train.labels)), torch.from_numpy(train.inputs)
    augmentation = Augmentation(0, True, 0, torch.from_numpy(train.boxes), GRID)
    for rows in items.split(BATCH):
        augmentation(images.index_select(0, rows), rows, 0)


def augmented(images: Tensor, network: DeepViT) -> None:
    """Shift, flip and normalise (n, 3, 32, 32) uint8 images in batches, as a training step does."""
    items = torch.arange(len(images))
    augmentation = Augmentation(0, True, 4, None, GRID)
    for rows in items.split(BATCH):
        moved, _ = augmentation(images.index_select(0, rows), rows, 0)
        network.normalise(moved)
