"""Tokens are assigned to learned centres by optimal transport."""

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Mix, Place, Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class Sinkhorn(Strategy):
    """Computes K tokens from N by a transport plan to K learned centres (Haurum et al., Sinkhorn baseline).

    Tokens and centres are normalised to norm 1, and S are their cosines. The transport plan T (N, K) =
    exp(S / epsilon + u + v) is computed by Sinkhorn iterations on logarithms (Cuturi, 2013), in float32. The marginals
    are 1 / (K + N) for each centre, which is updated first, and for each token. The two sets of marginals have
    different sums: after the last iteration only those of the tokens hold, and in (K + N) T each token sums to 1 over
    the centres. The new tokens are (K + N) T^T x of the normalised tokens x, so that norms are lost. The initial
    centres are standard normal numbers; they are trained with the network.

    K is the token count of the budget, and the new tokens have no positions. The cosines and the sums are counted in
    the MACs; the iterations only add.
    """

    name: ClassVar[str] = "sinkhorn"
    site: ClassVar[Site] = "block"
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Haurum et al., Which tokens to use? Token reduction in ViTs, ICCV Workshops 2023"
    bibtex: ClassVar[str] = """@inproceedings{haurum2023which,
  title = {Which Tokens to Use? {Investigating} Token Reduction in Vision Transformers},
  author = {Haurum, Joakim Bruslund and Escalera, Sergio and Taylor, Graham W. and Moeslund, Thomas B.},
  booktitle = {IEEE/CVF International Conference on Computer Vision Workshops},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("sinkhorn:keep_rate=0.7", "DeiT-S"),)

    epsilon: float = Field(1.0, gt=0, description="regularisation, which divides the cosines")
    iterations: int = Field(3, ge=1, description="number of Sinkhorn iterations")

    def module(self, place: Place) -> "Module":
        """Return the centres as the rows of a linear layer."""
        from torch import nn

        centres = nn.Linear(place.width, int(place.keep), bias=False)
        nn.init.normal_(centres.weight)
        return centres

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the cosines and of the sums."""
        return 2 * place.tokens * place.keep * place.width

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Sum the normalised tokens with the transport plan."""
        import torch.nn.functional as F

        x, centres = F.normalize(view.tokens, dim=2), F.normalize(view.learned.weight, dim=1)
        return Mix(self._transport((x @ centres.mT).float()).mT, values=x)

    def _transport(self, cosines: "Tensor") -> "Tensor":
        """Return (K + N) T for (B, N, K) cosines."""
        S = cosines / self.epsilon
        log_marginal = -math.log(S.shape[1] + S.shape[2])
        u = S.new_zeros(S.shape[0], S.shape[1], 1)
        for _ in range(self.iterations):
            v = log_marginal - (S + u).logsumexp(dim=1, keepdim=True)
            u = log_marginal - (S + v).logsumexp(dim=2, keepdim=True)
        return (S + u + v - log_marginal).exp()


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Sinkhorn]
