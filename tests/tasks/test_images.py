import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebench.errors import UserError
from sparsebench.tasks import images
from sparsebench.tasks.base import Split
from sparsebench.tasks.images import Composite, Plain, Spurious, paste, permute, warp
from sparsebench.tasks.sources.composites import backgrounds, foregrounds, locate_backgrounds, locate_images
from sparsebench.tasks.sources.files import listing, read_rgb, square

SMALL = {"canvas": 16, "foreground": 10, "test": 40}


def foreground_of(split, i):
    top, left, height, width = split.boxes[i]
    return split.inputs[i, :, top : top + height, left : left + width]


def foregrounds_of(split):
    return [foreground_of(split, i).tobytes() for i in range(len(split.labels))]


def outside(split, i):
    """Return a row or column of pixels, (16, 3), that the foreground does not cover, with its axis and position."""
    image = split.inputs[i].transpose(1, 2, 0)
    for axis in (0, 1):
        start, length = split.boxes[i][axis], split.boxes[i][2 + axis]
        if start > 0 or start + length < len(image):
            place = 0 if start > 0 else len(image) - 1
            return image.take(place, axis=axis), axis, place
    raise AssertionError("the foreground covers the canvas")


def lines(photo, axis, size):
    """Return the set of all lines of `size` pixels of a photograph, along its rows (axis 0) or columns."""
    photo = photo if axis == 0 else photo.transpose(1, 0, 2)
    return {row[i : i + size].tobytes() for row in photo for i in range(len(row) - size + 1)}


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_pasting_puts_the_very_pixels_in_the_box_and_changes_no_others(seed):
    rng = np.random.default_rng(seed)
    n, S = int(rng.integers(1, 5)), int(rng.integers(4, 12))
    s = int(rng.integers(1, S + 1))
    canvas = rng.integers(0, 256, (n, 3, S, S), dtype=np.uint8)
    pictures = rng.integers(0, 256, (n, 3, s, s), dtype=np.uint8)
    expected = canvas.copy()
    images = canvas.copy()
    boxes = paste(images, pictures, rng)
    for i, (top, left, height, width) in enumerate(boxes):
        assert (height, width) == (s, s) and 0 <= top <= S - s and 0 <= left <= S - s
        expected[i, :, top : top + s, left : left + s] = pictures[i]
    np.testing.assert_array_equal(images, expected)


def test_foregrounds_occur_at_every_position():
    canvas, pictures = np.zeros((400, 3, 4, 4), np.uint8), np.ones((400, 3, 2, 2), np.uint8)
    boxes = paste(canvas, pictures, np.random.default_rng(0))
    places, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert len(places) == 9 and counts.min() > 20


