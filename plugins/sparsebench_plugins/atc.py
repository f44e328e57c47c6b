"""Clusters of similar tokens, built bottom-up, are merged."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ATC(Strategy):
    """Merges tokens by agglomerative clustering of their keys (Haurum et al., Section 3).

    The two closest clusters are joined until the number of clusters is the number of tokens to keep. The distance of
    two tokens is 1 - cos of their keys, mean over heads. The distance of two clusters is that of their closest tokens
    (single linkage), of their farthest tokens (complete), or the mean over all pairs (average). The new token of a
    cluster is the size-weighted mean of its members; clusters are ordered by their first members. Later attention
    weights tokens by their sizes, unless `proportional` is off. Any number of tokens can leave at once, so the strategy
    acts in stages.

    All images are clustered at once, in float64. Of equally close pairs the first in the order of the tokens is joined.
    The published implementation clusters on the CPU, image by image. Here the class token is not clustered.
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
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of all tokens."""
        return place.tokens * place.tokens * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge each cluster."""
        import torch.nn.functional as F

        metric = F.normalize(view.keys.detach().mean(dim=1).double(), dim=2)
        return Merge.into(self._first((1 - metric @ metric.mT).clamp(min=0), keep))

    def _first(self, apart: "Tensor", keep: int) -> "Tensor":
        """Return (B, N), the first token of each token's cluster, from (B, N, N) distances."""
        import torch

        B, N, _ = apart.shape
        device = apart.device
        image, place = torch.arange(B, device=device), torch.arange(N, device=device)
        apart = apart.masked_fill(place[:, None] == place, torch.inf)
        far = apart.new_full((), torch.inf)  # assigning a Python number would make the host wait for a GPU
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
        """Return the distances of the union of two clusters to all others, from their distances and sizes."""
        if self.linkage == "average":
            return (size_one * one + size_other * other) / (size_one + size_other)
        return one.minimum(other) if self.linkage == "single" else one.maximum(other)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ATC]
