"""The grid of patches is made coarser: a method that does not beat a smaller image has found nothing."""

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import How, Kind, Mix, Place, Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class Downsample(Strategy):
    """Averages the tokens at the input over a coarser grid, with one cell for each token that stays.

    The image is cut into about sqrt(M rows / columns) bands of rows, for M cells; the cells are dealt to the bands as
    evenly as can be, a band is as high as its number of cells asks for and is cut into cells of one width. So all M
    cells have the same area, whatever M is, and are nearly square: where a regular grid of M cells is nearest to that,
    they are it, and 14 x 14 patches become 7 x 7 means of four. A token is the mean of the patches that its cell
    covers, by area, patches that are covered in part among them.

    This is an average of embedded patches with their positions, which is linear: the mean patch at the mean position.
    A smaller picture, embedded anew, would show a patch more of the scene in less detail; that takes another patch
    embedding and is not what a strategy can do.
    """

    name: ClassVar[str] = "downsample"
    kind: ClassVar[Kind] = "baseline"
    how: ClassVar[How] = "mix"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of its averages, which are carried out as one product."""
        return place.tokens * place.keep * place.width

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Average each cell.

        Raises:
            UnsupportedError: the tokens have no places.
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
    """Return (cells, length), how much of each unit between 0 and length lies between two edges that follow."""
    import torch

    start = torch.arange(length, dtype=edges.dtype)
    return (torch.minimum(edges[1:, None], start + 1) - torch.maximum(edges[:-1, None], start)).clamp(min=0)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Downsample]
