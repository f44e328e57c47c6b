"""The tokens that change most by the MLP stay."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class RepShift(Strategy):
    """Keeps the tokens that the MLP of a block changes most, their Representation Shift; the others leave after it.

    Choi et al. (2025), section 3.3: the shift of a token x' is the distance D(MLP(LN(x')), x'), with D the L2 distance:
    ||MLP(LN(x')) - x'||, the output of the MLP's branch minus its input. No attention is read. Section 3.1 calls it the
    change "before and after the layer", which can be read as the norm of what the branch adds, ||MLP(LN(x'))||:
    change=added. The default is the equation, as the only formula that the paper states for its experiments; this was
    decided before either was measured. With change=attention the distance is the norm of what the attention adds, and
    tokens leave before the MLP; this was revision 1.

    The paper removes 20 % of the tokens in blocks 1, 4 and 7. Its GMACs are those of blocks counted from 1. The theory
    model has no MLP, so the strategy cannot act on it.
    """

    name: ClassVar[str] = "rep_shift"
    revision: ClassVar[int] = 2
    site: ClassVar[Site] = "mlp"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "branch"})
    added: ClassVar[frozenset[str]] = frozenset({"change"})
    citation: ClassVar[str] = "Choi et al., Representation shift, ICCV 2025"
    published: ClassVar[tuple[Published, ...]] = (Published("rep_shift:keep_rate=0.8,blocks=0+3+6", "DeiT-S", 3.0),)
    differs: ClassVar[str] = "not compared with the authors' code, which could not be had; the paper has two readings"

    change: Literal["mlp", "added", "attention"] = Field(
        "mlp", description="||MLP(LN(x)) - x||; what the MLP adds; or what the attention adds, before the MLP"
    )

    def at_site(self) -> Site:
        """Return the site "mlp", or with change=attention "attention"."""
        return "attention" if self.change == "attention" else "mlp"

    def requires(self) -> frozenset[str]:
        """Return the fields that the change needs."""
        return self.needs if self.change == "mlp" else frozenset({"branch"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the size of the change."""
        if self.change != "mlp":
            return view.branch.norm(dim=2)
        before = view.tokens - view.branch
        return (view.branch - before).norm(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [RepShift]
