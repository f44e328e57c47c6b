"""Selections of diverse tokens, and pairs of similar tokens, which several strategies use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.strategy.sorting import ranks, sort


def farthest(distances: Tensor, first: Tensor, keep: int) -> Tensor:
    """Return tokens, each of which is as far as possible from those before it (Gonzalez 1985).

    Of equally far tokens the lowest position is chosen.

    Args:
        distances: (B, N, N) distances of all pairs.
        first: (B,) position of the first token.
        keep: M, number of tokens to choose.

    Returns:
        (B, M) positions in the order of choice, each at most once.
    """
    rows = torch.arange(len(distances), device=distances.device)
    choices = [first]
    nearest = distances[rows, first]
    for _ in range(keep - 1):
        nearest = nearest.scatter(1, choices[-1][:, None], -torch.inf)
        choices.append(nearest.argmax(dim=1))
        nearest = torch.minimum(nearest, distances[rows, choices[-1]])
    return torch.stack(choices, dim=1)


def largest_volume(kernel: Tensor, keep: int) -> Tensor:
    """Return tokens whose submatrix of the kernel has a large determinant (Chen et al. 2018, Algorithm 1, greedy).

    Each step chooses the token that multiplies the determinant by the largest factor. A Cholesky factor is updated, so
    that a step costs M products per token. Of equal tokens the lowest position is chosen.

    Args:
        kernel: (B, N, N), symmetric and positive definite.
        keep: M, number of tokens to choose.

    Returns:
        (B, M) positions in the order of choice, each at most once.
    """
    B, N, _ = kernel.shape
    rows = torch.arange(B, device=kernel.device)
    gain = kernel.diagonal(dim1=1, dim2=2)
    factor = kernel.new_zeros(B, N, keep)
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


def bipartite(keys: Tensor, keep: int, prefix: int, *, in_order: bool = False) -> tuple[Tensor, Tensor]:
    """Return the groups of bipartite soft matching (Bolya et al. 2023, Section 3).

    In the whole sequence, with class and register tokens first, A is the set of the patches at even positions, and B
    that of the patches at odd positions. Each token of A is paired with the token of B that has the most similar key
    (cosine, mean over heads). In the N - M most similar pairs, the token of A joins that of B.

    The other tokens of A are the first groups: in their order, or, if P = 0 and not `in_order`, most similar first. B
    follows.

    Args:
        keys: (B, H, N, d) keys of the patch tokens.
        keep: M, number of groups.
        prefix: P, number of class and register tokens; they are never matched.
        in_order: whether the other tokens of A keep their order also if P = 0.

    Returns:
        (B, N) the group of each token, as in `Merge`; and (B, N) booleans, True for the tokens of A that leave.
    """
    metric = F.normalize(keys.mean(dim=1), dim=2)
    A = slice(prefix % 2, None, 2)
    B = slice(1 - prefix % 2, None, 2)
    similarity, match = (metric[:, A] @ metric[:, B].mT).max(dim=2)
    rank = ranks(sort(similarity, descending=True).indices)
    n, N = metric.shape[:2]
    r = N - keep
    stay = rank.shape[1] - (N - keep)
    leaving = rank < r
    place = (~leaving).cumsum(dim=1) - 1 if prefix or in_order else rank - r  # of the tokens of A that stay
    target = rank.new_empty(n, N)
    target[:, A] = torch.where(leaving, stay + match, place)
    target[:, B] = torch.arange(stay, keep, device=rank.device)
    leaves = torch.zeros(n, N, dtype=torch.bool, device=rank.device)
    leaves[:, A] = leaving
    return target, leaves
