"""Choices of tokens that differ, and pairs of tokens that are alike, which several strategies build on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.strategy.sorting import ranks, sort


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
    choices, nearest = [first], distances[rows, first]
    for _ in range(keep - 1):
        nearest = nearest.scatter(1, choices[-1][:, None], -torch.inf)
        choices.append(nearest.argmax(dim=1))
        nearest = torch.minimum(nearest, distances[rows, choices[-1]])
    return torch.stack(choices, dim=1)


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
    choices = [gain.argmax(dim=1)]
    for step in range(keep - 1):
        last = choices[-1]
        scale = gain[rows, last].clamp(min=torch.finfo(kernel.dtype).tiny).sqrt()
        inner = (factor @ factor[rows, last][:, :, None])[..., 0]
        column = (kernel[rows, last] - inner) / scale[:, None]
        factor[:, :, step] = column
        gain = (gain - column.square()).scatter(1, last[:, None], -torch.inf)
        choices.append(gain.argmax(dim=1))
    return torch.stack(choices, dim=1)


def bipartite(keys: Tensor, keep: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Match tokens as in bipartite soft matching (Bolya et al. 2023, Section 3).

    Those at even places of the whole sequence, A, are matched with those at odd places, B, by their keys.

    Each of A finds the token of B with the most similar key (cosine, mean over heads); the N - M closest pairs leave.
    The others of A come first, in their order, or, where there is no prefix token, most similar first; then B.

    Args:
        keys: (B, H, N, d) of the patch tokens.
        keep: M, how many groups there are to be.
        prefix: P, the class and register tokens, which stand before the patches and are never matched.

    Returns:
        (B, N) the group of each token, as in `Merge`; and (B, N) booleans, the tokens of A that leave.
    """
    metric = F.normalize(keys.mean(dim=1), dim=2)
    A, B = slice(prefix % 2, None, 2), slice(1 - prefix % 2, None, 2)
    similarity, match = (metric[:, A] @ metric[:, B].mT).max(dim=2)
    rank = ranks(sort(similarity, descending=True).indices)
    n, N = metric.shape[:2]
    r, stay = N - keep, rank.shape[1] - (N - keep)
    leaving = rank < r
    place = (~leaving).cumsum(dim=1) - 1 if prefix else rank - r  # of those of A that go on
    target = rank.new_empty(n, N)
    target[:, A] = torch.where(leaving, stay + match, place)
    target[:, B] = torch.arange(stay, keep, device=rank.device)
    leaves = torch.zeros(n, N, dtype=torch.bool, device=rank.device)
    leaves[:, A] = leaving
    return target, leaves
