"""Tokens that point in different directions stay."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class DivPrune(Strategy):
    """Keeps tokens with the largest smallest pairwise cosine distance, chosen greedily (Alvar et al., Section 3).

    With d_ij = 1 - cos(x_i, x_j): the first is the token whose nearest neighbour is farthest; each next one is the
    token that is farthest from all before it. Two tokens that are each other's nearest neighbour tie for the first
    place: of them the one whose second nearest is farther goes first. It looks at no attention. The paper chooses once,
    among the tokens that a vision encoder gives to a language model; here it acts at each stage on what comes into a
    block. The class token is not among the tokens here.
    """

    name: ClassVar[str] = "divprune"
    site: ClassVar[Site] = "block"
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Alvar et al., DivPrune: diversity-based visual token pruning, CVPR 2025"
    bibtex: ClassVar[str] = """@inproceedings{alvar2025divprune,
  title = {DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models},
  author = {Alvar, Saeed Ranjbar and Singh, Gursimran and Akbari, Mohammad and Zhang, Yong},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2025}
}"""
    differs: ClassVar[str] = "acts within the network, where the paper chooses once, before a language model"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the cosines of all tokens."""
        return place.tokens * place.tokens * place.width

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the spread-out tokens."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.selection import farthest

        unit = F.normalize(view.tokens.detach(), dim=2)
        cosines = unit @ unit.mT
        distances = 1 - (cosines + cosines.mT) / 2  # a rounded product is not symmetric
        N = unit.shape[1]
        others = distances.masked_fill(torch.eye(N, dtype=torch.bool, device=unit.device), torch.inf)
        nearest = others.topk(min(2, N), dim=2, largest=False).values
        nearer = nearest[..., 0] < nearest[..., 0].amax(dim=1, keepdim=True)
        first = nearest[..., -1].masked_fill(nearer, -torch.inf).argmax(dim=1)
        return Keep(farthest(distances, first, keep))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [DivPrune]
