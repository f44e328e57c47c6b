"""Tokens that lie far from each other stay."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class FarthestPoint(Strategy):
    """Keeps tokens by farthest-point sampling (Gonzalez 1985; Eldar et al. 1997), with Euclidean distances.

    The first is the token that is farthest from the mean of all; each next one is the token that is farthest from all
    before it, so that no token is farther than twice the least possible from one that stays. The rule leaves the first
    one open: the choice here does not depend on the order of the tokens. Acts on what comes into a block. The class
    token is not among the tokens here.
    """

    name: ClassVar[str] = "farthest_point"
    site: ClassVar[Site] = "block"
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Gonzalez, Clustering to minimize the maximum intercluster distance, TCS 1985"
    bibtex: ClassVar[str] = """@article{gonzalez1985clustering,
  title = {Clustering to Minimize the Maximum Intercluster Distance},
  author = {Gonzalez, Teofilo F.},
  journal = {Theoretical Computer Science},
  volume = {38},
  pages = {293--306},
  year = {1985}
}"""

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the distances of all tokens."""
        return place.tokens * place.tokens * place.width

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the spread-out tokens."""
        import torch

        from sparsebench.strategy.selection import farthest

        x = view.tokens.detach()
        first = torch.linalg.vector_norm(x - x.mean(dim=1, keepdim=True), dim=2).argmax(dim=1)
        return Keep(farthest(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), first, keep))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [FarthestPoint]
