"""Greedy choices of tokens that differ from each other, which several strategies build on."""

from __future__ import annotations

import torch
from torch import Tensor


def farthest(distances: Tensor, first: Tensor, keep: int) -> Tensor:
    """Return tokens each of which is as far as can be from those before it (Gonzalez 1985).

    Of equally far tokens the lower position goes first.

    Args:
        distances: (B, N, N) of each pair.
        first: (B,) the token to begin with.
        keep: M, how many to choose.

    Returns:
        (B, M) positions in the order of the choice, each once.
    """
    rows = torch.arange(len(distances), device=distances.device)
    chosen, nearest = [first], distances[rows, first]
    for _ in range(keep - 1):
        nearest = nearest.scatter(1, chosen[-1][:, None], -torch.inf)
        chosen.append(nearest.argmax(dim=1))
        nearest = torch.minimum(nearest, distances[rows, chosen[-1]])
    return torch.stack(chosen, dim=1)


def largest_volume(kernel: Tensor, keep: int) -> Tensor:
    """Return tokens whose part of the kernel has a large determinant, chosen greedily (Chen et al. 2018, Algorithm 1).

    Each step takes the token that multiplies the determinant by most. A Cholesky factor is kept up to date, so that a
    step costs M products a token. Of equal tokens the lower position goes first.

    Args:
        kernel: (B, N, N), symmetric and positive definite.
        keep: M, how many to choose.

    Returns:
        (B, M) positions in the order of the choice, each once.
    """
    B, N, _ = kernel.shape
    rows = torch.arange(B, device=kernel.device)
    gain, factor = kernel.diagonal(dim1=1, dim2=2), kernel.new_zeros(B, N, keep)
    chosen = [gain.argmax(dim=1)]
    for step in range(keep - 1):
        last = chosen[-1]
        scale = gain[rows, last].clamp(min=torch.finfo(kernel.dtype).tiny).sqrt()
        inner = (factor @ factor[rows, last][:, :, None])[..., 0]
        column = (kernel[rows, last] - inner) / scale[:, None]
        factor[:, :, step] = column
        gain = (gain - column.square()).scatter(1, last[:, None], -torch.inf)
        chosen.append(gain.argmax(dim=1))
    return torch.stack(chosen, dim=1)
