"""The noisiest tokens are removed."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1 / (12 * 255**2)
"""Variance of the rounding error with 8 bits."""


class Noise(Strategy):
    """Removes the tokens with the largest estimated noise, before the first block.

    With pixels: sigma = sqrt(pi / 2) mean |P * L| / 6 over a patch P and its channels, only where L fits inside the
    patch. L is the difference of two Laplacians [[1,-2,1],[-2,4,-2],[1,-2,1]], which responds to noise and hardly to
    edges (Immerkaer 1996). With by=ratio the score is sigma^2 over the variance of the pixels, mean over channels: the
    share of the variance that is noise. A smaller variance than that of rounding to 8 bits is raised to it. Without
    pixels: | ||x|| - median ||x|| |, the distance of a token's norm from the median norm of the sample, because noise
    on a pattern changes its norm; by=ratio is not possible.
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
    differs: ClassVar[str] = "only the estimate of the noise is published, not the removal of tokens by it"

    by: Literal["sigma", "ratio"] = "sigma"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the negative noise estimate."""
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
    """Return the strategy class."""
    return [Noise]
