"""Labels of patches and their intersection over union, compared with plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.measure.patches import IGNORE, Overlap, on_boundary, patch_labels
from sparsebench.training.patches import MOST_PATCHES, chosen_patches


@given(st.integers(0, 10**6))
def test_a_patch_has_the_class_of_most_of_its_pixels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments = rng.choice(np.array([0, 1, 2, 7, IGNORE], np.uint8), (2, 6, 12))
    labels, boundary = patch_labels(segments, (2, 3)), on_boundary(segments, (2, 3))
    for image in range(2):
        for place in range(6):
            top, left = 3 * (place // 3), 4 * (place % 3)
            pixels = segments[image, top : top + 3, left : left + 4].ravel().tolist()
            assert labels[image, place] == min(set(pixels), key=lambda number: (-pixels.count(number), number))
            assert boundary[image, place] == (len(set(pixels) - {IGNORE}) > 1)


@given(st.integers(0, 10**6))
def test_iou_is_that_of_sets_and_the_mean_of_its_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predicted, units = rng.integers(0, 4, 60), rng.integers(0, 5, 60), rng.permutation(np.arange(60) % 7)
    overlap, ious = Overlap.of(predicted, labels, units), []
    for k in sorted(set(labels.tolist()) - {0}):
        is_label, is_predicted = {*np.flatnonzero(labels == k)}, {*np.flatnonzero(predicted == k)}
        ious.append(len(is_label & is_predicted) / len(is_label | is_predicted))
    assert overlap.mean_iou() == pytest.approx(np.mean(ious))
    assert overlap.scores().mean() == pytest.approx(np.mean(ious))


def test_the_variance_of_the_scores_is_that_of_the_bootstrap() -> None:
    """300 images of which each has its own share of wrong patches."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (300, 40))
    wrong = rng.random((300, 40)) < rng.beta(1, 2, (300, 1))
    predicted = np.where(wrong, rng.integers(0, 4, (300, 40)), labels)
    units = np.repeat(np.arange(300), 40)
    scores = Overlap.of(predicted.ravel(), labels.ravel(), units).scores()
    drawn = []
    for _ in range(400):
        rows = rng.integers(0, 300, 300)
        drawn.append(Overlap.of(predicted[rows].ravel(), labels[rows].ravel(), units).mean_iou())
    assert scores.std(ddof=1) / np.sqrt(300) == pytest.approx(np.std(drawn), rel=0.15)


def test_without_an_object_there_is_no_iou() -> None:
    zeros = np.zeros(5, dtype=int)
    assert np.isnan(Overlap.of(zeros + 1, zeros, zeros).mean_iou())


def test_a_head_is_learned_on_some_of_many_patches() -> None:
    labels = np.zeros((700, 100), dtype=int)
    labels[:, :10] = IGNORE
    rows = np.arange(0, 700, 1)
    chosen = chosen_patches(labels, rows, "task", 0)
    assert chosen.sum() == MOST_PATCHES and not chosen[:, :10].any()
    assert (chosen != chosen_patches(labels, rows, "task", 1)).any()
    assert chosen_patches(labels, rows[::7], "task", 0).sum() == 100 * 90