@given(st.integers(0, 10**6), st.sampled_from([(4, 4), (8, 8), (3, 5), (1, 1), (16, 2)]), st.sampled_from([16, 24, 20]))
@settings(max_examples=40, deadline=None)
def test_relevance_is_the_share_of_each_patch_that_the_box_covers(seed, grid, side):
    rng = np.random.default_rng(seed)
    n, (rows, columns) = 4, grid
    sizes = rng.integers(1, side + 1, (n, 2))
    boxes = np.concatenate([rng.integers(0, side - sizes + 1), sizes], axis=1)
    split = Split(np.zeros((n, 3, side, side), np.uint8), np.zeros(n), np.zeros(n), boxes=boxes)
    relevance = split.relevance_on(grid)
    assert relevance.dtype == np.float32
    for box, result in zip(boxes, relevance, strict=True):
        top, left, height, width = box
        mask = np.zeros((side, side))
        mask[top : top + height, left : left + width] = 1
        fine = np.kron(mask, np.ones((rows, columns)))
        expected = fine.reshape(rows, side, columns, side).mean(axis=(1, 3)).flatten()
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_composite_has_every_class_equally_often():
    """Composite has every class equally often and the foreground of its label."""
    data = Composite(**SMALL).draw(60, 0, {})
    pool = foregrounds("digits", 10, {})
    for split, per_class, n in ((data.train, pool.train, 60), (data.test, pool.test, 40)):
        assert split.inputs.shape == (n, 3, 16, 16) and split.inputs.dtype == np.uint8
        assert np.bincount(split.labels).tolist() == [n // 10] * 10
        assert split.groups.tolist() == [0] * n
        known = {label: {x.tobytes() for x in per_class[name]} for label, name in enumerate(pool.classes)}
        assert all(f in known[label] for f, label in zip(foregrounds_of(split), split.labels, strict=True))
    assert data.classes == pool.classes and data.group_names == ("all",)


@pytest.fixture(scope="module")
def real(real_images, tmp_path_factory):
    """Return a small set of real pictures: four classes and 25 backgrounds."""
    root = tmp_path_factory.mktemp("real")
    for split, n in (("train", 30), ("test", 20)):
        for name in ("airplane", "bird", "cat", "dog"):
            (root / "images" / split / name).mkdir(parents=True)
            for path in sorted((real_images / "cifar10" / split / name).iterdir())[:n]:
                shutil.copy(path, root / "images" / split / name)
    (root / "plants").mkdir()
    for path in sorted((real_images / "plants").iterdir())[:25]:
        shutil.copy(path, root / "plants")
    images, images_root = locate_images(f"folder:{root / 'images'}", None, False)
    plants, plants_root = locate_backgrounds(os.fspath(root / "plants"))
    return SimpleNamespace(
        root=root, names={"images": images, "backgrounds": plants}, locations={images: images_root, plants: plants_root}
    )


def pictures(root, size):
    return {
        square(read_rgb(path), size).transpose(2, 0, 1).tobytes() for path in map(root.joinpath, listing(root).pictures)
    }


def test_real_foregrounds_are_pasted_on_real_backgrounds_split_by_split(real):
    data = Composite(**SMALL, **real.names).draw(60, 0, real.locations)
    assert data.classes == ("airplane", "bird", "cat", "dog")
    every = [
        square(read_rgb(path), 16)
        for path in map((real.root / "plants").joinpath, listing(real.root / "plants").pictures)
    ]
    for test, (split, part) in enumerate(((data.train, "train"), (data.test, "test"))):
        scenes = [scene for i, scene in enumerate(every) if (i % 5 == 4) == test]
        for i, label in enumerate(split.labels):
            originals = pictures(real.root / "images" / part / data.classes[label], 10) if i < 6 else None
            assert originals is None or foreground_of(split, i).tobytes() in originals
            line, axis, place = outside(split, i)
            assert any(np.array_equal(scene.take(place, axis=axis), line) for scene in scenes)
    assert not set(foregrounds_of(data.train)) & set(foregrounds_of(data.test))


def test_a_source_of_the_held_out_classes_alone_is_pre_trained_on_both(real, tmp_path):
    root = shutil.copytree(real.root / "images", tmp_path / "two")
    for split in ("train", "test"):
        shutil.rmtree(root / split / "cat")
        shutil.rmtree(root / split / "dog")
    name, place = locate_images(f"folder:{root}", None, False)
    assert Plain(**SMALL, images=name).draw(6, 0, {name: place}).classes == ("airplane", "bird")


@pytest.mark.parametrize("task", [Composite(**SMALL), Spurious(**SMALL)], ids=lambda t: t.name)
def test_backgrounds_belong_to_their_split(task):
    """A background is of the part for its split and only a group tells its kind."""
    data, photos, pool = task.draw(40, 0, {}), backgrounds("photos", 16, {}).photos, foregrounds("digits", 10, {})
    parts = {(k, t, axis): lines(photos[k][t], axis, 16) for k in (0, 1) for t in (0, 1) for axis in (0, 1)}
    for test, split in enumerate((data.train, data.test)):
        kinds = []
        for i in range(40):
            line, axis, _ = outside(split, i)
            ((kind, part),) = [key[:2] for key, known in parts.items() if key[2] == axis and line.tobytes() in known]
            assert part == test
            kinds.append(kind)
        if task.name == "composite":
            assert 8 < sum(kinds) < 32
            continue
        assert kinds == (split.groups % 2).tolist()
        allowed = [{x.tobytes() for x in (pool.test if test else pool.train)[name]} for name in data.classes]
        assert all(f in allowed[g // 2] for f, g in zip(foregrounds_of(split), split.groups, strict=True))


def test_all_foregrounds_are_used_before_any_is_repeated():
    pool = foregrounds("digits", 10, {})
    n = min(len(pool.train[name]) for name in ("3", "8"))
    assert len(set(foregrounds_of(Spurious(**SMALL).draw(2 * n, 0, {}).train))) == 2 * n


@pytest.mark.parametrize(
    ("agreement", "counts"), [(0.5, [25, 25, 25, 25]), (1.0, [50, 0, 0, 50]), (0.75, [38, 12, 12, 38])]
)
def test_the_agreement_can_be_chosen(agreement, counts):
    data = Spurious(**SMALL, agreement=agreement).draw(100, 0, {})
    assert np.bincount(data.train.groups, minlength=4).tolist() == counts
    with pytest.raises(ValidationError, match="agreement"):
        Spurious(agreement=0.4)


def test_plain_has_a_clean_canvas_and_no_held_out_class():
    data = Plain(**SMALL).draw(32, 0, {})
    assert data.classes == tuple("01245679")
    assert np.bincount(data.train.labels).tolist() == [4] * 8
    for i in range(32):
        assert foreground_of(data.train, i).any()
        rest = data.train.inputs[i].copy()
        top, left, height, width = data.train.boxes[i]
        rest[:, top : top + height, left : left + width] = 0
        assert not rest.any()


def test_pre_training_is_on_the_other_classes_with_the_same_sizes():
    task, n = Spurious(**SMALL, held_out=("1", "7"), pretrain_epochs=3, pretrain_samples=50, lr=0.01).initial()
    assert isinstance(task, Plain) and n == 50
    assert (task.canvas, task.foreground, task.epochs, task.lr) == (16, 10, 3, 0.01)
    assert task.draw(8, 0, {}).classes == tuple("02345689")
    assert task.initial() is None and Spurious(pretrain_epochs=0).initial() is None


def same(a, b):
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("inputs", "labels", "groups", "boxes"))


@pytest.mark.parametrize("cls", [Composite, Spurious, Plain])
def test_a_repetition_is_the_same_again_and_unlike_the_next(cls):
    first, again, other = (cls(**SMALL).draw(30, repetition, {}) for repetition in (0, 0, 1))
    assert same(first.train, again.train) and same(first.test, again.test)
    assert not np.array_equal(first.train.inputs, other.train.inputs)
    assert not np.array_equal(first.train.boxes, other.train.boxes)
    assert not np.array_equal(first.test.inputs, other.test.inputs)


TILES = "tiles: the foreground must divide the canvas, and patch the foreground"
APART = {
    "a foreground larger than the canvas": (
        {"canvas": 16, "foreground": 17},
        "got foreground=17, canvas=16",
    ),
    "one class held out": ({"held_out": ("3",)}, "two"),
    "three": ({"held_out": ("1", "2", "3")}, "two"),
    "one class twice": ({"held_out": ("3", "3")}, "two"),
    "permuted and flipped": ({"permuted": True, "flip": True}, "cannot be flipped; got permuted=True, flip=True"),
    "permuted and shifted": (
        {"permuted": True, "shift": 2},
        "shifted; got placement=anywhere, permuted=True",
    ),
    "on the grid and shifted": ({"placement": "grid", "shift": 2}, "cannot be shifted; got placement=grid"),
    "patches that do not divide": ({"permuted": True, "patch": 5}, "patch must divide the canvas; got patch=5"),
    "tiles that do not fit": ({"placement": "tiles", "canvas": 40, "foreground": 12}, TILES),
    "tiles of half patches": ({"placement": "tiles", "canvas": 36, "foreground": 18}, TILES),
    "patience alone": ({"patience": 3}, r"patience needs a validation split.*validation=0\.1"),
    "a shift out of the image": ({"shift": 32}, "shift; got 32; allowed: less than the image's 32 pixels"),
}


@pytest.mark.parametrize("what", APART)
def test_parameters_that_contradict_each_other_are_a_user_error(what):
    params, says = APART[what]
    with pytest.raises(UserError, match=says):
        Spurious(**params).check()


def test_held_out_classes_that_the_source_lacks_are_a_user_error():
    with pytest.raises(UserError, match=r"got \['ten'\]"):
        Spurious(**SMALL, held_out=("3", "ten")).draw(4, 0, {})


TRAINING = {"warmup": 0.2, "smoothing": 0.1, "flip": True, "shift": 3, "accumulate": 2, "validation": 0.2,
            "patience": 3, "validate_by": "worst_group"}  # fmt: skip


@pytest.mark.parametrize("changes", [TRAINING, {"pretrain_samples": 50}, {"pretrain_epochs": 0}], ids=str)
@pytest.mark.parametrize("cls", [Composite, Spurious])
def test_training_parameters_do_not_change_the_data(cls, changes):
    plain, other = cls(**SMALL).draw(30, 1, {}), cls(**SMALL, **changes).draw(30, 1, {})
    assert same(plain.train, other.train) and same(plain.test, other.test)
    assert same(plain.test, cls(**SMALL).draw(50, 1, {}).test)
    recipe = cls(**TRAINING).recipe()
    assert {name: getattr(recipe, name) for name in TRAINING} == TRAINING


def patches(images, side):
    """Return (n, N, 3, side, side), the patches of (n, 3, S, S) images row by row."""
    starts = range(0, images.shape[-1], side)
    return np.stack([images[:, :, r : r + side, c : c + side] for r in starts for c in starts], axis=1)


@pytest.mark.parametrize("cls", [Composite, Spurious, Plain])
def test_permuted_images_have_the_patches_of_plain_images_in_one_order(cls):
    plain, task = cls(**SMALL), cls(**SMALL, permuted=True, patch=4)
    data, moved = plain.draw(20, 0, {}), task.draw(20, 0, {})
    order = task.order()
    assert sorted(order) == list(range(16)) and order.tolist() != list(range(16)) and plain.order() is None
    for split, permuted in ((data.train, moved.train), (data.test, moved.test)):
        assert split.order is None and permuted.order.tolist() == order.tolist()
        assert permuted.inputs.dtype == np.uint8 and permuted.inputs.flags.c_contiguous
        np.testing.assert_array_equal(patches(permuted.inputs, 4), patches(split.inputs, 4)[:, order])
        np.testing.assert_array_equal(permute(permuted.inputs, 4, np.argsort(order)), split.inputs)
        np.testing.assert_array_equal(permuted.labels, split.labels)
        relevance = permuted.relevance_on((4, 4))
        np.testing.assert_array_equal(relevance, split.relevance_on((4, 4))[:, order])
        assert not np.array_equal(relevance, split.relevance_on((4, 4)))


def test_the_order_of_patches_is_one_for_each_size_of_canvas_and_patch():
    order = Composite(**SMALL, permuted=True).order().tolist()
    for task in (
        Plain(**SMALL, permuted=True, epochs=9),
        Spurious(canvas=16, foreground=4, permuted=True),
        Composite(**SMALL, permuted=True).initial()[0],
    ):
        assert task.order().tolist() == order
    assert len(Composite(permuted=True).order()) == 64
    assert len(Composite(permuted=True, patch=8).order()) == 16
    assert Composite(permuted=True, patch=8).order().tolist() != order
    assert not Composite(**SMALL).initial()[0].permuted


def test_relevance_on_patches_other_than_the_permuted_is_a_user_error():
    data = Plain(**SMALL, permuted=True, patch=4).draw(2, 0, {})
    with pytest.raises(UserError, match="got 16 permuted patches, a model with 64"):
        data.train.relevance_on((8, 8))


@pytest.mark.parametrize("task", [Composite(**SMALL), Spurious(**SMALL | {"test": 300}), Plain(**SMALL, epochs=3)])
@pytest.mark.parametrize("repetition", [0, 1])
def test_a_foreground_has_one_number_everywhere(task, repetition):
    """A test of two classes has more items than pictures: some are shown twice, with the same number."""
    data, pool = task.draw(50, repetition, {}).hold_back(0.2), foregrounds("digits", 10, {})
    for split, n, source in (
        (data.train, 40, pool.train),
        (data.validation, 10, pool.train),
        (data.test, None, pool.test),
    ):
        pictures = [(name, picture.tobytes()) for name, several in source.items() for picture in several]
        assert split.foregrounds.shape == (n or task.test,)
        pairs = [
            (data.classes[label], pixels) for label, pixels in zip(split.labels, foregrounds_of(split), strict=True)
        ]
        assert pairs == [pictures[number] for number in split.foregrounds]


TILED = {"canvas": 24, "foreground": 12, "placement": "tiles", "test": 40}


def warped_by_hand(picture: np.ndarray, strength: float, changes: np.ndarray) -> np.ndarray:
    """Return the warped (s, s) channel, pixel by pixel: the bilinear value at the source position."""
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
def test_each_pixel_is_read_from_its_source_position(strength: float) -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    changes = np.random.default_rng(7).uniform(-1, 1, (5, 3, 1, 1))[:, :, 0, 0]
    made = warp(pictures, strength, np.random.default_rng(7)).astype(float)
    for n in range(3):
        for channel in range(3):
            expected = warped_by_hand(pictures[n, channel].astype(float), strength, changes[:, n])
            assert np.abs(made[n, channel] - expected).max() < 1  # rounded to integers


@pytest.mark.parametrize("cls", [Composite, Spurious])
def test_augmentation_changes_only_training_foregrounds(cls) -> None:
    plain, changed = (cls(**TILED, affine=a).draw(60, 0, {}) for a in (0.0, 1.0))
    assert (plain.test.inputs == changed.test.inputs).all() and (plain.train.boxes == changed.train.boxes).all()
    differs = (plain.train.inputs != changed.train.inputs).any(axis=1)
    for picture, (top, left, height, width) in zip(differs, plain.train.boxes, strict=True):
        assert picture[top : top + height, left : left + width].any()
        picture[top : top + height, left : left + width] = False
    assert not differs.any()


def test_a_repeated_picture_is_augmented_anew() -> None:
    data = Spurious(**TILED, affine=1.0).draw(600, 0, {})  # 240 digits of two classes, each at least twice
    boxes = data.train.boxes
    cut = {x[:, t : t + h, w : w + v].tobytes() for x, (t, w, h, v) in zip(data.train.inputs, boxes, strict=True)}
    assert len(cut) == 600


@pytest.mark.parametrize("cls", [Composite, Spurious, Plain])
def test_the_last_of_the_drawn_samples_are_held_back(cls):
    drawn = cls(canvas=16, foreground=10, test=20, permuted=True).draw(30, 1, {})
    data = drawn.hold_back(0.25)
    assert len(data.train.labels) == 22 and data.validation is not None
    for name in ("inputs", "labels", "groups", "boxes"):
        whole = np.concatenate([getattr(data.train, name), getattr(data.validation, name)])
        np.testing.assert_array_equal(whole, getattr(drawn.train, name))
    parts = [part.relevance_on((4, 4)) for part in (data.train, data.validation)]
    np.testing.assert_array_equal(np.concatenate(parts), drawn.train.relevance_on((4, 4)))
    assert data.test is drawn.test


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_samples_must_be_left_on_both_sides(share):
    with pytest.raises(UserError, match=r"validation must leave samples on both sides; got (0|8) of 8"):
        Composite(canvas=16, foreground=10, test=20).draw(8, 0, {}).hold_back(share)
