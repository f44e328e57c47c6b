"""Random tokens stay, inside the network: the control for methods that act there."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Kind, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class RandomInside(Strategy):
    """Keeps random tokens inside the network, with the site and token counts of `attn_topk`.

    At equal MACs it keeps more tokens in the first blocks than `random`, which removes them at the input.
    """

    name: ClassVar[str] = "random_inside"
    kind: ClassVar[Kind] = "baseline"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset()
    draws_random: ClassVar[bool] = True

    def scores(self, view: TokenView) -> "Tensor":
        """Return independent uniform scores."""
        return view.random()


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [RandomInside]
