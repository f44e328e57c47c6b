"""Random tokens stay: a useful method must be better."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Kind, Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class Random(Strategy):
    """Keeps uniformly random tokens; the random numbers of a sample do not depend on its batch.

    With `stratified` the grid is split into cells of `cell` x `cell` patches, smaller at the edges. The same share of
    each cell stays: floor(K n / N) of n tokens, or one more. With K = N / cell^2 this is one random token per cell.
    """

    name: ClassVar[str] = "random"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset()
    draws_random: ClassVar[bool] = True

    stratified: bool = Field(False, description="keep the same share of each cell; needs a grid")
    cell: int = Field(2, ge=1, description="side of a cell in patches")

    def scores(self, view: TokenView) -> "Tensor":
        """Return uniform scores: independent, or stratified: the n tokens of a cell have one in each n-th of [0, 1)."""
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
    """Return the strategy class."""
    return [Random]
