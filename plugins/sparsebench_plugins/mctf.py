"""Tokens are merged by several criteria: similarity, little attention, small size."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class MCTF(Strategy):
    """Merges tokens that are similar, receive little attention and represent few patches (Lee et al., Section 3).

    The weight of a pair is ((cos(x_a, x_b) + 1) / 2)^(1 / tau_similarity) times (i_a i_b)^(1 / tau_information) times
    (s_a s_b)^(1 / tau_size). i is the inverse of the received attention (mean over heads and queries), and s the
    inverse of the size, each divided by its largest value; a tau of 0 leaves its factor out. In the whole sequence,
    with class and register tokens first, A is the set of tokens at even positions and B the set of tokens at odd
    positions. Of the r patches to be removed, r // 2 are merged from A into the token of B with the largest weight.
    Then the others are merged from B, with the tokens already merged into them, into the remaining tokens of A, by the
    same weights; if r = 1, the one is from B. The new token of a group is the mean weighted by received attention times
    size (`pooling=size`: by size). The rest of A comes first, in its order, then the rest of B, by falling weight of
    its best pair. Class and register tokens are never merged. Later attention weights tokens by their sizes, unless
    `proportional` is off.

    The tokens of the block's input are merged, and with them the attention matrices of the block: columns of a group
    are added up, rows are averaged with the weights of its tokens. These matrices then multiply the values of the
    merged tokens. With ahead=false tokens are merged at the end of the block instead, by the attention of this block.

    The strategy removes at most half of the tokens. It acts in every block; as released in all but the first, and never
    below ten tokens, which `blocks` and `counts` can say.
    """

    name: ClassVar[str] = "mctf"
    revision: ClassVar[int] = 2
    site: ClassVar[Site] = "maps"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "received_attention"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Lee et al., Multi-criteria token fusion with one-step-ahead attention, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{lee2024mctf,
  title = {Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers},
  author = {Lee, Sanghyeok and Choi, Joonmyung and Kim, Hyunwoo J.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("mctf:per_block=16,blocks=1+2+3+4+5+6+7+8+9+10+11", "DeiT-S", 2.6),
    )
    differs: ClassVar[str] = "without the training for consistency between token counts"
    added: ClassVar[frozenset[str]] = frozenset({"ways", "pooling", "ahead"})
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    tau_similarity: float = Field(1.0, ge=0, description="temperature of the similarity")
    tau_information: float = Field(20.0, ge=0, description="temperature of the received attention")
    tau_size: float = Field(40.0, ge=0, description="temperature of the size")
    ways: Literal["both", "one"] = Field("both", description="merge from A into B and back, or from A into B only")
    pooling: Literal["attention", "size"] = Field("attention", description="weights of the means")
    ahead: bool = Field(True, description="merge before the product with the values; else at the end of the block")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def at_site(self) -> Site:
        """Return the site "maps", or with ahead=false "mlp"."""
        return "maps" if self.ahead else "mlp"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge from A into B, then from B into A."""
        from sparsebench.strategy.tokens import Grouped, sizes_after

        P = view.prefix_count
        A, B = slice(P % 2, None, 2), slice(1 - P % 2, None, 2)
        received = view.received_attention.clamp(min=1e-12)
        target = self._groups(self._weights(view, received, A, B), A, B, keep)

        share = view.sizes if self.pooling == "size" else received * view.sizes
        total = sizes_after(Grouped.of(Merge(target, sizes=share), keep), view.sizes)
        return Merge(target, weight=share / total.gather(1, target))

    def _groups(self, weight: "Tensor", A: slice, B: slice, keep: int) -> "Tensor":
        """Return the (B, N) group of each token, from the weights of the pairs of A and B."""
        import torch

        n_A, n_B = weight.shape[1:]
        r = n_A + n_B - keep
        from_A = r // 2 if self.ways == "both" else r
        place = torch.arange(n_A + n_B, device=weight.device).repeat(len(weight), 1)

        # The token that each token joins, itself if it stays: after the merge into B, and after that back into A.
        source, match, _ = _pairs(weight, from_A)
        host = place.scatter(1, place[:, A].gather(1, source), place[:, B].gather(1, match))
        gone = torch.zeros_like(place[:, A]).scatter(1, source, 1).bool()
        source, match, order = _pairs(weight.masked_fill(gone[:, :, None], float("-inf")).mT, r - from_A)
        next_host = place.scatter(1, place[:, B].gather(1, source), place[:, A].gather(1, match))
        host = next_host.gather(1, host)
        return self._ranks_of_hosts(host == place, order, A, B).gather(1, host)

    def _ranks_of_hosts(self, stays: "Tensor", order: "Tensor", A: slice, B: slice) -> "Tensor":
        """Return the (B, N) ranks of the tokens that stay: the rest of A in order, then the rest of B.

        B is ordered by falling weight; with one way it keeps its order.

        Args:
            stays: (B, N) booleans.
            order: the tokens of B by falling weight.
            A, B: the places of both.
        """
        import torch

        from sparsebench.strategy.sorting import ranks, sort

        N = stays.shape[1]
        falling = torch.arange(N, device=stays.device).repeat(len(stays), 1)
        n_A, n_B = falling[:, A].shape[1], order.shape[1]
        falling[:, A] = torch.arange(n_A, device=stays.device) - N
        falling[:, B] = ranks(order) if self.ways == "both" else torch.arange(n_B, device=stays.device)
        return ranks(sort(falling.masked_fill(~stays, N)).indices)

    def _weights(self, view: TokenView, received: "Tensor", A: slice, B: slice) -> "Tensor":
        """Return the logarithms of the weights of the pairs of A and B."""
        import torch.nn.functional as F

        unit = F.normalize(view.tokens, dim=2)
        alike = ((unit[:, A] @ unit[:, B].mT + 1) / 2).clamp(min=1e-12).log()
        # The division of i and s by their largest values is left out, because it does not change the order.
        rarity = -(_over(view.sizes.log(), self.tau_size) + _over(received.log(), self.tau_information))
        return _over(alike, self.tau_similarity) + rarity[:, A, None] + rarity[:, None, B]


def _over(logarithm: "Tensor", tau: float) -> "Tensor":
    """Return the logarithm of a factor with a temperature; 0 if the temperature is 0."""
    return logarithm / tau if tau else logarithm * 0


def _pairs(weight: "Tensor", r: int) -> "tuple[Tensor, Tensor, Tensor]":
    """Return the r pairs of (B, n, m) weights with the largest, each of another row: (B, r) rows and their columns.

    The third tensor has all (B, n) rows by falling weight of their best pair.
    """
    from sparsebench.strategy.sorting import sort

    best, match = weight.max(dim=2)
    order = sort(best, descending=True).indices
    return order[:, :r], match.gather(1, order[:, :r]), order


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [MCTF]
