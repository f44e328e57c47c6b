"""The data sets that can be named: their use and source, where their files must lie, and how they are read."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sparsebench.errors import UserError
from sparsebench.tasks.sources.listing import listing

DIGITS, CIFAR10, CIFAR100, SVHN = "digits", "cifar10", "cifar100", "svhn"
CLASSES = {DIGITS: 10, CIFAR10: 10, CIFAR100: 100, SVHN: 10}
"""How many classes known sets have."""
PHOTOS, FLOWERS102 = "photos", "flowers102"
WATERBIRDS, CELEBA = "waterbirds", "celeba"

Use = Literal["foregrounds", "backgrounds", "task"]
State = Literal["there", "missing", "corrupt"]


@dataclass(frozen=True)
class Known:
    """A data set that can be named.

    Attributes:
        name: what users type.
        uses: what it can be: foregrounds, backgrounds, or a task of its own.
        pictures: how many there are.
        source: the page to get it from.
        licence, citation: as its makers say.
        torchvision: the class in torchvision.datasets that reads it, knows its checksums and can fetch it, or "".
        files: official files, below the data root.
        folder: where its pictures lie below the data root, or "".
        needs: the files beside the pictures; of those in one tuple one must be there.
        megabytes: to download.
    """

    name: str
    uses: tuple[Use, ...]
    pictures: int
    source: str
    licence: str
    citation: str
    torchvision: str = ""
    files: tuple[str, ...] = ()
    folder: str = ""
    needs: tuple[tuple[str, ...], ...] = ()
    megabytes: int = 0

    @property
    def places(self) -> tuple[str, ...]:
        """What must lie below the data root; nothing for what comes with scikit-learn."""
        if self.folder:
            return (self.folder,)
        return tuple(dict.fromkeys(file.partition("/")[0] for file in self.files))

    def look(self, root: Path, verify: bool = False) -> tuple[State, str]:
        """Return whether it is there, and what is missing or wrong: by names, or by torchvision's checksums as well."""
        for names in (*((file,) for file in self.files), *self.needs):
            if not any((root / self.folder / name).is_file() for name in names):
                place = f"{self.folder}/" if self.folder else ""
                return "missing", f"{place}{' or '.join(names)} is not there"
        try:
            if self.folder:
                count = len(listing(root / self.folder).names) if (root / self.folder).is_dir() else 0
                if count < self.pictures:
                    state: State = "corrupt" if count else "missing"
                    return state, f"{self.folder} holds {count} of {self.pictures} pictures"
            if verify and self.torchvision:
                for split in ("train", "test"):
                    dataset(self.name, root, split)
        except UserError as error:
            return "corrupt", str(error)
        return "there", ""


_ALL = (
    Known(
        DIGITS, ("foregrounds",), 1797, "https://archive.ics.uci.edu/dataset/80", "CC BY 4.0",
        "Alpaydin & Kaynak 1998, Optical Recognition of Handwritten Digits; comes with scikit-learn",
    ),
    Known(
        CIFAR10, ("foregrounds",), 60_000, "https://www.cs.toronto.edu/~kriz/cifar.html", "not stated",
        "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        torchvision="CIFAR10", megabytes=170,
        files=(
            *(f"cifar-10-batches-py/data_batch_{k}" for k in range(1, 6)),
            "cifar-10-batches-py/test_batch", "cifar-10-batches-py/batches.meta",
        ),
    ),
    Known(
        CIFAR100, ("foregrounds",), 60_000, "https://www.cs.toronto.edu/~kriz/cifar.html", "not stated",
        "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        torchvision="CIFAR100", megabytes=170,
        files=("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"),
    ),
    Known(
        SVHN, ("foregrounds",), 99_289, "http://ufldl.stanford.edu/housenumbers/", "non-commercial use",
        "Netzer et al. 2011, Reading Digits in Natural Images with Unsupervised Feature Learning",
        torchvision="SVHN", megabytes=246,
        files=("train_32x32.mat", "test_32x32.mat"),
    ),
    Known(
        PHOTOS, ("backgrounds",), 2, "https://scikit-learn.org", "CC BY 2.0",
        "flower.jpg (vultilion) and china.jpg (danielbuechele); come with scikit-learn",
    ),
    Known(
        FLOWERS102, ("backgrounds",), 8189, "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/", "not stated",
        "Nilsback & Zisserman 2008, Automated Flower Classification over a Large Number of Classes",
        torchvision="Flowers102", folder="flowers-102", megabytes=345,
        needs=(("imagelabels.mat",), ("setid.mat",)),
    ),
    Known(
        WATERBIRDS, ("task",), 11_788, "https://github.com/kohpangwei/group_DRO", "see CUB-200-2011 and Places",
        "Sagawa et al. 2020, Distributionally Robust Neural Networks for Group Shifts",
        folder="waterbird_complete95_forest2water2", needs=(("metadata.csv",),),
    ),
    Known(
        CELEBA, ("task",), 202_599, "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "non-commercial research",
        "Liu et al. 2015, Deep Learning Face Attributes in the Wild",
        folder="celeba",
        needs=(
            ("list_attr_celeba.txt", "list_attr_celeba.csv"), ("list_eval_partition.txt", "list_eval_partition.csv"),
        ),
    ),
)  # fmt: skip

KNOWN = {known.name: known for known in _ALL}
OFFICIAL = frozenset(known.name for known in _ALL if known.torchvision)
"""Sets whose files are the same everywhere: cells name them as they are."""
OWN_TASK = frozenset(known.name for known in _ALL if "task" in known.uses)
"""Sets with a published layout, each for the task of its name."""


def names_for(use: Use) -> tuple[str, ...]:
    """Return the names of the sets for that use."""
    return tuple(known.name for known in _ALL if use in known.uses)


def of_scikit_learn(name: str) -> Path:
    """Return a file of scikit-learn's data sets. They are read without it: its import takes longer than a cell."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / name


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
