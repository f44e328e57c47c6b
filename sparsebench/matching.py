"""Bipartite soft matching (Bolya et al. 2023, Section 3), which several strategies build on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bipartite(keys: Tensor, keep: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Match the tokens at even places of the whole sequence, A, with those at odd places, B, by their keys.

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
    rank = similarity.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    n, N = metric.shape[:2]
    r, stay = N - keep, rank.shape[1] - (N - keep)
    place = (rank >= r).cumsum(dim=1) - 1 if prefix else rank - r  # of those of A that go on
    target = rank.new_empty(n, N)
    target[:, A] = torch.where(rank < r, stay + match, place)
    target[:, B] = torch.arange(stay, keep, device=target.device)
    leaves = torch.zeros(n, N, dtype=torch.bool, device=target.device)
    leaves[:, A] = rank < r
    return target, leaves
