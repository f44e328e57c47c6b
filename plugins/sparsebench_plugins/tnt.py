"""Noise in training teaches which tokens matter: those that matter little get more of it."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Keep, Place, Published, Shift, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class TNT(Strategy):
    """Keeps the tokens with the largest relevance, learned with noise, but not the most similar ones.

    Rao et al. (2024): alpha = softmax_j(g(LN(x_j))) over the patch tokens before a block, g one linear layer to a
    number. In training all tokens stay. Before each of blocks 1 to 5 of 12, counted from 0 (in other depths from block
    1 on as many as 5/12 of the depth, rounded), all tokens are normed, x <- LN(x), class and register tokens too, and
    patch tokens get noise, s (1 - alpha_j) e with s = 0.02 and e ~ N(0, I): to lower the loss, relevance goes where
    noise does harm. That is the only thing that g learns from. In the test nothing is normed. In the budget's blocks
    the K + b tokens with the largest alpha, by the g of that block, are cut into two random halves, the b of the first
    that have the largest cosine with any of the second leave, and K go on.

    b is the share `redundant` of the N tokens that are there, and at most N - K and K. The published b is 25 or 40 of
    196, and tokens leave after block 2, or after 2, 3 and 4, of 12: `blocks=3`, or `blocks=3+4+5`. Where the budget has
    other blocks than those with noise, as its default has, noise and norm are there too, as g would learn nothing
    without. It cannot act on the theory models.
    """

    name: ClassVar[str] = "tnt"
    site: ClassVar[Site] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "prefix"})
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
        "where the budget names blocks without published noise, as its default does, noise and norm are in these too; "
        "the redundant are a share of the tokens that are there, where the paper has a number"
    )

    noise: float = Field(0.02, ge=0, description="standard deviation of the noise on a token without relevance")
    redundant: float = Field(25 / 196, ge=0, le=1, description="share of the tokens that leave for being like others")

    def module(self, place: Place) -> "Module":
        """Return the norm and g, without a bias: softmax is the same with any."""
        from torch import nn

        return nn.Sequential(nn.LayerNorm(place.width), nn.Linear(place.width, 1, bias=False))

    def training_blocks(self, depth: int) -> tuple[int, ...]:
        """Return those before which noise comes."""
        return tuple(range(1, round(depth * 5 / 12) + 1))

    def own_macs(self, place: Place) -> float:
        """Return the MACs of g and of the similarities."""
        chosen = place.keep + self._spare(place.tokens, place.keep)
        first = chosen // 2
        return place.width * (place.tokens + (first * (chosen - first) if chosen > place.keep else 0))

    def _spare(self, tokens: float, keep: float) -> int:
        """Return b."""
        return int(min(round(self.redundant * tokens), tokens - keep, keep))

    def plan(self, view: TokenView, keep: int) -> Keep | Shift:
        """Keep the most relevant, without the redundant; in training norm all tokens and add noise."""
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
        """Return (B, K) of the (B, K + b) tokens; the halves are those with the smaller and larger drawn numbers."""
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
    """Bring in the strategy."""
    return [TNT]
