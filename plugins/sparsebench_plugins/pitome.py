"""Tokens of large groups are merged; tokens without similar tokens do not change."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class PiToMe(Strategy):
    """Merges the tokens with the largest energy, which have the most similar tokens (Tran et al., Section 3).

    The energy of token i is mean_j ELU(cos(k_i, k_j) - margin), with keys k, mean over heads. It is high in a large
    group, such as a background, and low for a token without similar tokens. In block l of n, from 0, the default margin
    is .75 (1 - l / n). Let r be the number of tokens to remove, and rank the 2r tokens with the most energy from 0.
    Each token at an even rank is merged into the most similar token at an odd rank; all other tokens are protected.
    Means are weighted by sizes, and tokens keep their order. Later attention weights tokens by their sizes only with
    `proportional`. The strategy acts in every block, and removes at most half of the tokens. Class and register tokens
    are never merged.

    In the blocks l < n / 2 (`bipartite`) all tokens are matched instead: each token at an even rank is paired with the
    most similar token at an odd rank, and the r most similar pairs are merged. That these blocks split the tokens by
    rank of energy is this project's reading of the publication. With `bipartite` = 0 the paper's rule applies in every
    block.
    """

    name: ClassVar[str] = "pitome"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Tran et al., Accelerating transformers with spectrum-preserving token merging, 2024"
    published: ClassVar[tuple[Published, ...]] = (Published("pitome:ratio=0.9", "DeiT-S"),)
    differs: ClassVar[str] = (
        "that the first half of the blocks splits its tokens by rank of energy is this project's reading of the "
        "publication"
    )
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    margin: float | None = Field(
        None, ge=-1, le=1, description="cosine above which tokens count as similar; by default it falls with depth"
    )
    bipartite: float = Field(0.5, ge=0, le=1, description="share of the depth in which all tokens are matched")
    proportional: bool = Field(False, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of all tokens."""
        return place.tokens * place.tokens * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r tokens at even ranks that are most similar to a token at an odd rank."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        similarity = metric @ metric.mT
        margin = 0.75 * (1 - view.block / view.depth) if self.margin is None else self.margin
        energy = F.elu(similarity - margin).mean(dim=2)
        N, r = energy.shape[1], energy.shape[1] - keep
        whole = view.block < self.bipartite * view.depth - 1e-9  # exact for shares such as 7 / 12
        ranked = sort(energy, descending=True).indices[:, : N if whole else 2 * r]
        A, B = ranked[:, ::2], ranked[:, 1::2]
        rows = similarity.gather(1, A[:, :, None].expand(-1, -1, N))
        closest, match = rows.gather(2, B[:, None].expand(-1, A.shape[1], -1)).max(dim=2)
        leaving = sort(closest, descending=True).indices[:, :r]
        host = torch.arange(N, device=A.device).repeat(len(A), 1)
        return Merge.into(host.scatter(1, A.gather(1, leaving), B.gather(1, match.gather(1, leaving))), scores=-energy)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PiToMe]
