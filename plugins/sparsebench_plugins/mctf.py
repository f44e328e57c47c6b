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

    tau_similarity: float = Field(1.0, gt=0, description="temperature of the similarity")
    tau_information: float = Field(20.0, gt=0, description="temperature of the attention received")
    tau_size: float = Field(40.0, gt=0, description="temperature of the size")
    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B, and where more than one token leaves of B to A."""
        pairs = place.tokens // 2 * (place.tokens - place.tokens // 2)
        return (1 + (place.tokens - place.keep > 1)) * pairs * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge from A into B, then from B into A."""
        import torch
        import torch.nn.functional as F

        from sparsebench.tokens import gather

        N, r = view.index.shape[1], view.index.shape[1] - keep
        x, sizes, received = view.tokens, view.sizes, view.received_attention
        unit, worth = F.normalize(x, dim=2), self._worth(sizes, received)
        A, B = slice(0, None, 2), slice(1, None, 2)
        source, match = self._pairs(unit[:, A], worth[:, A], unit[:, B], worth[:, B], (r + 1) // 2)
        own = torch.arange(N, device=x.device).repeat(len(x), 1)
        host = own.scatter(1, 2 * source, 2 * match + 1)
        if r == 1:
            return Merge.into(host)
        # What B is now: tokens and attention times sizes, summed. Only the direction of a token is wanted.
        moved = gather(x, 2 * source) * sizes.gather(1, 2 * source)[:, :, None]
        total = (x[:, B] * sizes[:, B, None]).scatter_add(1, match[:, :, None].expand_as(moved), moved)
        size, seen = (v[:, B].scatter_add(1, match, v.gather(1, 2 * source)) for v in (sizes, sizes * received))
        gone = torch.zeros_like(own[:, A]).scatter(1, source, 1).bool()
        theirs = worth[:, A].masked_fill(gone, float("-inf"))
        now = self._worth(size, seen / size)
        source, match = self._pairs(F.normalize(total, dim=2), now, unit[:, A], theirs, r // 2)
        return Merge.into(own.scatter(1, 2 * source + 1, 2 * match).gather(1, host))

    def _worth(self, sizes: "Tensor", received: "Tensor") -> "Tensor":
        """Return (B, n), the logarithm of each token's own factor of a weight.

        The largest values that i and s are divided by are left out, as they change no order.
        """
        return -(sizes.log() / self.tau_size + received.clamp(min=1e-12).log() / self.tau_information)

    def _pairs(
        self, unit: "Tensor", worth: "Tensor", hosts: "Tensor", theirs: "Tensor", r: int
    ) -> "tuple[Tensor, Tensor]":
        """Return (B, r) places of the tokens that merge, and those of the hosts that each goes to.

        Tokens and hosts are given as directions (B, n, C) and with their own factors (B, n), see `_worth`.
        """
        alike = ((unit @ hosts.mT + 1) / 2).clamp(min=1e-12)
        best, match = (alike.log() / self.tau_similarity + worth[:, :, None] + theirs[:, None]).max(dim=2)
        source = best.argsort(dim=1, descending=True, stable=True)[:, :r]
        return source, match.gather(1, source)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [MCTF]
