"""The tokens with the longest values stay."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ValueNorm(Strategy):
    """Keeps the tokens with the longest value vectors ||v_j||_2, all heads concatenated.

    The part of the score of ATS (Fayyaz et al. 2022) that needs no attention map. Which end is kept is a parameter, as
    some networks gather tokens of great length that say nothing of their place (Darcet et al. 2024).
    """

    name: ClassVar[str] = "value_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    citation: ClassVar[str] = "Fayyaz et al., Adaptive token sampling (ATS), ECCV 2022"
    differs: ClassVar[str] = "only a part of a published score: that of ATS without its attention"

    keep: Literal["largest", "smallest"] = "largest"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm, with its sign turned where the smallest stay."""
        norm = view.values.square().sum(dim=(1, 3)).sqrt()
        return norm if self.keep == "largest" else -norm


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ValueNorm]
