"""Probes of patches: a linear head predicts the class of each patch from the token that stands for it at the end.

The head is scikit-learn's logistic regression with C = `STRENGTH` / number of training patches, on features that are
standardised by these patches. A patch that is in no token gets the features of another patch, see `on_grid`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.patches import IGNORE
from sparsebench.models.actor import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.strategy import tokens
from sparsebench.training.evaluation import Outputs, Passes, first_batch, halving, pass_all
from sparsebench.training.steps import Samples, outputs_of

Fill = Literal["membership", "nearest"]
"""Where a patch that was not kept gets its features from, see `on_grid`."""
MOST_PATCHES = 50_000
"""Most patches on which a head is learned."""
STRENGTH = 50
"""C of the logistic regression times the number of patches: the mean loss has the same weight for any number of them.
On a ViT-S/14, 340 images (48,960 patches) and no strategy, 5, 50, 500 and 5,000 gave an intersection over union of
.336, .344, .323 and .298."""
ITERATIONS = 1000
"""Most iterations of its solver."""
LOWEST_LOG = -100.0
"""The lowest logarithm of a probability in the loss."""
UPSAMPLED = 16
"""Number of images whose scores are upsampled together."""


def chosen_patches(labels: np.ndarray, rows: np.ndarray, *dimensions: object) -> np.ndarray:
    """Return (P, N) booleans, the patches on which a head is learned: at most MOST_PATCHES, drawn at random.

    Args:
        labels: (P, N) classes of the patches of training images; those to ignore are not drawn.
        rows: numbers of the training images of the probe.
        dimensions: seed the choice.
    """
    possible = np.zeros(labels.shape, dtype=bool)
    possible[rows] = labels[rows] != IGNORE
    places = np.flatnonzero(possible)
    if len(places) > MOST_PATCHES:
        left_out = seeds.generator("patches", *dimensions).permutation(places)[MOST_PATCHES:]
        possible.flat[left_out] = False
    return possible


def some(samples: Samples, rows: np.ndarray) -> Samples:
    """Return the samples of these rising rows alone, numbered from 0; all of them as they are."""
    if len(rows) == len(samples.labels):
        return samples
    places = torch.from_numpy(rows).to(samples.labels.device)
    relevance = None if samples.relevance is None else samples.relevance[places]
    inputs = samples.inputs.index_select(0, places.to(samples.inputs.device))
    return Samples(inputs, samples.labels[places], relevance)


class Head(NamedTuple):
    """A linear head, with its scaler: both of scikit-learn."""

    scaler: Any
    model: Any

    @property
    def classes(self) -> np.ndarray:
        """The class numbers of the training patches."""
        return np.asarray(self.model.classes_)

    @threadpool_limits.wrap(limits=1, user_api="blas")
    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return (n, classes) logarithms of the probabilities of `classes`, from (n, C) features."""
        return np.asarray(self.model.predict_log_proba(self.scaler.transform(features.astype(np.float64))))


@threadpool_limits.wrap(limits=1, user_api="blas")  # sums depend on how they are split over threads
def learn_head(features: np.ndarray, labels: np.ndarray) -> Head:
    """Learn a linear head from (n, C) features of patches and their (n,) classes.

    Raises:
        UserError: the patches have fewer than two classes.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(labels)) < 2:
        raise UserError(
            "the training patches of a probe have one class",
            got=f"{len(labels)} patches of class {labels[0]}",
            next_step="learn from more images, with --n-train",
        )
    x = features.astype(np.float64)
    scaler = StandardScaler().fit(x)
    model = LogisticRegression(C=STRENGTH / len(labels), max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(scaler.transform(x), labels)
    return Head(scaler, model)


Read = Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]
"""From the (B,) numbers of images and the (B, N, C) features of their patches: arrays with a row for each image, or for
each patch of them."""


@dataclass(frozen=True, kw_only=True)
class PatchPasses(Passes):
    """The passes of n images, and what was read from the features of their patches, by name."""

    values: dict[str, np.ndarray]


def read_patches(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    read: Read,
    batch: int | None = None,
    *,
    fill: Fill = "membership",
    visit: int = 0,
    choices: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> PatchPasses:
    """Pass all images through a network, and read the features of their patches batch by batch.

    Args:
        network, actor, samples, batch, choices, on_done: see `evaluation.evaluate`.
        read: is called with each batch; its results are joined.
        fill: see `on_grid`.
        visit: see `evaluation.features`.

    Raises:
        UnsupportedError: the network gives no patch tokens, or tokens stand for no patches in particular.
    """
    if not hasattr(network, "patches"):
        raise UnsupportedError("this model does not give the tokens of patches that a probe needs: patches is missing")

    def work(size: int) -> PatchPasses:
        outputs = _Patches(network, samples, choices, read, fill)
        seconds = pass_all(network, actor, samples, size, outputs, on_done, visit)
        return outputs.passes(size, seconds)

    return halving(batch or first_batch(network, samples), work)


class _Patches(Outputs):
    """What is read from the patches of batches."""

    def __init__(self, network: Any, samples: Samples, choices: bool, read: Read, fill: Fill):
        super().__init__(network, samples, choices)
        self.read, self.fill = read, fill
        self.values: list[dict[str, np.ndarray]] = []

    def outputs(self, inputs: Tensor, acting: Pass | None) -> Tensor:
        """See `Outputs.outputs`: the (B, M, C) tokens of patches."""
        network: Any = self.network
        return outputs_of(network.patches, inputs, acting)

    def keep(self, rows: Tensor, outputs: Tensor, acting: Pass | None) -> None:
        """See `Outputs.keep`: what is read."""
        if acting is not None:
            outputs = on_grid(outputs, acting, self.fill)
        self.values.append(self.read(rows.cpu().numpy(), outputs.float().cpu().numpy()))

    def passes(self, batch: int, seconds: list[float]) -> PatchPasses:
        """Return what was read from all batches, with the passes."""
        values = {name: np.concatenate([part[name] for part in self.values]) for name in self.values[0]}
        return PatchPasses(**self._passes(batch, seconds), values=values)


def on_grid(features: Tensor, acting: Pass, fill: Fill) -> Tensor:
    """Return the (B, patches, C) features of all patches from the (B, M, C) tokens that remain after a pass.

    A patch that was kept, or that came back, has its own token. With "membership" a patch that was fused or merged has
    the token that contains it, and a dropped patch that of the nearest patch that has one. With "nearest" each patch
    that was not kept has the token of the nearest kept patch. Distances are Euclidean on the grid; of patches that are
    equally near the first is used.

    Raises:
        UnsupportedError: tokens are mixtures of many patches, or an image has no token that stands for a patch.
    """
    token = acting.membership()
    if fill == "nearest":
        token = acting.kept_at()
    if (token >= 0).all():
        return tokens.gather(features, token)
    if not bool((token >= 0).any(dim=1).all()):
        raise UnsupportedError(
            f"'{acting.actor.strategy.name}' leaves an image without a token that stands for a patch"
        )
    assert acting.actor.grid is not None
    return tokens.gather(features, torch.stack([_with_nearest(row, acting.actor.grid) for row in token]))


def _with_nearest(token: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the (N,) tokens of an image's patches, with that of the nearest other patch in place of -1."""
    rows, columns = (torch.arange(side, device=token.device) for side in grid)
    places = torch.cartesian_prod(rows, columns)
    has_token = (token >= 0).nonzero()[:, 0]
    distances = (places[:, None] - places[has_token]).square().sum(dim=2)
    # Distances are whole numbers: the rank of a patch decides between equal ones.
    nearest = (distances * len(has_token) + torch.arange(len(has_token), device=token.device)).argmin(dim=1)
    return token.where(token >= 0, token[has_token[nearest]])


