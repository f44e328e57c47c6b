"""Random tokens stay: a method that does not beat this has found nothing."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Kind, Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class Random(Strategy):
    """Keeps uniformly random tokens; the random numbers of a sample do not depend on its batch.

    Stratified, the grid is cut into cells of `cell` x `cell` patches, fewer at its end, and of each as large a share
    stays: of n tokens floor(K n / N) or one more. With K = N / cell^2 that is one random token a cell.
    """

    name: ClassVar[str] = "random"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset()

    stratified: bool = Field(False, description="draw from each cell of the grid alike; needs a grid")
    cell: int = Field(2, ge=1, description="side of a cell in patches")

    def scores(self, view: TokenView) -> "Tensor":
        """Return independent uniform scores; stratified, one in each n-th part of [0, 1) for the n of a cell."""
        u = view.random()
        if not self.stratified:
            return u
        if view.grid is None:
            raise UnsupportedError("random: tokens without a grid cannot be stratified")
        columns = view.grid[1]
        row, column = view.index // columns // self.cell, view.index % columns // self.cell
        cell = row * columns + column
        together = cell[:, :, None] == cell[:, None, :]
        rank = (together & (u[:, None, :] < u[:, :, None])).sum(dim=2)
        return (rank + view.random(1)) / together.sum(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Random]
