"""Learned queries compute fewer tokens from many."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Mix, Place, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch.nn import Module


class PatchMerger(Strategy):
    """Computes K tokens from N by attention from K learned queries to the normalised tokens (Renggli et al., 2022).

    With X (N, C) and X' = LN(X), the new tokens are the softmax over tokens of Q X'^T, times X', without the factor
    1 / sqrt(C) and without a residual. The initial Q (K, C) is standard normal; Q and LN are trained with the network.
    K is the token count of the budget, and the new tokens have no positions. The paper merges once, after half of the
    blocks; here tokens are merged at each stage, or in `blocks`. Both products are counted in the MACs.
    """

    name: ClassVar[str] = "patch_merger"
    site: ClassVar[Site] = "block"
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Renggli et al., Learning to merge tokens in vision transformers, arXiv:2202.12015, 2022"
    bibtex: ClassVar[str] = """@article{renggli2022patchmerger,
  title = {Learning to Merge Tokens in Vision Transformers},
  author = {Renggli, Cedric and Susano Pinto, Andr{\\'e} and Houlsby, Neil and Mustafa, Basil
    and Puigcerver, Joan and Riquelme, Carlos},
  journal = {arXiv preprint arXiv:2202.12015},
  year = {2022}
}"""
    differs: ClassVar[str] = "merges at each stage, while the paper merges once, in the middle: blocks=6 of 12"

    def module(self, place: Place) -> "Module":
        """Return the norm, and the queries as the rows of a linear layer."""
        from torch import nn

        queries = nn.Linear(place.width, int(place.keep), bias=False)
        nn.init.normal_(queries.weight)
        return nn.ModuleDict({"norm": nn.LayerNorm(place.width), "queries": queries})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of Q X'^T and of the sums."""
        return 2 * place.tokens * place.keep * place.width

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Sum the normalised tokens with the weights of the queries."""
        normed = view.learned["norm"](view.tokens)
        return Mix(view.learned["queries"](normed).softmax(dim=1).mT, values=normed)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PatchMerger]
