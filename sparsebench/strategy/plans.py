"""Plans, a closed union of what can happen to the tokens; and disposals of the tokens that scores do not keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from sparsebench.errors import StrategyError

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebench.strategy.view import TokenView


@dataclass(frozen=True, eq=False)
class Keep:
    """Keep some tokens and drop the others, or fuse the others into one more token.

    Attributes:
        index: (B, M) integer positions of the kept tokens, each at most once, in any order.
        fuse: (B, N) weights, or None. With weights w the tokens that are not kept become one last token sum_i w_i x_i
            (EViT, Liang et al. 2022), so that M + 1 tokens remain.
        scores: (B, N) the scores of the selection, larger scores are kept; only used to measure the selection.
        ordered: whether the kept tokens have the order of `index`; otherwise they keep their old order.
        add: (B, M, C) added to the kept tokens, in the order of `index`, or None for nothing.
        sizes: (B, M) new sizes of the kept tokens, in the order of `index`, or None for no change.
    """

    index: Tensor
    fuse: Tensor | None = None
    scores: Tensor | None = None
    ordered: bool = False
    add: Tensor | None = None
    sizes: Tensor | None = None

    @classmethod
    def top(cls, scores: Tensor, keep: int) -> Keep:
        """Keep the tokens with the `keep` largest of the (B, N) scores; among equal scores, the first tokens.

        >>> import torch
        >>> Keep.top(torch.tensor([[0.1, 0.9, 0.5, 0.5]]), 2).index
        tensor([[1, 2]])
        """
        from sparsebench.strategy.sorting import sort

        order = sort(scores, descending=True).indices
        return cls(index=order[:, :keep], scores=scores)


@dataclass(frozen=True, eq=False)
class Merge:
    """Merge tokens in groups; the new token of a group is the size-weighted mean of its members.

    Attributes:
        target: (B, N) integer group of each token, in 0..M-1, or -1 to drop the token; every group has a member.
        scores: as in `Keep`.
        weight: (B, N), or None. With weights w the token of a group is sum_i w_i x_i over its members instead of the
            mean.
        sizes: (B, N) the contribution of each token to the size of its group, or None for the token's own size.
    """

    target: Tensor
    scores: Tensor | None = None
    weight: Tensor | None = None
    sizes: Tensor | None = None

    @classmethod
    def into(cls, host: Tensor, scores: Tensor | None = None) -> Merge:
        """Merge each token into the token at position host (B, N). Tokens that are their own host remain, in order.

        Here token 1 is merged into token 0, and token 3 into token 2.

        >>> import torch
        >>> Merge.into(torch.tensor([[0, 0, 2, 2]])).target
        tensor([[0, 0, 1, 1]])
        """
        import torch

        stays = host == torch.arange(host.shape[1], device=host.device)
        return cls((stays.cumsum(dim=1) - 1).gather(1, host), scores)


@dataclass(frozen=True, eq=False)
class Mix:
    """Make each new token a weighted sum of the old tokens.

    Attributes:
        weight: (B, M, N) real weights.
        scores: as in `Keep`.
        values: (B, N, C) values that are summed instead of the tokens, such as their norms; None for the tokens.
    """

    weight: Tensor
    scores: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Mask:
    """Keep a different number of tokens in each image; or, in training, weight the tokens, with gradients.

    Boolean masks remove tokens, and only an `adaptive` strategy may use them. Real-valued masks are for training: all
    tokens stay. In later attention each key is weighted by its mask value, except for the token's own query
    (DynamicViT, Rao et al. 2021, eq. 11). Masks of several blocks are multiplied, so a removed token stays removed.

    Attributes:
        keep: (B, N) booleans, True for at least one token of each image, or real numbers in [0, 1].
        scores: as in `Keep`.
        values: (B, N, C) new values of the tokens, such as means of groups, or None for no change; with real-valued
            masks.
        sizes: (B, N) positive new sizes of the tokens, or None for no change; with real-valued masks.
    """

    keep: Tensor
    scores: Tensor | None = None
    values: Tensor | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Shift:
    """In training, add something to the tokens, such as noise; all tokens stay.

    Attributes:
        by: (B, N, C) added to the patch tokens.
        scores: as in `Keep`.
        prefix: (B, P, C) added to the class and register tokens, or None for nothing.
        sizes: (B, N) new sizes of the tokens, 0 or more, or None for no change. Later attention multiplies
            e^(query . key) by them, with gradients, see `Strategy.proportional`.
    """

    by: Tensor
    scores: Tensor | None = None
    prefix: Tensor | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rest:
    """Let some tokens skip one block unchanged; after the block all tokens are present again.

    In the block only the other tokens are queries, keys and values. Only a strategy with `how = "rest"` may use this
    plan. It acts before each block from the first block of the budget, each time with all tokens.

    Attributes:
        index: (B, N - M) integer positions of the resting tokens, each at most once, in any order; M tokens take part.
        scores: as in `Keep`; tokens with larger scores take part.
    """

    index: Tensor
    scores: Tensor | None = None

    @classmethod
    def all_but_top(cls, scores: Tensor, keep: int) -> Rest:
        """Let all tokens rest except those with the `keep` largest of the (B, N) scores, as in `Keep.top`.

        >>> import torch
        >>> Rest.all_but_top(torch.tensor([[0.1, 0.9, 0.5, 0.5]]), 2).index
        tensor([[3, 0]])
        """
        from sparsebench.strategy.sorting import sort

        order = sort(scores, descending=True).indices
        return cls(index=order[:, keep:], scores=scores)


Plan: TypeAlias = Keep | Merge | Mix | Mask | Shift | Rest
"""What happens to the tokens. None in its place means that nothing happens."""


class Place(NamedTuple):
    """The sizes at a block in which a strategy acts.

    Attributes:
        block: number of the block, from 0 to `depth` - 1.
        tokens: N, the number of patch tokens before the strategy acts.
        keep: M, the number of patch tokens after it.
        width: C, the channels of a token.
        heads: H, the heads of the attention.
        head_width: the width of the queries and keys of one head; C / H in most networks.
        prefix: P, the number of class and register tokens, which are not included in `tokens`.
        patches: the number of patch tokens at the input.
        outputs: MACs of one row of `TokenView.outputs`.
        classes: the number of classes of the network's head; 0 if it has none.
    """

    block: int
    depth: int
    tokens: float
    keep: float
    width: int
    heads: int
    head_width: int
    prefix: int
    patches: int
    outputs: float
    classes: int = 0


Disposal = Literal["drop", "fuse", "merge", "squeeze"]
DISPOSALS: tuple[Disposal, ...] = ("drop", "fuse", "merge", "squeeze")
_TOKENS = frozenset({"tokens"})
NEEDS: dict[Disposal, frozenset[str]] = {"drop": frozenset(), "fuse": _TOKENS, "merge": _TOKENS, "squeeze": _TOKENS}
"""The fields that each disposal reads, besides those for the scores."""
DOES: dict[Disposal, str] = {
    "drop": "the other tokens are removed",
    "fuse": "the other tokens become one, their size-weighted mean; EViT weights by attention, see evit",
    "merge": "each other token joins the most similar kept token, by size-weighted means",
    "squeeze": "each other token is added to the most similar kept token, with weight e^cosine (TPS)",
}
"""What happens to the tokens that the scores do not keep, for users."""


def check_scores(scores: object, shape: tuple[int, ...], owner: str) -> Tensor:
    """Return `scores`; raise StrategyError unless they are a tensor of real numbers with this (B, N) shape."""
    from torch import Tensor as Scores

    if not isinstance(scores, Scores) or tuple(scores.shape) != shape:
        got = tuple(scores.shape) if isinstance(scores, Scores) else type(scores).__name__
        raise StrategyError(f"{owner}: scores must have shape {shape}, got {got}; return a (B, N) tensor")
    if scores.is_complex():
        raise StrategyError(f"{owner}: scores must be real numbers, got {scores.dtype}")
    return scores


def dispose(kind: Disposal, scores: Tensor, keep: int, view: TokenView) -> Plan:
    """Return a plan that leaves `keep` tokens, among them those with the largest of the (B, N) scores.

    "drop": the others are removed. "fuse": their size-weighted mean is the last of the `keep` tokens. "merge": each
    joins the most similar kept token (cosine), by size-weighted means. "squeeze": each is added to that token with
    weight e^cos; the kept token has weight e, and the sum is divided by the sum of weights (TPS, Wei et al. 2023).
    """
    top = Keep.top(scores, keep - (kind == "fuse"))
    if kind == "drop":
        return top
    if kind == "fuse":
        others = view.sizes.scatter(1, top.index, 0.0)
        return Keep(top.index, others / others.sum(dim=1, keepdim=True), scores)
    host, similarity = _hosts(top.index, view.tokens)
    if kind == "merge":
        return Merge(host, scores)
    weight = similarity.exp().scatter(1, top.index, math.e)
    mixed = weight.new_zeros(len(host), keep, host.shape[1]).scatter(1, host[:, None], weight[:, None])
    return Mix(mixed / mixed.sum(dim=2, keepdim=True), scores)


def squeeze(tokens: Tensor, hosts: Tensor, gone: Tensor) -> Tensor:
    """Return (B, N, C) tokens after "squeeze" in training, when all tokens stay.

    The tokens of an image without hosts are unchanged.

    Args:
        tokens: (B, N, C).
        hosts: (B, N) booleans, True for kept tokens.
        gone: (B, N) booleans, True for tokens that are added to the most similar host; the others are not added.
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
    """Return the MACs of a disposal per image: similarities of all tokens to the kept ones, and the Mix of squeeze."""
    return {"merge": 1, "squeeze": 2}.get(kind, 0) * place.tokens * place.keep * place.width


def _hosts(index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, N), the number of each token's host among the M kept tokens in order of position; and its cosine.

    A kept token is its own host.
    """
    import torch
    import torch.nn.functional as F

    from sparsebench.strategy.sorting import sort

    kept = sort(index).values
    unit = F.normalize(tokens, dim=2)
    cosine = unit @ unit.gather(1, kept[:, :, None].expand(-1, -1, unit.shape[2])).transpose(1, 2)
    similarity, host = cosine.max(dim=2)
    place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    return host.scatter(1, kept, place), similarity
