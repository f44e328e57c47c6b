"""The features that probes learn from: computed once for all numbers of training images, and stored for other cells.

They are always rounded to half precision before use, so that the result of a cell does not depend on who computed them.
A file is named by the content of all that its features depend on, and by the machine that computed them. A lock makes a
second process wait for the first; without locks both compute the same content.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sparsebench import files
from sparsebench.measure.cost import Step
from sparsebench.measure.metrics import Metric
from sparsebench.records import store
from sparsebench.records.record import Failure, ScheduleChoice, Status, Value, canonical, digest

VERSION = 1
"""The version of the content of files, which a change of what they hold increases."""
WAIT = 0.1
"""Seconds between two attempts to lock a file."""
LARGEST = float(np.finfo(np.float16).max)
"""The largest number in half precision."""
ABOUT = "probe"
"""The key of a file's metadata that describes the features."""


class Shared(Value):
    """The fields of a record that all cells with the same features share, see `Record`."""

    metrics: dict[str, Metric]
    trajectory: tuple[Step, ...]
    schedule: ScheduleChoice | None
    samples: dict[str, tuple[float | None, ...]]
    notes: dict[str, str]


@dataclass(frozen=True)
class Probed:
    """The features of P training and n test images, with all that a probe's record needs besides.

    Attributes:
        name: the name of their file without its suffix, see `path_of`.
        train, test: (P, C) and (n, C) float16 features.
        train_labels, train_groups, test_labels, test_groups: numbers of classes and groups.
        foregrounds: (n,) numbers of foregrounds; empty if test images have none.
        classes, groups: the names of classes and groups.
        shared: the fields of the record that all cells with these features share.
    """

    name: str
    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray
    train_groups: np.ndarray
    test_labels: np.ndarray
    test_groups: np.ndarray
    foregrounds: np.ndarray
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    shared: Shared


@dataclass(frozen=True)
class Unavailable:
    """Features that cannot be computed: their name, with the status and the failure of each cell that needs them."""

    name: str
    status: Status
    failure: Failure


ARRAYS = ("train", "test", "train_labels", "train_groups", "test_labels", "test_groups", "foregrounds")


def rounded(features: np.ndarray) -> np.ndarray:
    """Return features as float16, divided by a power of two if they do not fit. Probes do not depend on the scale."""
    largest = float(np.abs(features).max(initial=0.0))
    while largest > LARGEST:
        features, largest = features / 2, largest / 2
    return features.astype(np.float16)


def path_of(out: Path, features: str, machine: str) -> Path:
    """Return the file of the features with this name, see `Job.features`, as a machine computes them.

    Args:
        out: the folder of a run.
        features: the name.
        machine: a text that names hardware and versions of libraries: features and speed depend on both.
    """
    return store.features_path(out, f"{features}-{digest(machine)}")


def features_at(path: Path, compute: Callable[[], Probed]) -> Probed:
    """Return the features of a file. If there is none, compute and store them.

    If the folder cannot be written, the features are computed and not stored.

    Args:
        path: the file. Without its suffix it has the name of the features.
        compute: returns the features.
    """
    with _locked(path):
        stored = _read(path)
        if stored is not None:
            return stored
        computed = compute()
        with suppress(OSError):
            files.write_whole(path, _content(computed))
    return computed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process computes the features of a file. The system releases the lock of a killed process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        while True:
            try:
                files.lock(file)
                break
            except BlockingIOError:
                time.sleep(WAIT)
            except OSError:  # no locks here
                break
        yield
    finally:
        files.unlock(file)
        os.close(file)


def _content(probed: Probed) -> bytes:
    """Return the content of a file with features."""
    about = {
        "version": VERSION,
        "name": probed.name,
        "classes": list(probed.classes),
        "groups": list(probed.groups),
        "shared": probed.shared.model_dump(mode="json"),
    }
    arrays = {name: np.ascontiguousarray(getattr(probed, name)) for name in ARRAYS}
    return save(arrays, {ABOUT: canonical(about)})


def _read(path: Path) -> Probed | None:
    """Return the features in a file; None if it is missing, damaged, or of another version or name."""
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
            if (about["version"], about["name"]) != (VERSION, path.stem):
                return None
            arrays = {array: file.get_tensor(array) for array in ARRAYS}
            shared = Shared.model_validate(about["shared"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return Probed(
        name=path.stem, **arrays, classes=tuple(about["classes"]), groups=tuple(about["groups"]), shared=shared
    )


def remove(out: Path, features: str) -> None:
    """Remove the files of the features with this name, of all machines, with their locks; then the folder if empty."""
    folder = store.features_path(out, features).parent
    for leftover in folder.glob(f"{glob.escape(features)}-*"):
        with suppress(OSError):
            leftover.unlink()
    with suppress(OSError):
        folder.rmdir()
