"""Training foregrounds that are turned, scaled, sheared and moved anew in every image."""

import math

import numpy as np
import pytest

from sparsebench.tasks import images
from sparsebench.tasks.images import Composite, Spurious, warp

SMALL = {"canvas": 24, "foreground": 12, "placement": "tiles", "test": 40}


def by_hand(picture: np.ndarray, strength: float, changes: np.ndarray) -> np.ndarray:
    """Return what one (s, s) channel becomes, pixel by pixel: the bilinear value at the place that it is read from."""
    s, out = len(picture), np.zeros(picture.shape)
    turn, size, shear, down, right = strength * changes
    middle = (s - 1) / 2
    for row in range(s):
        for column in range(s):
            y, x = row - middle - images.MOVE * s * down, column - middle - images.MOVE * s * right
            x += images.SHEAR * shear * y
            cos, sin, scale = (
                math.cos(images.TURN * turn),
                math.sin(images.TURN * turn),
                math.exp(images.SCALE * size),
            )
            v, h = (
                min(max(p, 0.0), s - 1.0)
                for p in (scale * (cos * y - sin * x) + middle, scale * (sin * y + cos * x) + middle)
            )
            top, left = min(int(v), s - 2), min(int(h), s - 2)
            a, b = v - top, h - left
            out[row, column] = (
                (1 - a) * (1 - b) * picture[top, left] + (1 - a) * b * picture[top, left + 1]
                + a * (1 - b) * picture[top + 1, left] + a * b * picture[top + 1, left + 1]
            )  # fmt: skip
    return out


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_each_pixel_is_read_from_where_the_changes_say(strength: float) -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    changes = np.random.default_rng(7).uniform(-1, 1, (5, 3, 1, 1))[:, :, 0, 0]
    made = warp(pictures, strength, np.random.default_rng(7)).astype(float)
    for n in range(3):
        for channel in range(3):
            expected = by_hand(pictures[n, channel].astype(float), strength, changes[:, n])
            assert np.abs(made[n, channel] - expected).max() < 1  # whole numbers


def test_without_strength_nothing_changes_and_many_are_as_few() -> None:
    pictures = np.random.default_rng(2).integers(0, 256, (1500, 3, 6, 6), dtype=np.uint8)
    assert (warp(pictures, 0.0, np.random.default_rng(0)) == pictures).all()


@pytest.mark.parametrize("cls", [Composite, Spurious])
def test_training_foregrounds_change_and_nothing_else_does(cls) -> None:
    plain, changed = (cls(**SMALL, affine=a).draw(60, 0, {}) for a in (0.0, 1.0))
    assert (plain.test.inputs == changed.test.inputs).all() and (plain.train.boxes == changed.train.boxes).all()
    differs = (plain.train.inputs != changed.train.inputs).any(axis=1)
    for picture, (top, left, height, width) in zip(differs, plain.train.boxes, strict=True):
        assert picture[top : top + height, left : left + width].any()
        picture[top : top + height, left : left + width] = False
    assert not differs.any()


def test_a_picture_that_comes_again_is_drawn_anew() -> None:
    data = Spurious(**SMALL, affine=1.0).draw(600, 0, {})  # 240 digits of two classes, each at least twice
    boxes = data.train.boxes
    cut = {x[:, t : t + h, w : w + v].tobytes() for x, (t, w, h, v) in zip(data.train.inputs, boxes, strict=True)}
    assert len(cut) == 600
