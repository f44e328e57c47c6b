"""The tokens that receive strong attention from some queries stay."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ColumnNorm(Strategy):
    """Keeps the tokens whose columns of the attention have the largest L_n norm, n > 1 (Col-Ln, arXiv 2603.27900).

    s_j = mean over heads of (sum_i A_ij^n)^(1/n), with i over all queries, including class and register tokens. With
    n = 1 this is the received attention. The larger n is, the more weight have a few queries with much attention for
    the token. The score does not depend on the class token, so the strategy can act from block 0. It was written from a
    description of the paper, not from its equations: the mean over heads and n = 2 are this project's choice.
    """

    name: ClassVar[str] = "column_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_maps"})
    citation: ClassVar[str] = "Col-Ln, arXiv 2603.27900, 2026"
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = "from a description of the paper: the mean over heads and n = 2 are chosen here"

    n: float = Field(2.0, gt=1, description="order of the norm")

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norms; each column is first divided by its largest entry, so that powers do not underflow."""
        import torch

        columns = view.attention_maps[..., -view.index.shape[1] :]
        top = columns.amax(dim=2, keepdim=True).clamp(min=1e-30)
        return (top[:, :, 0] * torch.linalg.vector_norm(columns / top, self.n, dim=2)).mean(dim=1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ColumnNorm]
