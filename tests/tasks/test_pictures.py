import numpy as np
import pytest
from pydantic import ValidationError

from sparsebench.errors import UserError
from sparsebench.tasks.images import Composite, Plain, Spurious
from sparsebench.tasks.pictures import PictureTask

TRAINING = {"warmup": 0.2, "smoothing": 0.1, "flip": True, "shift": 3, "accumulate": 2}


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


def test_a_training_parameter_is_named_as_one():
    assert set(PictureTask.model_fields) - {"test"} == PictureTask.training


@pytest.mark.parametrize("more", [{"flip": True}, {"shift": 2}])
def test_images_of_permuted_patches_are_not_moved(more):
    with pytest.raises(UserError, match=r"permuted patches cannot be flipped or shifted.*flip=False, shift=0"):
        Composite(permuted=True, **more).check()
    Composite(**more).check()
    Composite(permuted=True).check()


@pytest.mark.parametrize("wrong", [{"warmup": 1.0}, {"smoothing": -0.1}, {"shift": -1}, {"accumulate": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        Composite(**wrong)
