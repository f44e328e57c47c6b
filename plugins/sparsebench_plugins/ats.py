"""Tokens are sampled by their contribution to the class token, and each image keeps as many as it needs."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Mask, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ATS(Strategy):
    """Samples tokens at evenly spaced points of the cumulative scores, a different number in each image.

    Fayyaz et al. (2022): S_j = a_j ||v_j|| / sum_i a_i ||v_i||, a_j the class token's attention, mean over heads, v_j
    the value, all heads concatenated; c_j is the sum of S up to token j, from the smallest S up. Each of M points takes
    the token whose sum is nearest; tokens taken several times stay once. As released, sums are c' = (c - min c) /
    (max c - min c), and the points s + m (1 - s) / (M - 1), m = 0..M-1, s the smallest c' that is not 0; a single point
    is s. Tokens that left an image before have the score 0 and stand first: from then on min c is 0, and the points
    begin at the smallest score that is there, where at first they begin at the second smallest. As in the paper, sums
    are c and the points (2m - 1) / (2M), m = 1..M. So M bounds the number that stays, and of an image whose attention
    is on few tokens few do. Only they are queries. No gradient goes through the choice.

    M is the count that the budget gives; with a fraction of MACs it is raised, up to all tokens, until the mean cost is
    what was asked for. It acts in blocks 3 to 11 of 12, as published, and in as large a part of other depths, unless
    `blocks` says where. The published M is 197, the class token counted: all 196 patches (`counts`). Without a class
    token the attention received takes its place. It cannot act on the theory models.
    """

    name: ClassVar[str] = "ats"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "values"})
    schedule: ClassVar[Schedule] = "every"
    first: ClassVar[float] = 0.25
    adaptive: ClassVar[bool] = True
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Fayyaz et al., Adaptive token sampling for efficient ViTs (ATS), ECCV 2022"
    bibtex: ClassVar[str] = """@inproceedings{fayyaz2022ats,
  title = {Adaptive Token Sampling for Efficient Vision Transformers},
  author = {Fayyaz, Mohsen and Koohpayegani, Soroush Abbasi and Jafari, Farnoush Rezaei and Sengupta, Sunando
    and Joze, Hamid Reza Vaezi and Sommerlade, Eric and Pirsiavash, Hamed and Gall, Juergen},
  booktitle = {European Conference on Computer Vision},
  year = {2022}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("ats:blocks=3+4+5+6+7+8+9+10+11,counts=196+196+196+196+196+196+196+196+196", "DeiT-S", 2.9),
    )

    differs: ClassVar[str] = "one token is enough to stay, where the released settings name 8 as the least"

    points: Literal["released", "paper"] = Field("released", description="which points of the sum take the tokens")
    ascending: bool = Field(True, description="sum from the smallest score up, as released; else in the tokens' order")

    def plan(self, view: TokenView, keep: int) -> Mask:
        """Take the tokens nearest to the points."""
        import torch

        from sparsebench.strategy.sorting import sort

        contribution = (view.attention * view.values.square().sum(dim=(1, 3)).sqrt()).detach()
        S = contribution.masked_fill(~view.there, 0.0)
        S = S / S.sum(dim=1, keepdim=True).clamp(min=1e-30)
        place = S if self.ascending else torch.zeros_like(S)
        order = sort(place.masked_fill(~view.there, torch.inf)).indices
        c = S.gather(1, order).double().cumsum(dim=1)  # in which a small score is not lost beside a large sum
        if self.points == "released":
            some_left = view.there.sum(dim=1, keepdim=True) < view.memory.setdefault("tokens", c.shape[1])
            least = c[:, :1].masked_fill(some_left, 0.0)
            c = (c - least) / (c[:, -1:] - least).clamp(min=1e-30)  # all 0 where none has a score
        points = self._points(c, keep)
        c = c.masked_fill(~view.there.gather(1, order), torch.inf)
        right = torch.searchsorted(c, points).clamp(max=c.shape[1] - 1)
        left = (right - 1).clamp(min=0)
        nearest = torch.where((c.gather(1, left) - points).abs() <= (c.gather(1, right) - points).abs(), left, right)
        first = torch.searchsorted(c, c.gather(1, nearest))  # of equal sums
        taken = torch.zeros_like(view.there).scatter(1, order.gather(1, first), True)
        return Mask(taken, scores=S)

    def _points(self, c: "Tensor", M: int) -> "Tensor":
        """Return (B, M) for the (B, N) sums."""
        import torch

        m = torch.arange(M, device=c.device, dtype=c.dtype).expand(len(c), M)
        if self.points == "paper":
            return (2 * m + 1) / (2 * M)
        s = c.where(c > 0, 1.0).amin(dim=1, keepdim=True)
        return s + m * (1 - s) / max(1, M - 1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ATS]
