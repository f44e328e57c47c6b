"""Random parts of the data of the theories, drawn for all samples at once.

Functions draw row by row from their generator, so that the first n samples do not depend on the number of samples.
"""

from __future__ import annotations

import numpy as np


def spread(tokens: int, patterns: int) -> list[int]:
    """Return the number of tokens of each pattern if the tokens are distributed evenly."""
    share, more = divmod(tokens, patterns)
    return [share + (k < more) for k in range(patterns)]


def orthonormal(rng: np.random.Generator, d: int, number: int) -> np.ndarray:
    """Return (d, number) random orthonormal columns."""
    return np.linalg.qr(rng.standard_normal((d, d)))[0][:, :number]


def around(rng: np.random.Generator, mu: np.ndarray, size: int, diameter: float) -> np.ndarray:
    """Return (M, size, d) float32, the set of each of the (d, M) patterns: mu_j + (diameter / 2) u_jk, |u_jk| = 1."""
    u = rng.standard_normal((mu.shape[1], size, mu.shape[0]))
    u /= np.linalg.norm(u, axis=2, keepdims=True)
    return (mu.T[:, None] + diameter / 2 * u).astype(np.float32)


def balanced_classes(rng: np.random.Generator, n: int, classes: int) -> np.ndarray:
    """Return (n,) class numbers in blocks with one sample of each class, in random order.

    Classes are equally frequent, and the position of a sample does not determine its class.
    """
    blocks = np.arange(n + -n % classes).reshape(-1, classes) % classes
    return rng.permuted(blocks, axis=1).ravel()[:n]


def scales(
    rng: np.random.Generator, n: int, tokens: int, stds: tuple[float, float], noisy: int
) -> np.ndarray | np.float32:
    """Return (n, tokens, 1) float32: the second standard deviation for `noisy` tokens of each sample, else the first.

    Without noisy tokens return the first standard deviation as a number.
    """
    if noisy == 0:
        return np.float32(stds[0])
    chosen = rng.permuted(np.tile(np.arange(tokens) < noisy, (n, 1)), axis=1)
    return np.where(chosen, np.float32(stds[1]), np.float32(stds[0]))[:, :, None]
