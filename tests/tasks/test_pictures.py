import numpy as np
import pytest
from pydantic import ValidationError

from sparsebench.errors import UserError
from sparsebench.tasks.images import Composite, Plain, Spurious

TRAINING = {"warmup": 0.2, "smoothing": 0.1, "flip": True, "shift": 3, "accumulate": 2, "validation": 0.2,
            "patience": 3, "validate_by": "worst_group"}  # fmt: skip


@pytest.mark.parametrize("cls", [Composite, Spurious, Plain])
def test_how_a_network_is_trained_does_not_touch_what_is_drawn(cls):
    plain, other = (cls(canvas=16, foreground=10, test=20, **more).draw(30, 1, {}) for more in ({}, TRAINING))
    for a, b in ((plain.train, other.train), (plain.test, other.test)):
        np.testing.assert_array_equal(a.inputs, b.inputs)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.boxes, b.boxes)


def test_the_recipe_is_as_asked():
    recipe = Composite(**TRAINING).recipe()
    assert {name: getattr(recipe, name) for name in TRAINING} == TRAINING


@pytest.mark.parametrize("moved", [{"permuted": True, "flip": True}, {"permuted": True, "shift": 2},
                                   {"placement": "grid", "shift": 2}])  # fmt: skip
def test_images_on_the_patch_grid_are_not_shifted_nor_permuted_ones_flipped(moved):
    with pytest.raises(UserError, match=r"cannot be shifted, nor permuted patches flipped; got placement=.*permuted="):
        Composite(**moved).check()
    for allowed in ({"placement": "grid", "flip": True}, {"flip": True}, {"shift": 2}, {"permuted": True}):
        Composite(**allowed).check()


@pytest.mark.parametrize("wrong", [{"warmup": 1.0}, {"smoothing": -0.1}, {"shift": -1}, {"accumulate": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        Composite(**wrong)


@pytest.mark.parametrize("cls", [Composite, Spurious, Plain])
def test_the_last_of_the_drawn_samples_are_held_back(cls):
    drawn = cls(canvas=16, foreground=10, test=20).draw(30, 1, {})
    data = drawn.held_back(0.25)
    assert len(data.train.labels) == 22 and data.validation is not None
    for name in ("inputs", "labels", "groups", "boxes"):
        whole = np.concatenate([getattr(data.train, name), getattr(data.validation, name)])
        np.testing.assert_array_equal(whole, getattr(drawn.train, name))
    assert data.test is drawn.test


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_samples_must_be_left_on_both_sides(share):
    with pytest.raises(UserError, match=r"validation must leave samples on both sides; got (0|8) of 8"):
        Composite(canvas=16, foreground=10, test=20).draw(8, 0, {}).held_back(share)


def test_patience_needs_something_to_validate_on():
    with pytest.raises(UserError, match=r"patience needs a validation split.*validation=0\.1"):
        Composite(patience=3).check()
    Composite(patience=3, validation=0.1).check()
    Composite(validation=0.1).check()
