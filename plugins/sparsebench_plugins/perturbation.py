"""The tokens stay to which the network's output is most sensitive."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Kind, Place, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class Perturbation(Strategy):
    """Keeps the tokens to which the network's output is most sensitive, before the first block.

    s_j = E ||f(x + e_j) - f(x)||, where f are the logits with all tokens kept, and e_j is Gaussian noise on token j
    alone; the mean is over `draws` noises. No canonical paper, and not meant for practice: it shows what can be reached
    by querying the network about each token, without labels or masks. The standard deviation of the noise is `sigma`,
    in units of the root mean square of the sample's tokens.

    It costs one forward pass per token and draw, and one more. These MACs are counted: tens to hundreds of times those
    of the dense network. A budget of MACs therefore limits the network with the remaining tokens; the record has all
    MACs, and the board says that the two differ. It is meant for few images, in the test only (--where test).
    """

    name: ClassVar[str] = "perturbation"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "outputs"})
    draws_random: ClassVar[bool] = True
    expected_failures: ClassVar[Mapping[str, str]] = {
        "macs_fall_with_the_budget": "asking the network about each token costs more than the tokens do"
    }

    draws: int = Field(1, gt=0, description="number of noises for each token")
    sigma: float = Field(0.1, gt=0, description="standard deviation of the noise over the tokens' root mean square")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the forward passes."""
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
    """Return the strategy class."""
    return [Perturbation]
