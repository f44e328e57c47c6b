"""Clusters of similar tokens are merged, found from the bottom up."""

from typing import ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class ATC(Strategy):
    """Merges tokens by agglomerative clustering of their keys (Haurum et al., Section 3).

    The two closest clusters are joined until as many are left as have to stay. Tokens are 1 - cos apart, of keys, mean
    over heads; clusters as far as their closest tokens (single linkage), their farthest (complete) or the mean of all
    pairs (average). A cluster's token is the size-weighted mean of its members, in the order of their first ones.
    Attention after it weighs tokens by their sizes, unless `proportional` is off. Any number can leave at once, so it
    acts in stages.

    Clustered by scipy on the CPU, image by image, in float64: slow, and so published. The class token is not among the
    tokens here.
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
        import torch
        import torch.nn.functional as F
        from scipy.cluster.hierarchy import linkage
        from scipy.spatial.distance import squareform

        metric = F.normalize(view.keys.detach().mean(dim=1).double(), dim=2)
        apart = (1 - metric @ metric.mT).clamp(min=0).cpu().numpy()
        targets, N = [], metric.shape[1]
        for distances in apart:
            joins = linkage(squareform(distances, checks=False), self.linkage)
            members = [[i] for i in range(N)]
            for one, other in joins[: N - keep, :2].astype(int):
                members.append(sorted(members[one] + members[other]))
                members[one] = members[other] = []
            target = torch.empty(N, dtype=torch.int64)
            for number, cluster in enumerate(sorted(filter(None, members))):
                target[cluster] = number
            targets.append(target)
        return Merge(torch.stack(targets).to(view.keys.device))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ATC]
