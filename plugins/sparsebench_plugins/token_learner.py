"""A small network computes fewer tokens from many."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Mix, Place, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch.nn import Module


class TokenLearner(Strategy):
    """Computes K tokens from N, each a sum of all tokens with weights from a network (Ryoo et al., version 1.1).

    With X (N, C), the weights (N, K) are the softmax over tokens of MLP(LN(X)), whose hidden layer has `hidden` neurons
    with GELU. The K new tokens are the product of the weights and X; they have no positions. The MLP is trained with
    the network. K is the token count of the budget. The paper reduces tokens once, after half of the blocks; here they
    are reduced at each stage, or in `blocks`. All products are counted in the MACs.
    """

    name: ClassVar[str] = "token_learner"
    site: ClassVar[Site] = "block"
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Ryoo et al., TokenLearner: adaptive space-time tokenization for videos, NeurIPS 2021"
    bibtex: ClassVar[str] = """@inproceedings{ryoo2021tokenlearner,
  title = {{TokenLearner}: Adaptive Space-Time Tokenization for Videos},
  author = {Ryoo, Michael S. and Piergiovanni, AJ and Arnab, Anurag and Dehghani, Mostafa and Angelova, Anelia},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2021}
}"""
    differs: ClassVar[str] = "reduces tokens at each stage, while the paper does so once, in the middle: blocks=6 of 12"

    hidden: int = Field(64, gt=0, description="neurons of the hidden layer")

    def module(self, place: Place) -> "Module":
        """Return the norm and the layers."""
        from torch import nn

        layers = nn.Linear(place.width, self.hidden), nn.GELU(), nn.Linear(self.hidden, int(place.keep))
        return nn.Sequential(nn.LayerNorm(place.width), *layers)

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the layers and of the sums."""
        return place.tokens * (place.width * self.hidden + self.hidden * place.keep + place.keep * place.width)

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Sum the tokens with the learned weights."""
        return Mix(view.learned(view.tokens).softmax(dim=1).mT)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [TokenLearner]
