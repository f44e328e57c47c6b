"""The most central token of each cluster stays."""

from typing import ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Published, Site, Strategy, TokenView


class KMedoids(Strategy):
    """Keeps the medoids of clusters of tokens (Marin et al., Section 3).

    The initial medoids are the tokens with the largest weight w, the received attention (mean over heads and queries).
    In each of `iterations` rounds each token joins the nearest medoid (Euclidean distance of the tokens). Then the
    medoid of a cluster becomes the member i with the smallest sum_j w_j ||x_i - x_j|| over the members j. A medoid
    stays in its own cluster, so that no cluster is empty. With equal weights the initial medoids are random tokens. The
    published training has 3 rounds (`iterations=3`).

    The attention is that of the block in which the strategy acts, and the tokens are those after this attention. The
    paper acts between blocks, with the attention of the previous block. Tokens are only removed, so the strategy also
    acts on the shallow models.
    """

    name: ClassVar[str] = "k_medoids"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "received_attention"})
    draws_random: ClassVar[bool] = True
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Marin et al., Token pooling in vision transformers, WACV 2023"
    published: ClassVar[tuple[Published, ...]] = (Published("k_medoids:keep_rate=0.7,iterations=3", "DeiT-S"),)
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "acts inside a block, with the attention of that block, while the paper acts between blocks, with the "
        "attention of the previous block"
    )

    weights: Literal["attention", "equal"] = "attention"
    iterations: int = Field(5, ge=0, description="rounds of assigning tokens and moving medoids")

    def requires(self) -> frozenset[str]:
        """Return the fields, without the attention if it is not used."""
        return self.needs if self.weights == "attention" else frozenset({"tokens"})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the distances of all tokens, and of their weighted sums in each round."""
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
    """Return the strategy class."""
    return [KMedoids]
