"""Tokens are merged by more than one criterion: alike, little attended, small."""

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
    (s_a s_b)^(1 / tau_size), where i is the inverse of the attention received (mean over heads and queries) and s the
    inverse of the size, each over its largest value. Of the whole sequence, class and register tokens first, A has the
    even places and B the odd. Of the r patches that have to leave, r // 2 go from A to the token of B of most weight;
    then the others from B, with what they stand for, to what is left of A, by the same weights. A single one goes from
    B. Groups are means weighted by attention received times size; what stays keeps its order. Class and register tokens
    are never merged. Attention after it weighs tokens by their sizes, unless `proportional` is off. In every block, at
    most half of the tokens.

    The published method acts before attention, and uses the attention that it chose by once more, fused, in place of
    making that of the merged tokens. Here it acts between attention and MLP, with that block's attention. Not here
    either: the attention of the next block in place of this one's ("one step ahead"), and the training with consistency
    between numbers of tokens.
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
        "acts after attention, where the published method acts before it and uses that attention once more, fused; "
        "without one-step-ahead attention, and without training for consistency between numbers of tokens"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    tau_similarity: float = Field(1.0, gt=0, description="temperature of the similarity")
    tau_information: float = Field(20.0, gt=0, description="temperature of the attention received")
    tau_size: float = Field(40.0, gt=0, description="temperature of the size")
    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B."""
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
        # The largest values that i and s are divided by are left out, as they change no order.
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
    """Return (B, r) rows of the (B, n, m) weights that hold the most, the highest first, and the columns of these."""
    from sparsebench.strategy.sorting import sort

    best, match = weight.max(dim=2)
    source = sort(best, descending=True).indices[:, :r]
    return source, match.gather(1, source)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [MCTF]
