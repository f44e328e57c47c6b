"""Time the decoding of a folder of pictures on one core and on all cores, and the time until bad pictures are named.

    python benchmarks/decoding.py [--pictures 10000] [--side 64 256] [--rounds 7]

Pictures are JPEG files of random sizes, waves with noise; three of them are bad. Each round decodes the good pictures
on one core, then on all cores, and then the whole folder until the bad pictures are named. The cache is empty each
time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from sparsebench.files import CACHE
from sparsebench.tasks.folder import cut_out
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.cache import BadPicturesError, Pixels, decode
from sparsebench.tasks.sources.files import contents, listing

CANVAS, CROP, CLASSES, BAD = 224, 0.9, 10, 3


def make(root: Path, n: int, sides: tuple[int, int]) -> None:
    """Write n pictures with random sides in a range."""
    rng = np.random.default_rng(0)
    for i in range(n):
        path = root / f"class-{i % CLASSES}" / f"{i:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(sides[0], sides[1] + 1, 2)
        small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        waves = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = waves + rng.normal(0, 8, waves.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def pixels_in(root: Path) -> Pixels:
    """Return the pixels of a folder's pictures, as the task `folder` reads them."""
    found = contents(listing(root))
    return found.pixels(list(found.pictures), CANVAS, partial(cut_out, crop=CROP), "cropped")


def seconds(pixels: Pixels, cores: set[int]) -> float:
    """Return the seconds of decoding on the given cores."""
    cache.clear()
    os.sched_setaffinity(0, cores)
    start = time.perf_counter()
    try:
        decode([pixels])
    except BadPicturesError as error:
        assert len(error.reasons) == BAD, error
    return time.perf_counter() - start


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--side", type=int, nargs=2, default=(64, 256))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    every = os.sched_getaffinity(0)
    with TemporaryDirectory() as place:
        os.environ[CACHE] = str(Path(place) / "cache")
        root = Path(place) / "pictures"
        make(root, given.pictures, tuple(given.side))
        good = pixels_in(root)
        for path in sorted(root.rglob("*.jpg"))[:BAD]:
            (root / path.parent.name / f"bad-{path.name}").write_bytes(path.read_bytes()[:400])
        bad = pixels_in(root)
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(given.rounds):
            took["1 core"].append(seconds(good, {min(every)}))
            took[f"{len(every)} cores"].append(seconds(good, every))
            took["bad ones named"].append(seconds(bad, every))
    for name, times in took.items():
        low, middle, high = min(times), statistics.median(times), max(times)
        print(f"{name}: {middle:.2f} s ({low:.2f} to {high:.2f}), {given.pictures / middle:.0f} pictures/s")
    one, more, _ = took.values()
    ratios = [a / b for a, b in zip(one, more, strict=True)]
    print(f"faster: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
