"""The same positions are kept in every image: those to whose masks the loss on training images is most sensitive."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import FrozenNetwork, Images, Place, Shift, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

BATCH = 32


class FisherMask(Strategy):
    """Keeps the positions with the largest Fisher information on training images, the same positions in every image.

    Let m_i = 1 be a factor of the token at position i before the first block. The information is the mean over training
    images of (dL / dm_i)^2, where L is the loss of the image with its label. It is computed once, before the test.
    V-Pruner (Yao et al., AAAI 2026) begins with such an estimate; its search is left out here.
    """

    name: ClassVar[str] = "fisher_mask"
    site: ClassVar[Site] = "input"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    fit_labels: ClassVar[bool] = True
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "it ranks positions, and has seen images in their own order"
    }
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "only the first step of V-Pruner, written from its abstract: the diagonal of the Fisher information of a "
        "factor of each token before block 0 ranks the positions; the search over positions and blocks by "
        "reinforcement learning, and the tuning of the mask's values, are left out"
    )

    def module(self, place: Place) -> "Module":
        """Return the module that holds the information of each position."""
        import torch

        return torch.nn.ParameterDict({"information": torch.zeros(place.patches)})

    def fit(self, images: Images, network: FrozenNetwork) -> "Mapping[int, Mapping[str, Tensor]]":
        """Return the mean squared gradient of the loss with respect to the factor of each position."""
        import torch

        total: Tensor = torch.zeros((), dtype=torch.float64)
        for batch in images.split(BATCH):
            factors: list[Tensor] = []

            def look(view: TokenView, factors: "list[Tensor]" = factors) -> Shift:
                factors.append(torch.ones_like(view.tokens[:, :, :1]).requires_grad_())
                return Shift((factors[0] - 1) * view.tokens)

            loss = network.losses(network(batch, look), batch.labels).sum()
            (gradient,) = torch.autograd.grad(loss, factors)
            total = total.to(loss.device) + gradient[:, :, 0].double().square().sum(dim=0)
        return {0: {"information": total / len(images)}}

    def scores(self, view: TokenView) -> "Tensor":
        """Return the information of each token's position."""
        information: Tensor = view.learned["information"]
        return information.expand_as(view.sizes)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [FisherMask]
