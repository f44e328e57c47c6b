"""The tokens to which some others attend sharply stay."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ColumnNorm(Strategy):
    """Keeps the tokens whose columns of the attention have the largest L_n norm, n > 1 (Col-Ln, arXiv 2603.27900).

    s_j = mean over heads of (sum_i A_ij^n)^(1/n), i over all queries, class and register tokens too. With n = 1 that
    is the attention received; the larger n, the more a few queries that look for the token count. It asks no class
    token and so can act from block 0. Made from a description of the paper, not from its equations: the mean over heads
    and n = 2 are chosen here.
    """

    name: ClassVar[str] = "column_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_maps"})
    citation: ClassVar[str] = "Col-Ln, arXiv 2603.27900, 2026"
    differs: ClassVar[str] = "made from a description of the paper: the mean over heads and n = 2 are chosen here"

    n: float = Field(2.0, gt=1, description="order of the norm")

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm; the largest of a column is taken out first, so that no power of it vanishes."""
        import torch

        columns = view.attention_maps[..., -view.index.shape[1] :]
        top = columns.amax(dim=2, keepdim=True).clamp(min=1e-30)
        return (top[:, :, 0] * torch.linalg.vector_norm(columns / top, self.n, dim=2)).mean(dim=1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ColumnNorm]
