"""Sets that torchvision reads from the official files, whose checksums it asks for."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import UserError
from sparsebench.sources.known import KNOWN


def check(name: str, root: Path, *, download: bool) -> None:
    """Raise UserError unless the files of a set are the official ones; fetch them first if asked to and if not."""
    known = KNOWN[name]
    if download:
        for split in ("train", "test"):
            dataset(name, root, split, download=True)
    state, note = known.look(root, verify=True)
    if state != "there":
        raise UserError(
            f"{name} is {state} in {root} ({note})",
            next_step=f"give --data-root DIR with {_places(name)} in it, or --download to fetch it "
            f"({known.megabytes} MB from {known.source})",
        )


def _places(name: str) -> str:
    return " and ".join(KNOWN[name].places)


def dataset(name: str, root: Path, split: str, *, download: bool = False, **options: Any) -> Any:
    """Return torchvision's dataset of one split: "train", "val" or "test".

    Raises:
        UserError: its files are not whole, or cannot be read or fetched.
    """
    made = getattr(importlib.import_module("torchvision.datasets"), KNOWN[name].torchvision)
    which = {"train": split == "train"} if name.startswith("cifar") else {"split": split}
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 reads CIFAR-10 in a way that numpy 2.4 announces the end of; nothing a user can mend.
            warnings.simplefilter("ignore")
            return made(str(root), download=download, **which, **options)
    except RuntimeError as error:
        raise UserError(
            f"{name} is missing or corrupt in {root} ({error})",
            next_step=f"give --data-root DIR with {_places(name)} in it, or --download to fetch it",
        ) from error
    except OSError as error:
        raise UserError(f"{name} cannot be read or fetched into {root} ({error})") from error


def pixels_and_labels(data: Any) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the (n, height, width, 3) uint8 pictures of a dataset in memory, their (n,) labels, and the classes.

    SVHN has channels first, calls its targets labels, and has no names for them.
    """
    if hasattr(data, "targets"):
        return data.data, np.array(data.targets), tuple(data.classes)
    labels = np.asarray(data.labels)
    return data.data.transpose(0, 2, 3, 1), labels, tuple(map(str, range(10)))
