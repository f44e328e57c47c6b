"""The tokens nearest to the centre of the grid stay, in every image."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Disposal, Kind, Site, Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class Radial(Strategy):
    """Keeps the tokens nearest to the centre of the image, in the p-norm: a diamond, a disc or a square.

    The fixed pattern of Haurum et al. (2023), which measures the effect of a centre prior alone. Here tokens are
    removed, while the paper masks them; and the budget sets the token count, while the paper keeps the tokens within a
    radius. Of equally distant tokens the first in the order of the patches stay. The strategy acts at the same site as
    `attn_topk`. A fused token has no position and counts as the farthest. It cannot act without a grid (theory tasks),
    and does not support the disposal "squeeze", after which no token has a position.
    """

    name: ClassVar[str] = "radial"
    kind: ClassVar[Kind] = "baseline"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset()
    citation: ClassVar[str] = "Haurum et al., Which tokens to use?, ICCV Workshops 2023"
    bibtex: ClassVar[str] = """@inproceedings{haurum2023tokens,
  title = {Which Tokens to Use? Investigating Token Reduction in Vision Transformers},
  author = {Haurum, Joakim Bruslund and Escalera, Sergio and Taylor, Graham W. and Moeslund, Thomas B.},
  booktitle = {IEEE/CVF International Conference on Computer Vision Workshops},
  year = {2023}
}"""
    differs: ClassVar[str] = "tokens are removed, while the published baseline masks them"
    disposals: ClassVar[tuple[Disposal, ...]] = ("drop", "fuse", "merge")

    p: Literal[1, 2, "inf"] = 2

    def scores(self, view: TokenView) -> "Tensor":
        """Return the negative distance from the centre, in patches."""
        if view.grid is None:
            raise UnsupportedError("radial: tokens without a grid have no distance from its centre")
        rows, columns = view.grid
        y = (view.index // columns - (rows - 1) / 2).abs()
        x = (view.index % columns - (columns - 1) / 2).abs()
        distance = {1: x + y, 2: (x * x + y * y).sqrt(), "inf": x.maximum(y)}[self.p]
        return -distance.masked_fill(view.index < 0, rows + columns)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Radial]
