"""Tokens that span a large volume stay."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class DPP(Strategy):
    """Keeps the most probable set of a determinantal point process, chosen greedily.

    The kernel is L = X X^T + r I, where r is a share of the mean squared norm of the tokens. The probability of a set
    is proportional to the squared volume that its tokens span (Kulesza and Taskar 2012). So tokens with a large norm
    stay, but not two with the same direction. The greedy search is that of Chen et al. (2018, Algorithm 1), in float64.
    With r > 0 more tokens can stay than they have channels. CDPruner (Zhang et al. 2025) weights such a kernel by the
    relevance to an instruction; here there is no instruction. The strategy acts on the input of a block. The class
    token is not part of the selection.
    """

    name: ClassVar[str] = "dpp"
    site: ClassVar[Site] = "block"
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Chen et al., Fast greedy MAP inference for determinantal point process, NeurIPS 2018"
    bibtex: ClassVar[str] = """@inproceedings{chen2018fast,
  title = {Fast Greedy {MAP} Inference for Determinantal Point Process to Improve Recommendation Diversity},
  author = {Chen, Laming and Zhang, Guoxin and Zhou, Hanning},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2018}
}"""

    ridge: float = Field(0.01, gt=0, description="r, as a share of the mean squared norm of the tokens")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the kernel and of the inner products of the Cholesky factor."""
        steps = max(place.keep - 1, 0)
        return place.tokens * place.tokens * place.width + steps * place.tokens * place.keep

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the tokens whose kernel has the largest determinant."""
        import torch

        from sparsebench.strategy.selection import largest_volume

        x = view.tokens.detach().double()
        kernel = x @ x.mT
        ridge = self.ridge * kernel.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return Keep(largest_volume(kernel + ridge.clamp(min=1e-12)[:, None, None] * eye, keep))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DPP]
