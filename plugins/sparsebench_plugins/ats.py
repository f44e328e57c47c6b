"""Tokens are sampled by their contribution to the class token; token counts differ between images."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Mask, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ATS(Strategy):
    """Samples tokens at evenly spaced points of the cumulative scores, a different number in each image.

    Fayyaz et al. (2022): S_j = a_j ||v_j|| / sum_i a_i ||v_i||, with a_j the class token's attention, mean over heads,
    and v_j the value, all heads concatenated. c_j is the cumulative sum of S up to token j, in ascending order of S.
    Each of M points selects the token with the nearest c; a token that is selected several times stays once.

    With points=released the sums are c' = (c - min c) / (max c - min c), and the points are s + m (1 - s) / (M - 1),
    m = 0..M-1, where s is the smallest c' that is not 0; a single point is s. Tokens that have left an image have the
    score 0 and come first. From then on min c is 0, and the points begin at the smallest score of a present token; at
    first they begin at the second smallest. With points=paper the sums are c, and the points are (2m - 1) / (2M),
    m = 1..M. M is thus an upper limit of the number of kept tokens, and an image whose attention is on few tokens keeps
    few. Only the kept tokens are queries. The selection has no gradient.

    M is the token count of the budget; with a fraction of MACs it is raised, up to all tokens, until the mean cost
    meets the budget. The strategy acts in blocks 3 to 11 of 12, as published, and in the same share of other depths,
    unless `blocks` is set. The published M is 197 with the class token, that is all 196 patches (`counts`). Without a
    class token the received attention is used. It cannot act on the theory models.
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

    differs: ClassVar[str] = "an image may keep a single token, while the released settings keep at least 8"

    points: Literal["released", "paper"] = Field("released", description="which points of the sums select tokens")
    ascending: bool = Field(True, description="sum in ascending order of scores, as released; else in token order")

    def plan(self, view: TokenView, keep: int) -> Mask:
        """Keep the tokens that are nearest to the points."""
        import torch

        from sparsebench.strategy.sorting import sort

        contribution = (view.attention * view.values.square().sum(dim=(1, 3)).sqrt()).detach()
        S = contribution.masked_fill(~view.there, 0.0)
        S = S / S.sum(dim=1, keepdim=True).clamp(min=1e-30)
        place = S if self.ascending else torch.zeros_like(S)
        order = sort(place.masked_fill(~view.there, torch.inf)).indices
        c = S.gather(1, order).double().cumsum(dim=1)  # float64, because small scores are lost in large sums
        if self.points == "released":
            some_left = view.there.sum(dim=1, keepdim=True) < view.memory.setdefault("tokens", c.shape[1])
            least = c[:, :1].masked_fill(some_left, 0.0)
            c = (c - least) / (c[:, -1:] - least).clamp(min=1e-30)  # all 0 if all scores are 0
        points = self._points(c, keep)
        c = c.masked_fill(~view.there.gather(1, order), torch.inf)
        right = torch.searchsorted(c, points).clamp(max=c.shape[1] - 1)
        left = (right - 1).clamp(min=0)
        nearest = torch.where((c.gather(1, left) - points).abs() <= (c.gather(1, right) - points).abs(), left, right)
        first = torch.searchsorted(c, c.gather(1, nearest))  # the first of equal sums
        taken = torch.zeros_like(view.there).scatter(1, order.gather(1, first), True)
        return Mask(taken, scores=S)

    def _points(self, c: "Tensor", M: int) -> "Tensor":
        """Return the (B, M) points for the (B, N) sums."""
        import torch

        m = torch.arange(M, device=c.device, dtype=c.dtype).expand(len(c), M)
        if self.points == "paper":
            return (2 * m + 1) / (2 * M)
        s = c.where(c > 0, 1.0).amin(dim=1, keepdim=True)
        return s + m * (1 - s) / max(1, M - 1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ATS]
