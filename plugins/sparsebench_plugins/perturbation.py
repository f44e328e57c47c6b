"""The tokens stay to whose change the network's output is most sensitive."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Kind, Place, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class Perturbation(Strategy):
    """Keeps the tokens to which the network's output is most sensitive, before the first block.

    s_j = E ||f(x + e_j) - f(x)||, f the logits with all tokens kept, e_j Gaussian noise on token j alone; estimated
    from `draws` of it. No canonical paper, and no method to be used: it shows how far one can come by asking the
    network itself about each token, without labels or masks. The noise has the standard deviation `sigma`, in units of
    the root mean square of the sample's tokens.

    It costs a forward pass a token and draw, and one more, which is counted: tens to hundreds of times the dense
    network. So a fraction of MACs is what the network may spend on the tokens that stay, the record has all that was
    spent, and the board says that the two differ. It is meant for few images, in the test alone (--where test).
    """

    name: ClassVar[str] = "perturbation"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "outputs"})
    expected_failures: ClassVar[Mapping[str, str]] = {
        "macs_fall_with_the_budget": "asking the network about each token costs more than the tokens do"
    }

    draws: int = Field(1, gt=0, description="noises that are tried on each token")
    sigma: float = Field(0.1, gt=0, description="standard deviation of the noise over the tokens' root mean square")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the network's answers."""
        return (self.draws * place.tokens + 1) * place.outputs

    def scores(self, view: TokenView) -> "Tensor":
        """Return the mean change of the logits."""
        import torch

        x = view.tokens.detach()
        B, N, C = x.shape
        rows = torch.arange(B, device=x.device)
        scale = self.sigma * x.square().mean(dim=(1, 2), keepdim=True).sqrt()
        before, total = view.outputs(x, rows), x.new_zeros(B, N)
        for draw in range(self.draws):
            u, v = view.random(2 * draw, C), view.random(2 * draw + 1, C)
            noise = scale * (-2 * (1 - u).log()).sqrt() * (2 * torch.pi * v).cos()
            for j in range(N):
                changed = x.clone()
                changed[:, j] += noise[:, j]
                total[:, j] += (view.outputs(changed, rows) - before).norm(dim=1)
        return total / self.draws


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Perturbation]
