"""What becomes of the tokens that a score does not keep. Imports no torch until it is asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from sparsebench.errors import StrategyError
from sparsebench.strategy.plans import Keep, Merge, Mix, Place, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebench.strategy.view import TokenView

Disposal = Literal["drop", "fuse", "merge", "squeeze"]
DISPOSALS: tuple[Disposal, ...] = ("drop", "fuse", "merge", "squeeze")
_TOKENS = frozenset({"tokens"})
NEEDS: dict[Disposal, frozenset[str]] = {"drop": frozenset(), "fuse": _TOKENS, "merge": _TOKENS, "squeeze": _TOKENS}
"""What each reads besides the scores: the tokens, wherever more is done than to remove some."""


DOES: dict[Disposal, str] = {
    "drop": "the others are gone",
    "fuse": "the size-weighted mean of the others goes on as one token; EViT fuses by attention, see evit",
    "merge": "each other token joins the kept one that it is most similar to, by size-weighted means",
    "squeeze": "each other token is added to the kept one that it is most similar to, with weight e^cosine (TPS)",
}
"""What becomes of the tokens that a score does not keep, for users."""


def check_scores(scores: object, shape: tuple[int, ...], whose: str) -> Tensor:
    """Return what `scores` returned; StrategyError unless it is a tensor of that (B, N) shape, of real numbers."""
    from torch import Tensor as Scores

    if not isinstance(scores, Scores) or tuple(scores.shape) != shape:
        got = tuple(scores.shape) if isinstance(scores, Scores) else type(scores).__name__
        raise StrategyError(f"{whose}: scores must have shape {shape}, got {got}; wanted is a tensor, (B, N)")
    if scores.is_complex():
        raise StrategyError(f"{whose}: scores must be real numbers, got {scores.dtype}")
    return scores


def dispose(kind: Disposal, scores: Tensor, keep: int, view: TokenView) -> Plan:
    """Return the plan after which `keep` tokens go on, the best of the (B, N) scores among them.

    "drop": the others are gone. "fuse": their size-weighted mean goes on as the last of the `keep` tokens. "merge":
    each joins the kept token that it is most similar to (cosine), size-weighted. "squeeze": each is added to that token
    with weight e^cos, beside e for the kept one, over the sum of the weights (TPS, Wei et al. 2023).
    """
    top = Keep.top(scores, keep - (kind == "fuse"))
    if kind == "drop":
        return top
    if kind == "fuse":
        left = view.sizes.scatter(1, top.index, 0.0)
        return Keep(top.index, left / left.sum(dim=1, keepdim=True), scores)
    host, similarity = _hosts(top.index, view.tokens)
    if kind == "merge":
        return Merge(host, scores)
    weight = similarity.exp().scatter(1, top.index, math.e)
    mixed = weight.new_zeros(len(host), keep, host.shape[1]).scatter(1, host[:, None], weight[:, None])
    return Mix(mixed / mixed.sum(dim=2, keepdim=True), scores)


def squeeze(tokens: Tensor, hosts: Tensor, gone: Tensor) -> Tensor:
    """Return (B, N, C) tokens after "squeeze" where all stay, as in training: those that are gone are added to hosts.

    Of an image without hosts all are as they were.

    Args:
        tokens: (B, N, C).
        hosts: (B, N) booleans, the tokens that are kept.
        gone: (B, N) booleans, those that each go to the host they are most similar to; the others go nowhere.
    """
    import torch
    import torch.nn.functional as F

    unit = F.normalize(tokens, dim=2)
    similarity, host = (unit @ unit.transpose(1, 2)).masked_fill(~hosts[:, None], -torch.inf).max(dim=2)
    weight = similarity.exp() * gone
    added = weight.new_zeros(*host.shape, host.shape[1]).scatter(1, host[:, None], weight[:, None])
    mixed = (math.e * tokens + added @ tokens) / (math.e + added.sum(dim=2, keepdim=True))
    return mixed.where(hosts[:, :, None], tokens)


def own_macs(kind: Disposal, place: Place) -> float:
    """Return the MACs an image of what it multiplies: each token's similarity to each kept one, and a squeeze's Mix."""
    return {"merge": 1, "squeeze": 2}.get(kind, 0) * place.tokens * place.keep * place.width


def _hosts(index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, N), which of the M kept tokens, in the order of their positions, is each token's host, and its cosine.

    A kept token is its own host.
    """
    import torch
    import torch.nn.functional as F

    kept = index.sort(dim=1).values
    unit = F.normalize(tokens, dim=2)
    cosine = unit @ unit.gather(1, kept[:, :, None].expand(-1, -1, unit.shape[2])).transpose(1, 2)
    similarity, host = cosine.max(dim=2)
    place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    return host.scatter(1, kept, place), similarity
