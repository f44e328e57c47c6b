"""Scores made of the pixels of a patch, against plain loops in float64."""

import math

import numpy as np
import pytest
import torch
from sparsebench_plugins.gradient_energy import GradientEnergy
from sparsebench_plugins.noise import ROUNDING, Noise
from sparsebench_plugins.patch_variance import PatchVariance
from tiny import B, N, act, chosen, images, vit

from sparsebench.errors import UnsupportedError

L = ((1, -2, 1), (-2, 4, -2), (1, -2, 1))


def patch(pixels, b, j):
    """Return the (3, 8, 8) pixels of a patch."""
    r, c = divmod(j, 4)
    return pixels[b, :, 8 * r : 8 * r + 8, 8 * c : 8 * c + 8].double().numpy()


def variance(P):
    return sum(sum((x - channel.mean()) ** 2 for x in channel.flatten()) / channel.size for channel in P) / len(P)


def energy(P):
    across = [(P[c, y, x + 1] - P[c, y, x]) ** 2 for c in range(3) for y in range(8) for x in range(7)]
    down = [(P[c, y + 1, x] - P[c, y, x]) ** 2 for c in range(3) for y in range(7) for x in range(8)]
    return sum(across) / len(across) + sum(down) / len(down)


def sigma(P):
    answers = [
        abs(sum(L[i][k] * P[c, y + i, x + k] for i in range(3) for k in range(3)))
        for c in range(3) for y in range(6) for x in range(6)
    ]  # fmt: skip
    return math.sqrt(math.pi / 2) * sum(answers) / len(answers) / 6


CASES = {
    "patch_variance": (PatchVariance(), variance),
    "gradient_energy": (GradientEnergy(), energy),
    "noise": (Noise(), lambda P: -sigma(P)),
    "noise by ratio": (Noise(by="ratio"), lambda P: -(sigma(P) ** 2) / max(variance(P), ROUNDING)),
}


@pytest.mark.parametrize(("strategy", "score"), CASES.values(), ids=CASES)
def test_scores_are_the_equations_and_the_largest_stay(strategy, score):
    pixels = images()
    pixels[0, :, :16] = pixels[0, :, :16] * 0.1 + torch.linspace(0, 0.8, 32)
    expected = np.array([[score(patch(pixels, b, j)) for j in range(N)] for b in range(B)])
    acting, _ = act(strategy, vit(), pixels)
    np.testing.assert_allclose(acting.scores, expected, rtol=1e-5, atol=1e-7)
    assert acting.index.tolist() == [chosen(row, 8) for row in expected]


@pytest.mark.parametrize(("strategy", "side"), [(Noise(), 2), (GradientEnergy(), 1)], ids=str)
def test_patches_too_small_to_tell_are_unsupported(strategy, side):
    network = vit(img_size=4 * side, patch_size=side)
    with pytest.raises(UnsupportedError, match="pixels a side"):
        act(strategy, network, torch.rand(1, 3, 4 * side, 4 * side))
