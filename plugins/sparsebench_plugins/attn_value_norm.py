"""The tokens that contribute most to the class token stay: attention times norm of the value."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AttnValueNorm(Strategy):
    """Keeps the tokens with the largest S_j = a_j ||v_j|| / sum_i a_i ||v_i||, the score of ATS.

    Fayyaz et al. (2022): a_j is the class token's attention, mean over heads, and v_j the value, all heads
    concatenated. ATS samples tokens by S, so its token counts differ between images; here the K tokens with the largest
    S stay in each image. Without a class token the received attention is used.
    """

    name: ClassVar[str] = "attn_value_norm"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "values"})
    citation: ClassVar[str] = "Fayyaz et al., Adaptive token sampling (ATS), ECCV 2022"
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = "the tokens with the largest scores stay, while ATS samples tokens by them: see ats"

    def scores(self, view: TokenView) -> "Tensor":
        """Return each token's share of the attention times the norm of its value."""
        contribution = view.attention * view.values.square().sum(dim=(1, 3)).sqrt()
        return contribution / contribution.sum(dim=1, keepdim=True).clamp(min=1e-30)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [AttnValueNorm]
