"""Tokens that are far from each other stay."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class FarthestPoint(Strategy):
    """Keeps tokens by farthest-point sampling (Gonzalez 1985; Eldar et al. 1997), with Euclidean distances.

    The first token is the one that is farthest from the mean of all tokens. Each next token is the one that is farthest
    from all chosen tokens. The largest distance of a token to the nearest kept token is then at most twice the smallest
    possible. The published rule leaves the first token open; this choice does not depend on the order of the tokens.
    The strategy acts on the input of a block. The class token is not part of the selection.
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
        """Keep tokens that are far from each other."""
        import torch

        from sparsebench.strategy.selection import farthest

        x = view.tokens.detach()
        first = torch.linalg.vector_norm(x - x.mean(dim=1, keepdim=True), dim=2).argmax(dim=1)
        return Keep(farthest(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist"), first, keep))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [FarthestPoint]
