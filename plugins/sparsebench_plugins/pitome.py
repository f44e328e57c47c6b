"""Tokens of large groups are merged; those that stand alone stay as they are."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class PiToMe(Strategy):
    """Merges the tokens with the largest energy, which have the most similar tokens (Tran et al., Section 3).

    The energy of token i is mean_j ELU(cos(k_i, k_j) - margin), over keys, mean over heads: high in a large group such
    as a background, low for what stands alone. In block l of n, from 0, the margin is .75 (1 - l / n), unless it is
    given. Of the 2r tokens with the most energy, ranked from 0, those at even ranks are each merged into the most
    similar one at an odd rank, r the number that has to leave; all others are protected. Means are weighted by sizes,
    and tokens stay in their order. Attention after it weighs tokens by their sizes only with `proportional`. In every
    block, at most half of the tokens. Class and register tokens are not among them.

    In the blocks l < n / 2 (`bipartite`) all tokens are matched instead: those at even ranks each find the most similar
    one at an odd rank, and the r closest pairs merge. How these blocks deal the tokens, by rank of energy, is this
    project's reading of what is published. With `bipartite` 0 the paper's rule holds in every block.
    """

    name: ClassVar[str] = "pitome"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Tran et al., Accelerating transformers with spectrum-preserving token merging, 2024"
    published: ClassVar[tuple[Published, ...]] = (Published("pitome:ratio=0.9", "DeiT-S"),)
    differs: ClassVar[str] = (
        "that the first half of the blocks deals its tokens by rank of energy is this project's reading of what is "
        "published"
    )
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    margin: float | None = Field(
        None, ge=-1, le=1, description="cosine above which tokens count as alike; by default it falls with depth"
    )
    bipartite: float = Field(0.5, ge=0, le=1, description="share of the depth in which all tokens are matched")
    proportional: bool = Field(False, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of all tokens."""
        return place.tokens * place.tokens * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r tokens at even ranks that are closest to one at an odd rank."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        similarity = metric @ metric.mT
        margin = 0.75 * (1 - view.block / view.depth) if self.margin is None else self.margin
        energy = F.elu(similarity - margin).mean(dim=2)
        N, r = energy.shape[1], energy.shape[1] - keep
        whole = view.block < self.bipartite * view.depth - 1e-9  # which is exact for shares such as 7 / 12
        ranked = sort(energy, descending=True).indices[:, : N if whole else 2 * r]
        A, B = ranked[:, ::2], ranked[:, 1::2]
        rows = similarity.gather(1, A[:, :, None].expand(-1, -1, N))
        closest, match = rows.gather(2, B[:, None].expand(-1, A.shape[1], -1)).max(dim=2)
        leaving = sort(closest, descending=True).indices[:, :r]
        host = torch.arange(N, device=A.device).repeat(len(A), 1)
        return Merge.into(host.scatter(1, A.gather(1, leaving), B.gather(1, match.gather(1, leaving))), scores=-energy)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [PiToMe]
