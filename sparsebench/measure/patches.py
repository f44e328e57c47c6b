"""Labels of patches, which follow from the class of each pixel, and how well they are predicted.

The class numbers of pixels and patches are 0 for the background, 1 and above for objects, and IGNORE for what is not
judged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsebench.measure.metrics import Items, Metric, share

BACKGROUND, IGNORE = 0, 255


def patch_labels(segments: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the (n, N) class that most pixels of each patch have; of equally frequent ones the smallest number.

    Args:
        segments: (n, height, width) uint8 class numbers of pixels.
        grid: (rows, columns) of the N patches.
    """
    pixels = _cut(segments, grid)
    labels = np.zeros(pixels.shape[:2], dtype=np.int64)
    most = np.zeros(pixels.shape[:2], dtype=np.int64)
    for number in np.unique(segments):
        count = (pixels == number).sum(axis=2)
        labels[count > most] = number
        most = np.maximum(most, count)
    return labels


def on_boundary(segments: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, N) booleans, which patches have pixels of several classes. Ignored pixels do not count."""
    pixels = _cut(segments, grid)
    judged = pixels != IGNORE
    smallest = np.where(judged, pixels, IGNORE).min(axis=2)
    largest = np.where(judged, pixels, BACKGROUND).max(axis=2)
    return smallest < largest


def object_shares(segments: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, N) float32, the share of the pixels of each patch that show an object."""
    pixels = _cut(segments, grid)
    return ((pixels != BACKGROUND) & (pixels != IGNORE)).mean(axis=2, dtype=np.float32)


def _cut(segments: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the (n, N, pixels of a patch) class numbers."""
    n, height, width = segments.shape
    rows, columns = grid
    parts = segments.reshape(n, rows, height // rows, columns, width // columns)
    return parts.swapaxes(2, 3).reshape(n, rows * columns, -1)


class Overlap(NamedTuple):
    """How often predictions and labels agree, by unit and class; units are images, or groups of them.

    Attributes:
        both: (U, classes) numbers of places with the class as prediction and as label.
        either: (U, classes) numbers of places with the class as prediction or as label.
        labels: (U, classes) numbers of places with the class as label.
    """

    both: np.ndarray
    either: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, labels: np.ndarray, units: np.ndarray) -> Overlap:
        """Return the overlap of (n,) predicted classes and labels of places, from their (n,) units 0, 1, ..."""
        classes = 1 + int(max(predicted.max(initial=0), labels.max(initial=0)))
        shape = (1 + int(units.max(initial=-1)), classes)

        def count(numbers: np.ndarray, mask: np.ndarray | slice = slice(None)) -> np.ndarray:
            places = units[mask] * classes + numbers[mask]
            return np.bincount(places, minlength=shape[0] * shape[1]).reshape(shape)

        both, of_labels = count(labels, predicted == labels), count(labels)
        return cls(both, count(predicted) + of_labels - both, of_labels)

    @property
    def _objects(self) -> np.ndarray:
        """The object classes that are labels."""
        classes = np.flatnonzero(self.labels.sum(axis=0))
        return classes[classes != BACKGROUND]

    def mean_iou(self) -> float:
        """Return the intersection over union over all units, mean over object classes; NaN without an object."""
        ious = [self.both[:, k].sum() / self.either[:, k].sum() for k in self._objects]
        return float(np.mean(ious)) if ious else np.nan

    def scores(self) -> np.ndarray:
        """Return the (U,) pseudo-values of `mean_iou`, whose mean it is.

        The value of a unit is the mean IoU plus U times the unit's influence, to first order. The IoU of a class is a
        ratio of sums over units, so this gives the variance of the mean IoU over units as that of a mean (infinitesimal
        jackknife; Efron 1982, "The Jackknife, the Bootstrap and Other Resampling Plans", chapter 6).
        """
        U, objects = len(self.both), self._objects
        influence = np.zeros(U)
        for k in objects:
            total = self.either[:, k].sum()
            iou = self.both[:, k].sum() / total
            influence += (self.both[:, k] - iou * self.either[:, k]) / total / len(objects)
        return self.mean_iou() + U * influence


def by_relevance(items: Items) -> dict[str, Metric]:
    """Return the accuracies on patches of objects and of the background, by name."""
    is_object = items.labels != BACKGROUND
    return {
        "accuracy_relevant": share(items.correct[is_object]),
        "accuracy_irrelevant": share(items.correct[~is_object]),
    }


def scores_of_patches(items: Items, images: np.ndarray, boundary: np.ndarray, pixels: Overlap) -> dict[str, Metric]:
    """Return the metrics of predicted patches, besides those of any test items.

    Args:
        items: the n patches that are judged.
        images: (n,) numbers of their images.
        boundary: (n,) booleans, which are `on_boundary`.
        pixels: the overlap on pixels.
    """
    n = len(items.labels)
    on_patches = Overlap.of(items.predicted, items.labels, images).mean_iou()
    return {
        "iou": Metric.of("iou", on_patches, n),
        "iou_pixels": Metric.of("iou_pixels", pixels.mean_iou(), int(pixels.labels.sum())),
        **by_relevance(items),
        "accuracy_boundary": share(items.correct[boundary]),
    }
