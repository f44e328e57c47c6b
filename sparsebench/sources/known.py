"""The data sets that can be named: what each is for, where it comes from, and where its files must lie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from sparsebench.errors import UserError
from sparsebench.sources.listing import names_in

DIGITS, CIFAR10, CIFAR100, SVHN = "digits", "cifar10", "cifar100", "svhn"
CLASSES = {DIGITS: 10, CIFAR10: 10, CIFAR100: 100, SVHN: 10}
"""How many classes known sets have."""
PHOTOS, FLOWERS102 = "photos", "flowers102"
WATERBIRDS, CELEBA = "waterbirds", "celeba"

Use = Literal["foregrounds", "backgrounds", "task"]
State = Literal["there", "missing", "corrupt"]

SMALL = 100_000
"""Bytes up to which a file's checksum is looked at even where only a quick look is wanted."""


_md5 = partial(hashlib.md5, usedforsecurity=False)


@dataclass(frozen=True)
class File:
    """A file of an official archive: its path below the data root, MD5, and bytes (None: only known to be few)."""

    path: str
    md5: str
    size: int | None = None

    def complaint(self, root: Path, verify: bool) -> tuple[State, str]:
        """Return its state and what is wrong with it; `verify` reads files that are not small, too."""
        path = root / self.path
        try:
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return "corrupt", f"{self.path} has {size} bytes, not {self.size}"
            with path.open("rb") as file:
                if (verify or size <= SMALL) and hashlib.file_digest(file, _md5).hexdigest() != self.md5:
                    return "corrupt", f"{self.path} has another checksum than the official one"
        except (FileNotFoundError, NotADirectoryError):
            return "missing", f"{self.path} is not there"
        except OSError as error:
            return "corrupt", f"{self.path} cannot be read: {error.strerror}"
        return "there", ""


@dataclass(frozen=True)
class Known:
    """A data set that can be named.

    Attributes:
        name: what users type.
        uses: what it can be: foregrounds, backgrounds, or a task of its own.
        pictures: how many there are.
        source: the page to get it from.
        licence, citation: as its makers say.
        torchvision: the class in torchvision.datasets that reads and can fetch it, or "".
        files: official files with their checksums, below the data root.
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
    files: tuple[File, ...] = ()
    folder: str = ""
    needs: tuple[tuple[str, ...], ...] = ()
    megabytes: int = 0

    @property
    def places(self) -> tuple[str, ...]:
        """What must lie below the data root; nothing for what comes with scikit-learn."""
        if self.folder:
            return (self.folder,)
        folders = {file.path.partition("/")[0]: None for file in self.files}
        return tuple(folders)

    def look(self, root: Path, verify: bool = False) -> tuple[State, str]:
        """Return whether it is there, and what is missing or wrong: by names and sizes, or by checksums as well."""
        for file in self.files:
            state, note = file.complaint(root, verify)
            if state != "there":
                return state, note
        for names in self.needs:
            if not any((root / self.folder / name).is_file() for name in names):
                return "missing", f"{self.folder}/{' or '.join(names)} is not there"
        if self.folder:
            try:
                count = len(names_in(root / self.folder)) if (root / self.folder).is_dir() else 0
            except UserError as error:
                return "corrupt", str(error)
            if count < self.pictures:
                return ("corrupt" if count else "missing"), f"{self.folder} holds {count} of {self.pictures} pictures"
        return "there", ""


def _cifar(folder: str, *files: tuple[str, str, int | None]) -> tuple[File, ...]:
    return tuple(File(f"{folder}/{name}", md5, size) for name, md5, size in files)


_ALL = (
    Known(
        DIGITS, ("foregrounds",), 1797, "https://archive.ics.uci.edu/dataset/80", "CC BY 4.0",
        "Alpaydin & Kaynak 1998, Optical Recognition of Handwritten Digits; comes with scikit-learn",
    ),
    Known(
        CIFAR10, ("foregrounds",), 60_000, "https://www.cs.toronto.edu/~kriz/cifar.html", "not stated",
        "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        torchvision="CIFAR10", megabytes=170,
        files=_cifar(
            "cifar-10-batches-py",
            ("data_batch_1", "c99cafc152244af753f735de768cd75f", 31035704),
            ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", 31035320),
            ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751", 31035999),
            ("data_batch_4", "634d18415352ddfa80567beed471001a", 31035696),
            ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", 31035623),
            ("test_batch", "40351d587109b95175f43aff81a1287e", 31035526),
            ("batches.meta", "5ff9c542aee3614f3951f8cda6e48888", 158),
        ),
    ),
    Known(
        CIFAR100, ("foregrounds",), 60_000, "https://www.cs.toronto.edu/~kriz/cifar.html", "not stated",
        "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
        torchvision="CIFAR100", megabytes=170,
        files=_cifar(
            "cifar-100-python",
            ("train", "16019d7e3df5f24257cddd939b257f8d", 155249918),
            ("test", "f0ef6b0ae62326f3e7ffdfab6717acfc", None),
            ("meta", "7973b15100ade9c7d40fb424638fde48", None),
        ),
    ),
    Known(
        SVHN, ("foregrounds",), 99_289, "http://ufldl.stanford.edu/housenumbers/", "non-commercial use",
        "Netzer et al. 2011, Reading Digits in Natural Images with Unsupervised Feature Learning",
        torchvision="SVHN", megabytes=246,
        files=(
            File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 182040794),
            File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64275384),
        ),
    ),
    Known(
        PHOTOS, ("backgrounds",), 2, "https://scikit-learn.org", "CC BY 2.0",
        "flower.jpg (vultilion) and china.jpg (danielbuechele); come with scikit-learn",
    ),
    Known(
        FLOWERS102, ("backgrounds",), 8189, "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/", "not stated",
        "Nilsback & Zisserman 2008, Automated Flower Classification over a Large Number of Classes",
        torchvision="Flowers102", folder="flowers-102", megabytes=345,
        files=(
            File("flowers-102/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
            File("flowers-102/setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c"),
        ),
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
