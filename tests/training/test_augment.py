import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.tasks.base import Split
from sparsebench.training.augment import Augmentation, Moves, draw, move_boxes, move_images, relevance

SIDE, GRID = 12, (3, 3)


def pictures(n, side=SIDE):
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, (n, 3, side, side), dtype=np.uint8))


def moved_by_hand(image, down, right, mirrored):
    """Return the (channels, height, width) picture moved pixel by pixel, zeros coming in, then mirrored."""
    channels, height, width = image.shape
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                if 0 <= y - down < height and 0 <= x - right < width:
                    out[c, y, x] = image[c, y - down, x - right]
    return out[:, :, ::-1] if mirrored else out


def one(down, right, mirrored):
    return Moves(torch.tensor([down]), torch.tensor([right]), torch.tensor([mirrored]))


moved = st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.booleans())
box = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4), st.integers(1, 4))


@given(moved)
def test_an_image_is_shifted_and_then_mirrored(how):
    image = pictures(1)
    expected = moved_by_hand(image[0].numpy(), *how)
    np.testing.assert_array_equal(move_images(image, one(*how), 5)[0].numpy(), expected)


@given(box, moved)
def test_relevance_moves_with_the_pixels(box, how):
    top, left, height, width = box
    mask = np.zeros((1, SIDE, SIDE))
    mask[0, top : top + height, left : left + width] = 1
    patches = moved_by_hand(mask, *how)[0].reshape(3, 4, 3, 4).mean(axis=(1, 3)).ravel()
    boxes = move_boxes(torch.tensor([box]), one(*how), SIDE)
    np.testing.assert_allclose(relevance(boxes, SIDE, SIDE, GRID)[0].numpy(), patches, atol=1e-7)


@given(st.lists(box, min_size=1, max_size=5), st.sampled_from([(3, 3), (4, 6), (5, 7)]))
def test_boxes_that_are_not_moved_have_the_relevance_of_their_split(boxes, grid):
    zeros = np.zeros(len(boxes), dtype=int)
    split = Split(np.zeros((len(boxes), 3, SIDE, SIDE), np.uint8), zeros, zeros, boxes=np.array(boxes))
    here = relevance(torch.tensor(boxes), SIDE, SIDE, grid)
    np.testing.assert_array_equal(here.numpy(), split.relevance_on(grid))


def test_moves_are_uniform():
    moves = draw(torch.arange(20000), 0, 3, flip=True, shift=2)
    for pixels in (moves.down, moves.right):
        counts = np.unique(pixels.numpy(), return_counts=True)
        assert counts[0].tolist() == [-2, -1, 0, 1, 2]
        np.testing.assert_allclose(counts[1] / 20000, 0.2, atol=0.015)
    assert float(moves.mirrored.float().mean()) == pytest.approx(0.5, abs=0.015)
    table = np.histogram2d(moves.down.numpy(), moves.right.numpy(), bins=5)[0]
    np.testing.assert_allclose(table / 20000, 0.04, atol=0.008)


def test_what_is_not_asked_for_is_not_done():
    items = torch.arange(500)
    still = draw(items, 1, 3, flip=True, shift=0)
    assert not still.down.any() and not still.right.any() and still.mirrored.any()
    assert not draw(items, 1, 3, flip=False, shift=4).mirrored.any()


def test_a_sample_looks_the_same_whatever_its_batch_and_new_in_every_pass():
    images, n = pictures(40), 40
    boxes = torch.tensor([[2, 3, 5, 4]]).repeat(n, 1)
    augmentation = Augmentation(torch.arange(n), 7, True, 3, boxes, GRID)
    whole = augmentation(images, torch.arange(n), 2)
    rows = torch.tensor([31, 4, 17])
    for all_, some in zip(whole, augmentation(images[rows], rows, 2), strict=True):
        assert torch.equal(all_[rows], some)
    assert not torch.equal(augmentation(images, torch.arange(n), 3)[0], whole[0])
    other = Augmentation(torch.arange(n), 8, True, 3, boxes, GRID)
    assert not torch.equal(other(images, torch.arange(n), 2)[0], whole[0])
