"""Tokens of large groups are merged; those that stand alone stay as they are."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Merge, Place, Schedule, Site, Strategy, TokenView


class PiToMe(Strategy):
    """Merges the tokens with the most energy, that is with the most tokens like them (Tran et al., Section 3).

    The energy of token i is mean_j ELU(cos(k_i, k_j) - margin), over keys, mean over heads: high in a large group such
    as a background, low for what stands alone. Of the 2r tokens with the most energy, ranked, those at even ranks are
    each merged into the most similar one at an odd rank, by size-weighted means, r the number that has to leave; all
    others are protected. Attention after it weighs tokens by their sizes. In every block, at most half of the tokens.

    The margin is that of the released code in every block; the paper lets it fall with depth. The class token is not
    among the tokens here.
    """

    name: ClassVar[str] = "pitome"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    citation: ClassVar[str] = "Tran et al., Accelerating transformers with spectrum-preserving token merging, 2024"
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    margin: float = Field(0.5, ge=-1, le=1, description="cosine above which tokens count as alike")
    proportional: bool = Field(False, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of all tokens."""
        return place.tokens * place.tokens * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge r of the 2r tokens with the most energy into the others."""
        import torch
        import torch.nn.functional as F

        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        similarity = metric @ metric.mT
        energy = F.elu(similarity - self.margin).mean(dim=2)
        N = energy.shape[1]
        ranked = energy.argsort(dim=1, descending=True, stable=True)[:, : 2 * (N - keep)]
        A, B = ranked[:, ::2], ranked[:, 1::2]
        rows = similarity.gather(1, A[:, :, None].expand(-1, -1, N))
        match = rows.gather(2, B[:, None].expand(-1, A.shape[1], -1)).argmax(dim=2)
        host = torch.arange(N, device=A.device).repeat(len(A), 1).scatter(1, A, B.gather(1, match))
        return Merge.into(host, scores=-energy)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [PiToMe]
