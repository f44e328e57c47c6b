"""Tokens are merged by several criteria: similarity, little attention, small size."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class MCTF(Strategy):
    """Merges tokens that are similar, receive little attention and represent few patches (Lee et al., Section 3).

    The weight of a pair is ((cos(x_a, x_b) + 1) / 2)^(1 / tau_similarity) times (i_a i_b)^(1 / tau_information) times
    (s_a s_b)^(1 / tau_size). i is the inverse of the received attention (mean over heads and queries), and s the
    inverse of the size, each divided by its largest value. In the whole sequence, with class and register tokens first,
    A is the set of tokens at even positions and B the set of tokens at odd positions. Of the r patches to be removed,
    r // 2 are merged from A into the token of B with the largest weight. Then the others are merged from B, with the
    tokens already merged into them, into the remaining tokens of A, by the same weights; if r = 1, the one is from B.
    The new token of a group is the mean weighted by received attention times size; remaining tokens keep their order.
    Class and register tokens are never merged. Later attention weights tokens by their sizes, unless `proportional` is
    off. The strategy acts in every block, and removes at most half of the tokens.

    The published method acts before attention. It reuses the attention by which it selects, in fused form, instead of
    computing that of the merged tokens. Here the strategy acts between attention and MLP, with that block's attention.
    Two more parts are left out: the use of the next block's attention ("one step ahead"), and the training for
    consistency between token counts.
    """

    name: ClassVar[str] = "mctf"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "received_attention"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Lee et al., Multi-criteria token fusion with one-step-ahead attention, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{lee2024mctf,
  title = {Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers},
  author = {Lee, Sanghyeok and Choi, Joonmyung and Kim, Hyunwoo J.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("mctf:macs=0.56", "DeiT-S", 2.6),)
    differs: ClassVar[str] = (
        "acts after attention, while the published method acts before it and reuses the fused attention; without "
        "one-step-ahead attention, and without training for consistency between token counts"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    tau_similarity: float = Field(1.0, gt=0, description="temperature of the similarity")
    tau_information: float = Field(20.0, gt=0, description="temperature of the received attention")
    tau_size: float = Field(40.0, gt=0, description="temperature of the size")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge from A into B, then from B into A."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.tokens import Grouped, sizes_after

        x, sizes, received = view.tokens, view.sizes, view.received_attention.clamp(min=1e-12)
        N, r, P = x.shape[1], x.shape[1] - keep, view.prefix_count
        A, B = slice(P % 2, None, 2), slice(1 - P % 2, None, 2)
        unit = F.normalize(x, dim=2)
        alike = ((unit[:, A] @ unit[:, B].mT + 1) / 2).clamp(min=1e-12)
        # The division of i and s by their largest values is left out, because it does not change the order.
        rarity = -(sizes.log() / self.tau_size + received.log() / self.tau_information)
        weight = alike.log() / self.tau_similarity + rarity[:, A, None] + rarity[:, None, B]
        place = torch.arange(N, device=x.device).repeat(len(x), 1)
        source, match = _pairs(weight, r // 2)
        host = place.scatter(1, place[:, A].gather(1, source), place[:, B].gather(1, match))
        gone = torch.zeros_like(place[:, A]).scatter(1, source, 1).bool()
        source, match = _pairs(weight.masked_fill(gone[:, :, None], float("-inf")).mT, r - r // 2)
        next_host = place.scatter(1, place[:, B].gather(1, source), place[:, A].gather(1, match))
        target, share = Merge.into(next_host.gather(1, host)).target, received * sizes
        total = sizes_after(Grouped.of(Merge(target, sizes=share), keep), sizes)
        return Merge(target, weight=share / total.gather(1, target))


def _pairs(weight: "Tensor", r: int) -> "tuple[Tensor, Tensor]":
    """Return (B, r) rows of the (B, n, m) weights with the largest entries, in descending order, and their columns."""
    from sparsebench.strategy.sorting import sort

    best, match = weight.max(dim=2)
    source = sort(best, descending=True).indices[:, :r]
    return source, match.gather(1, source)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [MCTF]
