"""The tokens with the largest value norms stay."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ValueNorm(Strategy):
    """Keeps the tokens with the largest norm of the value ||v_j||_2, all heads concatenated.

    This is the part of the score of ATS (Fayyaz et al. 2022) that needs no attention map. The parameter `keep` selects
    the largest or the smallest norms, because some networks have tokens with a large norm that contain no information
    about their position (Darcet et al. 2024).
    """

    name: ClassVar[str] = "value_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    citation: ClassVar[str] = "Fayyaz et al., Adaptive token sampling (ATS), ECCV 2022"
    differs: ClassVar[str] = "only a part of a published score: that of ATS without its attention"

    keep: Literal["largest", "smallest"] = "largest"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm, negated if the smallest stay."""
        norm = view.values.square().sum(dim=(1, 3)).sqrt()
        return norm if self.keep == "largest" else -norm


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ValueNorm]
