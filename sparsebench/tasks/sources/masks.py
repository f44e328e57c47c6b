"""Pictures with masks: DIR/images/NAME.* with DIR/masks/NAME.png, which has a class number for each pixel.

Pictures and masks may be in subfolders. If there are images/train and images/val (or training, validation, test), these
are the training and the test pictures.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from sparsebench.errors import UserError, few, is_out_of_memory
from sparsebench.measure.patches import IGNORE
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.cache import BadPicturesError
from sparsebench.tasks.sources.files import (
    DIGITS,
    FORMATS,
    MOST_PIXELS,
    Contents,
    contents,
    contents_of,
    listing,
    read_bytes,
    reason_of_picture,
)

MASKED = "masked"
"""Beginning of the name of a folder of pictures with masks in cells."""
IMAGES, MASKS, SUFFIX = "images", "masks", ".png"
LAYOUT = "DIR/images/NAME.* and DIR/masks/NAME.png"
LARGEST = 253
"""The largest possible class number."""
MOST_NUMBERS = 2**16
TRAIN, TEST = ("train", "training"), ("val", "validation", "test")
"""Names of the subfolders of training and test pictures, in order of priority."""
GREY, PALETTE = 0, 3
"""Types of PNG files whose pixels are numbers."""
ORIENTATION, ROTATED = 0x0112, range(2, 9)
"""The EXIF field for the rotation of a picture, and its values for rotated and mirrored ones."""
VERSION = 2
"""Version of what is stored of masks. Increase it if it changes."""


def has_masks(folder: Path) -> bool:
    """Return whether a folder has pictures with masks, and not class folders."""
    return (folder / IMAGES).is_dir() and not (folder / "train").is_dir()


def locate(root: Path, skip_bad: bool) -> tuple[str, Path]:
    """Return the name in cells of a folder of pictures with masks, and its place, after checking the masks.

    Raises:
        UserError: a picture has no mask, or a mask cannot be used.
    """
    if not (root / MASKS).is_dir():
        raise UserError(f"--images folder: {root / MASKS} is not a folder", allowed=LAYOUT)
    files = contents(_with_strays(listing(root)), skip_bad=skip_bad)
    pairs = _pairs(files)
    if not pairs:
        raise UserError(f"{root / IMAGES} holds no pictures", allowed=LAYOUT)
    lonely = [picture for picture, mask in pairs.items() if mask not in files.pictures]
    if lonely:
        raise UserError(
            f"{root}: {len(lonely)} of {len(pairs)} pictures have no mask: {few(lonely)}",
            next_step=f"add {root / pairs[lonely[0]]}, or remove the picture",
        )
    uses = Counter(pairs.values())
    alike = [picture for picture, mask in pairs.items() if uses[mask] > 1]
    if alike:
        raise UserError(
            f"{root}: {len(alike)} of {len(pairs)} pictures share a mask with another picture: {few(alike)}",
            next_step="remove or rename them: the name of a picture without its suffix must be unique",
        )
    if len(pairs) < 2:
        raise UserError(f"{root / IMAGES} holds one picture", allowed="at least two, for training and test")
    numbers_of(files)
    return f"{MASKED}-{files.fingerprint}", root


def _with_strays(listed: Contents) -> Contents:
    """Return a listing in which files that belong to no picture with a mask are noted."""
    every = _every_pair(listed)
    used = _for_training_or_test(every)
    in_pairs = {*every, *every.values()}
    strays = [name for name in listed.pictures if name not in in_pairs]
    unused = [name for name in every if name not in used]
    others = dict(listed.others)
    if strays:
        others[f"neither pictures in {IMAGES} nor masks of them"] = strays
    if unused:
        folders = sorted({PurePosixPath(name).parts[1] for name in used})
        others[f"pictures in neither {IMAGES}/{f' nor {IMAGES}/'.join(folders)}"] = unused
    return replace(listed, others=others)


def _pairs(files: Contents) -> dict[str, str]:
    """Return the mask of each picture for training or test, by their paths in the folder."""
    return _for_training_or_test(_every_pair(files))


def _for_training_or_test(pairs: dict[str, str]) -> dict[str, str]:
    """Return the pairs whose pictures are for training or test: all, unless there are subfolders with both."""
    splits = _splits(pairs)
    return pairs if splits is None else {name: pairs[name] for split in splits for name in split}


def _every_pair(files: Contents) -> dict[str, str]:
    """Return the mask that each picture should have, by their paths in the folder, sorted by picture."""
    files_of = {_png(name): name for name in (*files.pictures, *files.left_out) if name.lower().endswith(SUFFIX)}
    pairs = dict[str, str]()
    for name in files.pictures:
        if not name.startswith(f"{IMAGES}/"):
            continue
        expected = _png(f"{MASKS}/{name.removeprefix(f'{IMAGES}/')}")
        mask = files_of.get(expected, expected)  # its suffix may be in upper case
        if mask not in files.left_out:
            pairs[name] = mask
    return pairs


def _png(name: str) -> str:
    """Return a path with the suffix of masks."""
    return PurePosixPath(name).with_suffix(SUFFIX).as_posix()


def _splits(pictures: Collection[str]) -> tuple[list[str], list[str]] | None:
    """Return the training and the test pictures, if there are subfolders with both."""
    train, test = _in(TRAIN, pictures), _in(TEST, pictures)
    return (train, test) if train and test else None


def _in(splits: Collection[str], pictures: Collection[str]) -> list[str]:
    """Return the pictures in the first of these subfolders that has some."""
    for split in splits:
        names = [name for name in pictures if name.startswith(f"{IMAGES}/{split}/")]
        if names:
            return names
    return []


class MaskedPictures:
    """The pictures of a folder with their masks.

    Args:
        name: the name of the folder in cells.
        root: the folder.

    Attributes:
        train, test: sorted paths of training and test pictures, if the folder has both; else `train` is empty.
    """

    def __init__(self, name: str, root: Path):
        self.root = root
        self.files = contents_of(name, root)
        self.mask_of = _pairs(self.files)
        self.train, self.test = _splits(self.mask_of) or ([], list(self.mask_of))

    def check_numbers(self, largest: int, background: int, ignore: int) -> list[int]:
        """Return the sorted class numbers of all masks, without the one to ignore.

        Raises:
            UserError: a number of an object is larger than `largest`.
        """
        strange = {}
        every: set[int] = set()
        for mask, numbers in numbers_of(self.files).items():
            every.update(numbers)
            if beyond := [number for number in numbers if number > largest and number not in (background, ignore)]:
                strange[mask] = beyond
        if strange:
            names = [f"{mask} ({few(list(map(str, numbers)))})" for mask, numbers in strange.items()]
            raise UserError(
                f"{self.root}: {len(strange)} of {len(self.mask_of)} masks have class numbers out of range",
                got=few(names),
                allowed=f"0 to {largest}, and ignore={ignore}",
                next_step="set largest, or ignore, of the task",
            )
        return sorted(every - {ignore})

    def pixels(self, names: Sequence[str], size: int) -> cache.Pixels:
        """Return the (n, 3, size, size) pixels of pictures: their middle squares."""
        return self.files.pixels(names, size)

    def segments(self, names: Sequence[str], size: int, table: np.ndarray) -> cache.Pixels:
        """Return the (n, 1, size, size) classes of the pixels of pictures: the middle squares of their masks.

        Args:
            names: the pictures.
            size: side in pixels.
            table: (MOST_NUMBERS,) uint8 class of each number.
        """
        masks = [self.mask_of[name] for name in names]

        def row(i: int) -> np.ndarray:
            numbers = _read(read_bytes(self.root / masks[i], self.files.pictures[masks[i]]))
            return table[_middle(numbers, size)][None]

        key = hashlib.sha256(os.fsencode("\0".join(masks)) + table.tobytes()).hexdigest()[:DIGITS]
        return cache.Pixels(f"{self.files.fingerprint}-{key}-{size}-mask", (len(masks), 1, size, size), row)


def table_of(background: int, ignore: int) -> np.ndarray:
    """Return (MOST_NUMBERS,) uint8, the class of each number of a mask: 0 for the background, IGNORE for `ignore`.

    The numbers below the background increase by one; if it is negative, there is no background and all do.
    """
    numbers = np.arange(MOST_NUMBERS)
    classes = numbers + ((numbers < background) | (background < 0))
    classes[numbers == background] = 0
    classes[(numbers == ignore) | (classes > IGNORE)] = IGNORE
    return classes.astype(np.uint8)


def numbers_of(files: Contents) -> Mapping[str, Sequence[int]]:
    """Return the sorted numbers in each mask; the result is cached.

    Raises:
        UserError: masks cannot be used.
    """
    file = f"{files.fingerprint}-masks{VERSION}-{cache.versions()}"
    if (stored := cache.read_about(file)) is not None:
        return dict(stored)
    picture_of = {mask: picture for picture, mask in _pairs(files).items()}

    def look(mask: str) -> list[int]:
        path = files.root / mask
        try:
            numbers = _read(read_bytes(path, files.pictures[mask]))
            _check_shape(numbers, _size_of(read_bytes(files.root / picture_of[mask])))
        except Exception as error:  # Pillow does not document what its readers raise for damaged files
            if is_out_of_memory(error):
                raise MemoryError(f"{path} does not fit the memory") from error
            raise BadPicturesError({mask: reason_of_picture(error)}) from error
        return [int(number) for number in np.unique(numbers)]

    text = f"{len(picture_of):,} masks to check"
    numbers, bad = cache.in_threads(look, list(picture_of), cache.counter(text, len(picture_of)))
    if bad:
        reasons = [f"{mask} ({error.reasons[mask]})" for mask, error in sorted(bad.items())]
        raise UserError(
            f"{files.root}: {len(bad)} of {len(picture_of)} masks cannot be used: {few(reasons)}",
            next_step="repair them, or remove them with their pictures",
        )
    cache.keep_about(file, numbers)
    return numbers


def _read(data: bytes) -> np.ndarray:
    """Return the (height, width) numbers of a mask.

    Raises:
        ValueError: it is not a PNG of one channel of numbers, or it is damaged.
    """
    from PIL import Image

    if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) < 26:
        raise ValueError("it is not a PNG file" if data else "it is empty")
    bits, kind = data[24], data[25]  # of the header, which comes first
    if kind not in (GREY, PALETTE):
        raise ValueError("it has colours or transparency, and not one class number for each pixel")
    with Image.open(BytesIO(data), formats=("PNG",)) as picture:
        picture.verify()  # the checksums: without them, damaged data may be decoded to other numbers
    with Image.open(BytesIO(data), formats=("PNG",)) as picture:
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS}")
        numbers = np.asarray(picture).astype(np.int64)
    if kind == GREY and bits in (2, 4):  # Pillow spreads these shades over 8 bits
        numbers //= 255 // (2**bits - 1)
    return numbers


def _size_of(data: bytes) -> tuple[int, int]:
    """Return the width and the height of a picture that has a mask.

    Raises:
        ValueError: it is of no known format, or has a rotation in EXIF.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            rotation = picture.getexif().get(ORIENTATION)
            size = picture.size
    except UnidentifiedImageError as error:
        raise ValueError("its picture is of no known format" if data else "its picture is empty") from error
    if rotation in ROTATED:
        # Some programs draw masks on the rotated picture, others on the pixels of the file.
        raise ValueError("its picture has a rotation in EXIF, so it is unknown which way the mask lies")
    return size


def _check_shape(numbers: np.ndarray, size: tuple[int, int]) -> None:
    """Raise ValueError unless a mask has the shape of its picture, up to a pixel; it may have another resolution."""
    width, height = size
    rows, columns = numbers.shape
    if abs(rows - columns * height / width) > 1 and abs(columns - rows * width / height) > 1:
        raise ValueError(f"it has {columns} x {rows} pixels, another shape than its picture of {width} x {height}")


def _middle(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return the middle square of a mask as (size, size) numbers: those at the middles of the new pixels."""
    side = min(numbers.shape)
    top, left = ((length - side) // 2 for length in numbers.shape)
    places = ((np.arange(size) + 0.5) * side / size).astype(int)
    return numbers[top + places[:, None], left + places]
