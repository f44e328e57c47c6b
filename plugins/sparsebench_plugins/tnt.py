"""Noise in training teaches which tokens are relevant: less relevant tokens get more noise."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Keep, Place, Published, Shift, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class TNT(Strategy):
    """Keeps the tokens with the largest relevance, learned with noise, but not the most similar ones.

    Rao et al. (2024): the relevance is alpha = softmax_j(g(LN(x_j))) over the patch tokens before a block, where g is a
    linear layer with one output. In training all tokens stay. Noise is used before blocks 1 to 5 of 12, counted from 0
    (in other depths before 5/12 of the blocks, rounded, from block 1). There all tokens, including class and register
    tokens, are normalised, x <- LN(x), and patch tokens get the noise s (1 - alpha_j) e with s = 0.02 and e ~ N(0, I).
    To reduce the loss, tokens that noise would harm get a high relevance; g learns from nothing else. In the test no
    token is normalised. In the blocks of the budget, the K + b tokens with the largest alpha, by the g of that block,
    are split into two random halves. The b tokens of the first half with the largest cosine to any token of the second
    half are removed, and K tokens remain.

    b is the share `redundant` of the N present tokens, and at most N - K and K. The published b is 25 or 40 of 196, and
    tokens are removed after block 2, or after 2, 3 and 4, of 12: `blocks=3`, or `blocks=3+4+5`. If the budget has
    blocks without published noise, as its default has, noise and norm are also used there, because otherwise their g
    would learn nothing. It cannot act on the theory models.
    """

    name: ClassVar[str] = "tnt"
    site: ClassVar[Site] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "prefix"})
    draws_random: ClassVar[bool] = True
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Rao et al., Training noise token pruning (TNT), arXiv:2411.18092, 2024"
    bibtex: ClassVar[str] = """@article{rao2024tnt,
  title = {Training Noise Token Pruning},
  author = {Rao, Mingxing and Jiang, Bohan and Moyer, Daniel},
  journal = {arXiv preprint arXiv:2411.18092},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("tnt:counts=118,blocks=3", "DeiT-S", 3.2),)
    differs: ClassVar[str] = (
        "if the budget has blocks without published noise, as its default has, noise and norm are also used there; the "
        "redundant tokens are a share of the present tokens, while the paper has a number"
    )

    noise: float = Field(0.02, ge=0, description="standard deviation of the noise on a token without relevance")
    redundant: float = Field(25 / 196, ge=0, le=1, description="share of the tokens that are removed as similar")

    def module(self, place: Place) -> "Module":
        """Return the norm and g; g has no bias, because it would not change the softmax."""
        from torch import nn

        return nn.Sequential(nn.LayerNorm(place.width), nn.Linear(place.width, 1, bias=False))

    def training_blocks(self, depth: int) -> tuple[int, ...]:
        """Return the blocks with published noise."""
        return tuple(range(1, round(depth * 5 / 12) + 1))

    def own_macs(self, place: Place) -> float:
        """Return the MACs of g and of the similarities."""
        chosen = place.keep + self._spare(place.tokens, place.keep)
        first = chosen // 2
        return place.width * (place.tokens + (first * (chosen - first) if chosen > place.keep else 0))

    def _spare(self, tokens: float, keep: float) -> int:
        """Return b, the number of redundant tokens."""
        return int(min(round(self.redundant * tokens), tokens - keep, keep))

    def plan(self, view: TokenView, keep: int) -> Keep | Shift:
        """Keep the most relevant tokens except redundant ones; in training normalise all tokens and add noise."""
        import torch

        x = view.tokens
        norm, g = view.learned
        normed = norm(x)
        alpha = g(normed).squeeze(2).softmax(dim=1)
        if view.training:
            u = view.random(width=x.shape[2]).clamp(2**-25, 1 - 2**-24)
            e = torch.special.ndtri(u).to(x.dtype)
            by = normed - x + self.noise * (1 - alpha[:, :, None]) * e
            return Shift(by, scores=alpha.detach(), prefix=norm(view.prefix) - view.prefix)
        b = self._spare(x.shape[1], keep)
        index = Keep.top(alpha, keep + b).index
        if b:
            index = self._without_redundant(x, index, view.random().gather(1, index), b)
        return Keep(index, scores=alpha)

    def _without_redundant(self, x: "Tensor", index: "Tensor", drawn: "Tensor", b: int) -> "Tensor":
        """Return (B, K) of the (B, K + b) tokens; the halves have the smaller and the larger drawn numbers."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        index = index.gather(1, sort(drawn).indices)
        chosen = F.normalize(x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2])), dim=2)
        first = index.shape[1] // 2
        nearest = (chosen[:, :first] @ chosen[:, first:].mT).amax(dim=2)
        stay = sort(nearest, descending=True).indices[:, b:]
        return torch.cat([index.gather(1, stay), index[:, first:]], dim=1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [TNT]
