"""Tokens are sampled by what they give the class token, so many as the image needs."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Mask, Schedule, Site, Strategy, TokenView


class ATS(Strategy):
    """Keeps the tokens that evenly spaced points of a cumulative sum of scores fall upon; how many hangs on the image.

    Fayyaz et al. (2022): S_j = a_j ||v_j|| / sum_i a_i ||v_i||, a_j the class token's attention, mean over heads, v_j
    the value, all heads concatenated. With c_j the sum of S up to token j, the points (2m - 1) / (2M), m = 1..M, each
    take the token whose c_j is nearest; tokens taken several times stay once. So M bounds the number that stays, and of
    an image whose attention is on few tokens few do. Only they are queries. No gradient goes through the choice.

    M is the count that the budget gives, raised until the mean cost is what was asked for; the least cost that can be
    raised to is that of M = N - 1. The published method acts in blocks 3 to 11 of 12 with M = 197 (--blocks): here it
    acts in every block. Without a class token the attention received takes its place. It cannot act on the theory
    models.
    """

    name: ClassVar[str] = "ats"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "values"})
    schedule: ClassVar[Schedule] = "every"
    adaptive: ClassVar[bool] = True
    citation: ClassVar[str] = "Fayyaz et al., Adaptive token sampling for efficient ViTs (ATS), ECCV 2022"
    bibtex: ClassVar[str] = """@inproceedings{fayyaz2022ats,
  title = {Adaptive Token Sampling for Efficient Vision Transformers},
  author = {Fayyaz, Mohsen and Koohpayegani, Soroush Abbasi and Jafari, Farnoush Rezaei and Sengupta, Sunando
    and Joze, Hamid Reza Vaezi and Sommerlade, Eric and Pirsiavash, Hamed and Gall, Juergen},
  booktitle = {European Conference on Computer Vision},
  year = {2022}
}"""

    ascending: bool = Field(True, description="sum from the smallest score up, as released; else in the tokens' order")

    def plan(self, view: TokenView, keep: int) -> Mask:
        """Take the tokens nearest to the points."""
        import torch

        given = (view.attention * view.values.square().sum(dim=(1, 3)).sqrt()).detach()
        S = given.masked_fill(~view.there, 0.0)
        S = S / S.sum(dim=1, keepdim=True).clamp(min=1e-30)
        place = S if self.ascending else torch.zeros_like(S)
        order = place.masked_fill(~view.there, torch.inf).sort(dim=1, stable=True).indices
        c = S.gather(1, order).cumsum(dim=1)
        c = c.masked_fill(~view.there.gather(1, order), torch.inf)
        points = (2 * torch.arange(keep, device=c.device, dtype=c.dtype) + 1) / (2 * keep)
        right = torch.searchsorted(c, points.expand(len(c), keep).contiguous()).clamp(max=c.shape[1] - 1)
        left = (right - 1).clamp(min=0)
        nearest = torch.where((c.gather(1, left) - points).abs() <= (c.gather(1, right) - points).abs(), left, right)
        taken = torch.zeros_like(view.there).scatter(1, order.gather(1, nearest), True)
        return Mask(taken, scores=S)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ATS]
