"""Tokens that point in different directions stay."""

from typing import ClassVar

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class DivPrune(Strategy):
    """Keeps tokens whose smallest pairwise cosine distance is large, chosen greedily (Alvar et al., Section 3).

    With d_ij = 1 - cos(x_i, x_j): the first token is the one whose nearest neighbour is farthest. Each next token is
    the one that is farthest from all chosen tokens. If two tokens are each other's nearest neighbour, they tie for the
    first choice; the one whose second nearest neighbour is farther is chosen. Attention is not used. The paper selects
    once, among the tokens that a vision encoder passes to a language model; here the strategy selects at each stage,
    from the input of a block. The class token is not part of the selection.
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
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = "acts within the network, while the paper selects once, before a language model"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the cosines of all tokens."""
        return place.tokens * place.tokens * place.width

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep tokens that are far from each other."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.selection import farthest

        unit = F.normalize(view.tokens.detach(), dim=2)
        cosines = unit @ unit.mT
        distances = 1 - (cosines + cosines.mT) / 2  # symmetric despite rounding
        N = unit.shape[1]
        others = distances.masked_fill(torch.eye(N, dtype=torch.bool, device=unit.device), torch.inf)
        nearest = others.topk(min(2, N), dim=2, largest=False).values
        nearer = nearest[..., 0] < nearest[..., 0].amax(dim=1, keepdim=True)
        first = nearest[..., -1].masked_fill(nearer, -torch.inf).argmax(dim=1)
        return Keep(farthest(distances, first, keep))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DivPrune]
