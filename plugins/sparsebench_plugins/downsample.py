"""Tokens are averaged over a coarser grid: a useful method must be better than a smaller image."""

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import How, Kind, Mix, Place, Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class Downsample(Strategy):
    """Averages the tokens at the input over a coarser grid, with one cell for each remaining token.

    For M cells the image is split into about sqrt(M rows / columns) bands of rows. The cells are distributed over the
    bands as evenly as possible. The height of a band is proportional to its number of cells, and a band is split into
    cells of equal width. So for any M all cells have the same area and are nearly square. If a regular grid of M cells
    fits best, this is the result: 14 x 14 patches become 7 x 7 means of four. A token is the mean of the patches that
    its cell covers, weighted by area; patches may be covered in part.

    The average is linear in the embedded patches with their positions: the mean patch at the mean position. In a
    smaller picture that is embedded again, a patch would show more of the scene in less detail. This needs another
    patch embedding, which a strategy cannot provide.
    """

    name: ClassVar[str] = "downsample"
    kind: ClassVar[Kind] = "baseline"
    how: ClassVar[How] = "mix"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the averages, which are computed as one matrix product."""
        return place.tokens * place.keep * place.width

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Average each cell.

        Raises:
            UnsupportedError: the tokens have no positions.
        """
        import torch

        if view.grid is None:
            raise UnsupportedError("'downsample' averages neighbours, and the tokens of this model have no places")
        rows, columns = view.grid
        bands = min(keep, max(1, round((keep * rows / columns) ** 0.5)))
        ends = [band * keep // bands for band in range(bands + 1)]
        edges = torch.tensor(ends, dtype=torch.float64)
        weights = []
        for height, (start, end) in zip(_cover(edges * rows / keep, rows), pairwise(ends), strict=True):
            cells = end - start
            width = _cover(torch.arange(cells + 1, dtype=torch.float64) * columns / cells, columns)
            weights.append((height[:, None] * width[:, None, :]).flatten(1))
        weight = torch.cat(weights)
        weight = (weight / weight.sum(dim=1, keepdim=True)).to(view.tokens, non_blocking=True)
        return Mix(weight.expand(len(view.tokens), -1, -1))


def _cover(edges: "Tensor", length: int) -> "Tensor":
    """Return (cells, length), the overlap of each cell between successive edges with each unit of 0..length."""
    import torch

    start = torch.arange(length, dtype=edges.dtype)
    return (torch.minimum(edges[1:, None], start + 1) - torch.maximum(edges[:-1, None], start)).clamp(min=0)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Downsample]
