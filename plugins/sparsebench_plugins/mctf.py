"""Tokens are merged by more than one criterion: alike, little attended, small."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Merge, Place, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class MCTF(Strategy):
    """Merges tokens that are alike, receive little attention and stand for few patches (Lee et al., Section 3).

    The weight of a pair is ((cos(x_a, x_b) + 1) / 2)^(1 / tau_similarity) times (i_a i_b)^(1 / tau_information) times
    (s_a s_b)^(1 / tau_size), where i is the inverse of the attention received (mean over heads and queries) and s the
    inverse of the size, each over its largest value. Tokens are dealt in turn to A and B. Of the r that have to leave,
    half (rounded up) go from A to the token of B of most weight, then the rest from B, as it is then, to what is left
    of A. Groups are size-weighted means, and what a group has received is the size-weighted mean of its members'.
    Attention after it weighs tokens by their sizes. In every block, at most half of the tokens.

    Left out: the attention of the next block in place of this one's ("one step ahead"), which costs that block's
    queries and keys once more, and the training with consistency between numbers of tokens. The class token is not
    among the tokens here; the first patch goes to A.
    """

    name: ClassVar[str] = "mctf"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "received_attention"})
    citation: ClassVar[str] = "Lee et al., Multi-criteria token fusion with one-step-ahead attention, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{lee2024mctf,
  title = {Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers},
  author = {Lee, Sanghyeok and Choi, Joonmyung and Kim, Hyunwoo J.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5
    proportional: ClassVar[bool] = True

    tau_similarity: float = Field(1.0, gt=0, description="temperature of the similarity")
    tau_information: float = Field(20.0, gt=0, description="temperature of the attention received")
    tau_size: float = Field(40.0, gt=0, description="temperature of the size")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B, and where more than one token leaves of B to A."""
        pairs = place.tokens // 2 * (place.tokens - place.tokens // 2)
        return (1 + (place.tokens - place.keep > 1)) * pairs * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge from A into B, then from B into A."""
        import torch

        N, r = view.index.shape[1], view.index.shape[1] - keep
        x, given = view.tokens, torch.stack([view.sizes, view.received_attention], dim=2)  # (B, N, 2)
        source, match = self._pairs(x[:, ::2], given[:, ::2], x[:, 1::2], given[:, 1::2], (r + 1) // 2)
        own = torch.arange(N, device=x.device).repeat(len(x), 1)
        host = own.scatter(1, 2 * source, 2 * match + 1)
        if r == 1:
            return Merge.into(host)
        # What B is now: tokens and attention times sizes are added up, and divided by the new sizes.
        whole = torch.cat([x, torch.ones_like(x[:, :, :1]), given[:, :, 1:]], dim=2) * view.sizes[:, :, None]
        moved, goes = (i[:, :, None].expand(-1, -1, whole.shape[2]) for i in (2 * source, match))
        total = whole[:, 1::2].scatter_add(1, goes, whole.gather(1, moved))
        size = total[:, :, -2:-1]
        now = torch.cat([size, total[:, :, -1:] / size], dim=2)
        gone = torch.zeros_like(own[:, ::2]).scatter(1, source, 1)
        source, match = self._pairs(total[:, :, :-2] / size, now, x[:, ::2], given[:, ::2], r // 2, gone.bool())
        return Merge.into(own.scatter(1, 2 * source + 1, 2 * match).gather(1, host))

    def _pairs(
        self, x: "Tensor", given: "Tensor", hosts: "Tensor", theirs: "Tensor", r: int, gone: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        """Return (B, r) places of the tokens x that merge, and those of the hosts that each goes to.

        `given` and `theirs` are (.., 2), sizes and attention received; `gone`, of the hosts that are not there.
        """
        import torch
        import torch.nn.functional as F

        # The logarithm of the weight of each pair; the largest values that i and s are divided by change no order.
        powers = torch.tensor([1 / self.tau_size, 1 / self.tau_information], device=x.device)
        alike = ((F.normalize(x, dim=2) @ F.normalize(hosts, dim=2).mT + 1) / 2).clamp(min=1e-12)
        mine, of_host = (-(g.clamp(min=1e-12).log() * powers).sum(dim=2) for g in (given, theirs))
        weight = alike.log() / self.tau_similarity + mine[:, :, None] + of_host[:, None]
        if gone is not None:
            weight = weight.masked_fill(gone[:, None], float("-inf"))
        best, match = weight.max(dim=2)
        source = best.argsort(dim=1, descending=True, stable=True)[:, :r]
        return source, match.gather(1, source)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [MCTF]
