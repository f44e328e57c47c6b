"""Relevant patches: placement on the grid, mask rules, levels of alpha_*, and no leak of labels by pruning."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sparsebench_plugins.oracle import Oracle

from sparsebench.errors import UserError
from sparsebench.measure.selection import aurocs
from sparsebench.models.actor import Actor
from sparsebench.models.vits import Timm, Vit
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.base import relevant
from sparsebench.tasks.images import Composite, Plain, Spurious
from sparsebench.tasks.sources.composites import locate_images

SMALL = {"canvas": 16, "foreground": 8, "test": 40, "pretrain_epochs": 0}
LITTLE = {"canvas": 16, "foreground": 8, "test": 4}
LEVELS = {0.84375: 36 / 54, 0.71875: 36 / 46, 0.625: 0.9, 0.5625: 1.0}
"""Keep rates of 64 patches, and alpha_* with 36 relevant patches."""


def shares_of(seed: int, foreground: int, canvas: int = 32, parts: int = 8) -> np.ndarray:
    """Return (n, N) shares of patches that a square at a random position covers, counted by pixels."""
    rng = np.random.default_rng(seed)
    shares = []
    for _ in range(5):
        top, left = rng.integers(0, canvas - foreground + 1, 2)
        pixels = np.zeros((canvas, canvas))
        pixels[top : top + foreground, left : left + foreground] = 1
        side = canvas // parts
        shares.append(pixels.reshape(parts, side, parts, side).mean(axis=(1, 3)).ravel())
    return np.array(shares, dtype=np.float32)


@given(st.integers(0, 10**6), st.integers(4, 32))
@settings(max_examples=60, deadline=None)
def test_mask_rules_do_what_their_names_say(seed, foreground):
    shares = shares_of(seed, foreground)
    some, half, inside, top = (relevant(shares, mask) for mask in ("any", "half", "inside", "top"))
    pixels = np.rint(shares * 16)
    assert (some == (pixels > 0)).all() and (half == (pixels >= 8)).all() and (inside == (pixels == 16)).all()
    for row, chosen in zip(shares, top, strict=True):
        number = round(foreground**2 / 16)  # the same at each position
        expected = sorted(range(64), key=lambda i: (-row[i], i))[:number]
        assert np.flatnonzero(chosen).tolist() == sorted(expected)


@pytest.mark.parametrize("cls", [Composite, Spurious])
def test_on_the_grid_each_patch_matters_wholly_or_not_at_all(cls):
    data = cls(placement="grid", test=200, pretrain_epochs=0).draw(200, 0, {})
    shares = data.test.relevance_on((8, 8))
    assert set(np.unique(shares)) == {0.0, 1.0} and (shares.sum(axis=1) == 36).all()
    places = {tuple(box) for box in data.test.boxes[:, :2]}
    assert places == {(4 * i, 4 * j) for i in range(3) for j in range(3)}


@pytest.mark.parametrize(
    "look", [{"placement": "grid"}, {"mask": "top"}, {"intensity": 0.5}, {"permuted": True}], ids=str
)
def test_variants_of_a_task_have_the_same_pictures(look):
    plain, other = (Composite(**SMALL, **some).draw(30, 1, {}) for some in ({}, look))
    assert (plain.train.labels == other.train.labels).all() and (plain.test.labels == other.test.labels).all()
    if "permuted" in look:
        return
    for split, changed in ((plain.train, other.train), (plain.test, other.test)):
        for x1, x2, a, b in zip(split.inputs, changed.inputs, split.boxes, changed.boxes, strict=True):
            cut = [x[:, t : t + 8, left : left + 8] for x, (t, left) in ((x1, a[:2]), (x2, b[:2]))]
            assert (cut[0] == cut[1]).all()


def test_intensity_scales_backgrounds_and_not_foregrounds():
    plain, dark = (Composite(**SMALL, intensity=i).draw(20, 0, {}).train for i in (1.0, 0.25))
    for bright, darkened, (top, left, height, width) in zip(plain.inputs, dark.inputs, plain.boxes, strict=True):
        inside = np.zeros((16, 16), dtype=bool)
        inside[top : top + height, left : left + width] = True
        assert (bright[:, inside] == darkened[:, inside]).all()
        assert (np.abs(bright[:, ~inside] * 0.25 - darkened[:, ~inside]) <= 0.5).all()
    black = Composite(**SMALL, intensity=0).draw(20, 0, {}).train
    assert black.inputs.any() and not black.inputs[0][:, ~_box(black.boxes[0])].any()


def _box(box: np.ndarray) -> np.ndarray:
    inside = np.zeros((16, 16), dtype=bool)
    inside[box[0] : box[0] + box[2], box[1] : box[1] + box[3]] = True
    return inside


@pytest.mark.parametrize("rate", LEVELS)
def test_images_of_every_group_keep_equally_many_tokens(rate):
    task = Spurious(placement="grid", test=80, pretrain_epochs=0)
    data = task.draw(8, 0, {})
    network = Vit(dim=16, depth=2, heads=2).build(data, 0)
    actor = Actor(Oracle(), Budget(keep_rate=rate), network.cost, network.grid, 0)
    shares = torch.from_numpy(data.test.relevance_on(network.grid))
    acting = actor.begin(torch.arange(80), 0, shares, training=False)
    network(torch.from_numpy(data.test.inputs), acting)
    kept = torch.zeros(80, 64).scatter(1, acting.index, 1.0)
    per_group = [set(kept[torch.from_numpy(data.test.groups == g)].sum(dim=1).tolist()) for g in range(4)]
    assert per_group == [{64 * rate}] * 4
    assert torch.equal(kept * shares, shares)  # all of the foreground
    assert float((kept * shares).sum() / kept.sum()) == pytest.approx(LEVELS[rate])


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: Composite(placement="grid", patch=5).check(), "patch must divide the canvas; got patch=5, canvas=32"),
        (lambda: Vit(patch=8).check(Composite(placement="grid")), "got patch=4 in the task, 8 in the model"),
        (lambda: Timm().check(Composite(placement="grid")), "got patch=4 in the task, 16 in the model"),
    ],
)
def test_a_grid_that_is_not_the_models_is_refused(ask, says):
    with pytest.raises(UserError, match=says):
        ask()
    Vit(patch=8).check(Composite(placement="grid", patch=8))
    Vit(patch=8).check(Composite(patch=4))


@pytest.fixture
def pictures(tmp_path):
    """Return a function that makes folders of pictures with given classes, and their paths by name."""

    def make(name, classes):
        for split in ("train", "test"):
            for label in classes:
                (tmp_path / name / split / label).mkdir(parents=True)
                Image.new("RGB", (8, 8), (9 * len(label), 0, 0)).save(tmp_path / name / split / label / "0.png")
        result, place = locate_images(f"folder:{tmp_path / name}")
        return result, {result: place}

    return make


def test_pre_training_on_other_pictures_leaves_out_the_classes_of_the_task(pictures):
    own, here = pictures("own", ["cat", "dog", "emu"])
    other, there = pictures("other", ["dog", "fox", "gnu", "hen"])
    task = Spurious(images=own, pretrain_images=other, pretrain_samples=50, pretrain_epochs=2, **LITTLE)
    first, samples = task.initial()
    assert (type(first), samples, first.images, first.before, first.epochs) == (Plain, 50, other, own, 2)
    assert task.draw(4, 0, here).classes == ("cat", "dog")
    assert first.draw(4, 0, here | there).classes == ("fox", "gnu", "hen")
    named = task.model_copy(update={"held_out": ("cat", "emu")}).initial()[0]
    assert named.draw(4, 0, here | there).classes == ("dog", "fox", "gnu", "hen")
    two, place = pictures("two", ["cat", "dog"])  # no class would be left
    assert Plain(images=two, **LITTLE).draw(4, 0, place).classes == ("cat", "dog")


def test_a_training_is_a_success_from_the_accuracy_asked_for_on():
    assert Composite().success(0.1, 1.0) is None
    assert [Composite(success_accuracy=0.775).success(9.0, a) for a in (0.774, 0.775, 0.9)] == [False, True, True]


@pytest.mark.parametrize("cls", [Composite, Spurious])
def test_on_tiles_every_patch_is_equally_often_foreground(cls):
    task = cls(placement="tiles", canvas=36, foreground=12, test=900, pretrain_epochs=0)
    relevance = task.draw(10, 0, {}).test.relevance_on((9, 9))
    assert set(np.unique(relevance)) == {0.0, 1.0}
    assert (relevance.sum(axis=1) == 9).all() and len(np.unique(relevance, axis=0)) == 9
    y, x = np.indices((9, 9)) - 4.0
    radial = np.broadcast_to(-np.hypot(y, x).ravel(), relevance.shape)
    places = np.unique(relevance, axis=0) > 0
    assert aurocs(radial[:9], places).mean() == pytest.approx(0.5, abs=1e-12)
    assert aurocs(radial, relevance > 0).mean() == pytest.approx(0.5, abs=0.03)
