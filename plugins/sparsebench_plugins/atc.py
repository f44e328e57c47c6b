"""Clusters of similar tokens, built from the bottom up, are merged."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ATC(Strategy):
    """Merges tokens by agglomerative clustering of their keys (Haurum et al., Section 3).

    The two closest clusters are joined until as many are left as have to stay. Tokens are 1 - cos apart, of keys, mean
    over heads; clusters as far as their closest tokens (single linkage), their farthest (complete) or the mean of all
    pairs (average). A cluster's token is the size-weighted mean of its members, in the order of their first ones.
    Attention after it weighs tokens by their sizes, unless `proportional` is off. Any number can leave at once, so it
    acts in stages.

    Clustered in float64, all images at once; of equally close pairs the first in the order of the tokens is joined. The
    published implementation clusters on the CPU, image by image. The class token is not among the tokens here.
    """

    name: ClassVar[str] = "atc"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Haurum et al., Agglomerative token clustering, ECCV 2024"
    bibtex: ClassVar[str] = """@inproceedings{haurum2024atc,
  title = {Agglomerative Token Clustering},
  author = {Haurum, Joakim Bruslund and Escalera, Sergio and Taylor, Graham W. and Moeslund, Thomas B.},
  booktitle = {European Conference on Computer Vision},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("atc:keep_rate=0.7", "DeiT-S"),)
    schedule: ClassVar[Schedule] = "stages"

    linkage: Literal["single", "complete", "average"] = "average"
    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of all tokens."""
        return place.tokens * place.tokens * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge each cluster."""
        import torch.nn.functional as F

        metric = F.normalize(view.keys.detach().mean(dim=1).double(), dim=2)
        return Merge.into(self._first((1 - metric @ metric.mT).clamp(min=0), keep))

    def _first(self, apart: "Tensor", keep: int) -> "Tensor":
        """Return (B, N), the first token of the cluster that each is in, by (B, N, N) distances."""
        import torch

        B, N, _ = apart.shape
        device = apart.device
        image, place = torch.arange(B, device=device), torch.arange(N, device=device)
        apart = apart.masked_fill(place[:, None] == place, torch.inf)
        far = apart.new_full((), torch.inf)  # to assign a number makes the host wait for a GPU
        size, first = apart.new_ones(B, N), place.repeat(B, 1)
        for _ in range(N - keep):
            closest = apart.flatten(1).argmin(dim=1)
            one, other = torch.minimum(closest // N, closest % N), torch.maximum(closest // N, closest % N)
            sizes = size[image, one, None], size[image, other, None]
            joined = self._union_distance(apart[image, one], apart[image, other], *sizes)
            apart[image, one] = apart[image, :, one] = joined
            apart[image, other] = apart[image, :, other] = apart[image, one, one] = far
            size[image, one] += size[image, other]
            first = torch.where(first == other[:, None], one[:, None], first)
        return first

    def _union_distance(self, one: "Tensor", other: "Tensor", size_one: "Tensor", size_other: "Tensor") -> "Tensor":
        """Return how far the union of two clusters is from each, by how far they are and their sizes."""
        if self.linkage == "average":
            return (size_one * one + size_other * other) / (size_one + size_other)
        return one.minimum(other) if self.linkage == "single" else one.maximum(other)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ATC]
