"""The most central token of each cluster stays."""

from typing import ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Published, Site, Strategy, TokenView


class KMedoids(Strategy):
    """Keeps the medoids of clusters of tokens (Marin et al., Section 3).

    Begins with the tokens of largest weight w, the attention received (mean over heads and queries). Then, as often as
    `iterations` says, each token joins the nearest medoid (Euclidean, of the tokens), and the medoid of a cluster
    becomes its member i with the least sum_j w_j ||x_i - x_j|| over the cluster's members j. A medoid stays in its own
    cluster, so that none is empty. With equal weights it begins with tokens drawn at random. The published training has
    3 iterations (`iterations=3`).

    The attention is that of the block in which it acts, and the tokens are those behind it; the paper, which acts
    between blocks, has that of the block before. Only removes tokens, so it acts on the shallow models too.
    """

    name: ClassVar[str] = "k_medoids"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "received_attention"})
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Marin et al., Token pooling in vision transformers, WACV 2023"
    published: ClassVar[tuple[Published, ...]] = (Published("k_medoids:keep_rate=0.7,iterations=3", "DeiT-S"),)
    differs: ClassVar[str] = (
        "acts inside a block, with the attention of that block, where the paper acts between blocks with that of the "
        "block before"
    )

    weights: Literal["attention", "equal"] = "attention"
    iterations: int = Field(5, ge=0, description="rounds of assigning tokens and moving medoids")

    def requires(self) -> frozenset[str]:
        """Ask for the attention only where it is used."""
        return self.needs if self.weights == "attention" else frozenset({"tokens"})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the distances of all tokens, and in each round of their sums with the weights."""
        return place.tokens * place.tokens * (place.width + self.iterations)

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the medoids."""
        import torch

        from sparsebench.strategy.sorting import ranks, sort

        x = view.tokens.detach()
        d = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        attended = self.weights == "attention"
        w = view.received_attention.detach() if attended else torch.ones_like(d[:, 0])
        medoids = Keep.top(w if attended else view.random(), keep).index
        place = torch.arange(keep, device=x.device).expand_as(medoids)
        for _ in range(self.iterations):
            cluster = d.gather(2, medoids[:, None].expand(-1, d.shape[1], -1)).argmin(dim=2).scatter(1, medoids, place)
            together = cluster[:, :, None] == cluster[:, None]
            order = sort((d * together * w[:, None]).sum(dim=2)).indices
            rank = ranks(order)
            first = torch.full_like(medoids, d.shape[1]).scatter_reduce(1, cluster, rank, "amin")
            medoids = order.gather(1, first)
        return Keep(medoids)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [KMedoids]
