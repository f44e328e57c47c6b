"""Plans: what can happen to the tokens, a closed union. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Keep:
    """Keep some tokens and drop the others, or fuse the others into one more token.

    Attributes:
        index: (B, M) integer positions of the kept tokens, each at most once, in any order.
        fuse: (B, N) weights, or None. With weights w the tokens not kept become one last token sum_i w_i x_i
            (EViT, Liang et al. 2022), so that M + 1 tokens go on.
        scores: (B, N) what the choice was made by, larger is kept; only used to measure the selection.
        ordered: whether the kept tokens go on in the order of `index`; else in the order in which they came.
    """

    index: Tensor
    fuse: Tensor | None = None
    scores: Tensor | None = None
    ordered: bool = False

    @classmethod
    def top(cls, scores: Tensor, keep: int) -> Keep:
        """Keep the `keep` best of the (B, N) scores. Equal scores are decided by position: lower goes first.

        >>> import torch
        >>> Keep.top(torch.tensor([[0.1, 0.9, 0.5, 0.5]]), 2).index
        tensor([[1, 2]])
        """
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return cls(index=order[:, :keep], scores=scores)


@dataclass(frozen=True, eq=False)
class Merge:
    """Send each token to a group; a group's token is the size-weighted mean of its members.

    Attributes:
        target: (B, N) integer group of each token, in 0..M-1, or -1 to drop it; every group has a member.
        scores: as in `Keep`.
        weight: (B, N), or None. With weights w a group's token is sum_i w_i x_i over its members instead of their mean.
        sizes: (B, N) what each token adds to the size of its group, or None for its own size.
    """

    target: Tensor
    scores: Tensor | None = None
    weight: Tensor | None = None
    sizes: Tensor | None = None

    @classmethod
    def into(cls, host: Tensor, scores: Tensor | None = None) -> Merge:
        """Merge each token into the one at position host (B, N). A token that is its own host goes on; order stays.

        Here token 1 goes into token 0, and token 3 into token 2.

        >>> import torch
        >>> Merge.into(torch.tensor([[0, 0, 2, 2]])).target
        tensor([[0, 0, 1, 1]])
        """
        import torch

        stays = host == torch.arange(host.shape[1], device=host.device)
        return cls((stays.cumsum(dim=1) - 1).gather(1, host), scores)


@dataclass(frozen=True, eq=False)
class Mix:
    """Make each new token a weighted sum of the old ones.

    Attributes:
        weight: (B, M, N) real weights.
        scores: as in `Keep`.
        values: (B, N, C) what is summed in place of the tokens, such as their norms; None for the tokens.
    """

    weight: Tensor
    scores: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Mask:
    """Keep as many tokens of each image as it needs, or, in training, weigh tokens and let gradients through.

    Booleans remove tokens, of each image a number of its own; only a strategy that is `adaptive` may. Real numbers are
    for training: all tokens stay, and in attention after it a token counts as a key as much as it is kept, but for
    itself as much as ever (DynamicViT, Rao et al. 2021, eq. 11). Masks of later blocks multiply: what is gone stays so.

    Attributes:
        keep: (B, N) booleans, True for at least one token of each image, or real numbers in [0, 1].
        scores: as in `Keep`.
        values: (B, N, C) what the tokens become, such as groups' means, or None for as they are; with real numbers.
        sizes: (B, N) positive, what becomes of their sizes, or None for as they are; with real numbers.
    """

    keep: Tensor
    scores: Tensor | None = None
    values: Tensor | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Shift:
    """In training, add something to the tokens, such as noise; all of them stay.

    Attributes:
        by: (B, N, C) what is added.
        scores: as in `Keep`.
        prefix: (B, P, C) what is added to the class and register tokens, or None for nothing.
    """

    by: Tensor
    scores: Tensor | None = None
    prefix: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rest:
    """Let some tokens rest for one block: they pass it by as they are, and after it all tokens are there again.

    In the block the others alone are queries, keys and values. Only a strategy with `how = "rest"` may; it acts before
    each block from the first that the budget names, and is asked about all tokens each time.

    Attributes:
        index: (B, N - M) integer positions of the tokens that rest, each at most once, in any order; M take part.
        scores: as in `Keep`, larger takes part.
    """

    index: Tensor
    scores: Tensor | None = None

    @classmethod
    def all_but_top(cls, scores: Tensor, keep: int) -> Rest:
        """Let all rest but the `keep` best of the (B, N) scores, which are decided as in `Keep.top`.

        >>> import torch
        >>> Rest.all_but_top(torch.tensor([[0.1, 0.9, 0.5, 0.5]]), 2).index
        tensor([[3, 0]])
        """
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return cls(index=order[:, keep:], scores=scores)


Plan: TypeAlias = Keep | Merge | Mix | Mask | Shift | Rest
"""What happens to the tokens. None in its place means that nothing happens."""


class Place(NamedTuple):
    """Where a strategy acts, in numbers.

    Attributes:
        block: before or in which block, from 0, of `depth`.
        tokens: N, the patch tokens that come.
        keep: M, how many are to go on.
        width: C, of a token.
        heads: H, of the attention.
        head_width: of the queries and keys of one head; C / H in most networks.
        prefix: P, the class and register tokens, which `tokens` does not count.
        patches: the patch tokens at the input.
        outputs: MACs of one answer of `TokenView.outputs`.
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