class Predictions(NamedTuple):
    """The predicted classes of the N patches of n images.

    Attributes:
        predicted: (n, N) class numbers.
        ranks: (n, N) numbers of classes with larger scores than the label, of equal ones those with smaller numbers.
        losses: (n, N) cross-entropies.
        both, either, labels: (n, classes) numbers of pixels, see `measure.patches.Overlap`.
    """

    predicted: np.ndarray
    ranks: np.ndarray
    losses: np.ndarray
    both: np.ndarray
    either: np.ndarray
    labels: np.ndarray


def predict(
    head: Head, features: np.ndarray, labels: np.ndarray, segments: np.ndarray, grid: tuple[int, int], classes: int
) -> Predictions:
    """Predict the patches of images.

    Args:
        head: the head.
        features: (B, N, C) of their patches.
        labels: (B, N) classes of patches; results of patches to ignore mean nothing.
        segments: (B, height, width) classes of pixels.
        grid: (rows, columns) of the patches.
        classes: number of classes.
    """
    B, N = labels.shape
    of_head = head.scores(features.reshape(B * N, -1))
    scores = np.full((B * N, classes), -np.inf)
    scores[:, head.classes] = of_head
    judged = np.where(labels == IGNORE, 0, labels).reshape(-1, 1)
    of_label = np.take_along_axis(scores, judged, axis=1)
    before = np.arange(classes) < judged
    ranks = ((scores > of_label) | ((scores == of_label) & before)).sum(axis=1)
    pixels = _upsampled(of_head.reshape(B, *grid, -1), segments.shape[1:])
    overlap = _pixel_overlap(head.classes[pixels], segments, classes)
    return Predictions(
        scores.argmax(axis=1).reshape(B, N),
        ranks.reshape(B, N),
        -np.maximum(of_label, LOWEST_LOG).astype(np.float32).reshape(B, N),
        *overlap,
    )


def _upsampled(scores: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Return (B, height, width) places of the largest score at pixels, from (B, rows, columns, k) scores of patches."""
    parts = []
    for part in torch.from_numpy(scores).permute(0, 3, 1, 2).float().split(UPSAMPLED):
        parts.append(F.interpolate(part, size=size, mode="bilinear").argmax(dim=1))
    return torch.cat(parts).numpy()


def _pixel_overlap(predicted: np.ndarray, segments: np.ndarray, classes: int) -> tuple[np.ndarray, ...]:
    """Return the fields of `measure.patches.Overlap` for (B, height, width) pixels; an image is a unit."""
    B = len(segments)
    judged = segments != IGNORE
    image = np.broadcast_to(np.arange(B)[:, None, None], segments.shape)[judged] * classes
    predicted, labels = predicted[judged], segments[judged].astype(np.int64)

    def count(places: np.ndarray) -> np.ndarray:
        return np.bincount(places, minlength=B * classes).reshape(B, classes)

    both = count((image + labels)[predicted == labels])
    of_labels = count(image + labels)
    return both, count(image + predicted) + of_labels - both, of_labels
