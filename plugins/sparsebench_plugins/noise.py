"""The noisiest tokens go."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1 / (12 * 255**2)
"""Variance that rounding to 8 bits leaves."""


class Noise(Strategy):
    """Removes the tokens with the largest estimated noise, before the first block.

    With pixels: sigma = sqrt(pi / 2) mean |P * L| / 6 over a patch P and its channels, where L is the difference of
    two Laplacians [[1,-2,1],[-2,4,-2],[1,-2,1]] that answers to noise and hardly to edges (Immerkaer 1996); only
    where L fits inside the patch. By "ratio" it is sigma^2 over the mean over channels of the pixels' variance, the
    share of what is there that is noise; a patch that varies less than rounding to 8 bits counts as varying so much.
    Without pixels: | ||x|| - median ||x|| |, how far a token's norm is from the sample's median norm, since noise on a
    pattern changes its length; there is no ratio then.
    """

    name: ClassVar[str] = "noise"
    needs: ClassVar[frozenset[str]] = frozenset({"pixels", "tokens"})
    citation: ClassVar[str] = "Immerkaer, Fast noise variance estimation, CVIU 64(2), 1996"
    bibtex: ClassVar[str] = """@article{immerkaer1996noise,
  title = {Fast Noise Variance Estimation},
  author = {Immerk{\\ae}r, John},
  journal = {Computer Vision and Image Understanding},
  volume = {64},
  number = {2},
  pages = {300--302},
  year = {1996}
}"""
    differs: ClassVar[str] = "only the estimate of the noise is published; to remove tokens by it is this project's"

    by: Literal["sigma", "ratio"] = "sigma"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the noise estimate with its sign turned."""
        P = view.pixels
        if P is None and self.by == "sigma":
            norms = view.tokens.norm(dim=-1)
            return -(norms - norms.median(dim=1, keepdim=True).values).abs()
        if P is None or min(P.shape[3:]) < 3:
            raise UnsupportedError("noise: these tokens are not made of three pixels a side or more")
        second = P[..., :-2, :] - 2 * P[..., 1:-1, :] + P[..., 2:, :]
        response = second[..., :-2] - 2 * second[..., 1:-1] + second[..., 2:]
        sigma = ((3.141592653589793 / 2) ** 0.5 / 6) * response.abs().mean(dim=(2, 3, 4))
        if self.by == "sigma":
            return -sigma
        return -sigma.square() / P.var(dim=(3, 4), correction=0).mean(dim=2).clamp(min=ROUNDING)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Noise]
