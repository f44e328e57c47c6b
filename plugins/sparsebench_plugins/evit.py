"""The most attended tokens stay, and the others are fused into one token."""

import math
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Convention, How, Keep, Published, Site, Strategy, TokenView


class EViT(Strategy):
    """Keeps the tokens with the largest class attention and fuses the others, weighted by their attention.

    Liang et al. (2022): between attention and MLP, a_i is the attention from the class token to token i, mean over
    heads. The K - 1 tokens with the largest a_i stay, and the others become sum a_i x_i, the last of the K tokens. The
    next stage treats that token like any other. The paper describes an average, but its results were computed with the
    a_i themselves, so that the norm of the fused token shows how much attention it represents. Here `renormalise`
    chooses. If only one token would be fused, it is multiplied by its attention, and the token count does not change.

    In training all tokens stay in the first share `warmup`. In the next share `shrink` the keep rate falls to that of
    the budget along half a cosine. The defaults are 10 and 100 of 300 epochs, as published for training from scratch.
    Without a class token the received attention is used. It cannot act on the theory model, which only removes tokens.
    """

    name: ClassVar[str] = "evit"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "tokens"})
    fuses: ClassVar[bool] = True
    convention: ClassVar[Convention] = "compound-ceil"
    published: ClassVar[tuple[Published, ...]] = (
        Published("evit:keep_rate=0.7,convention=compound-ceil", "DeiT-S", 3.0),
        Published("evit:keep_rate=0.9,convention=compound-ceil", "DeiT-S", 4.0),
        Published("evit:keep_rate=0.5,convention=compound-ceil", "DeiT-S", 2.3),
    )
    how: ClassVar[How] = "fuse"
    citation: ClassVar[str] = "Liang et al., Not all patches are what you need (EViT), ICLR 2022"
    bibtex: ClassVar[str] = """@inproceedings{liang2022evit,
  title = {Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations},
  author = {Liang, Youwei and Ge, Chongjian and Tong, Zhan and Song, Yibing and Wang, Jue and Xie, Pengtao},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}"""

    renormalise: bool = Field(False, description="divide the weights of the fused tokens by their sum")
    warmup: float = Field(10 / 300, ge=0, le=1, description="share of the training in which all tokens stay")
    shrink: float = Field(100 / 300, ge=0, le=1, description="next share of the training, in which the keep rate falls")

    def ramp(self, done: float) -> float:
        """Return how far the keep rate has fallen to the budget's, from 0 to 1."""
        if done < self.warmup:
            return 0.0
        if done >= self.warmup + self.shrink:
            return 1.0
        return 0.5 * (1 - math.cos(math.pi * (done - self.warmup) / self.shrink))

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep `keep` - 1 tokens; the others become the last token."""
        scores = weights = view.attention
        index = Keep.top(scores, keep - 1).index
        if self.renormalise:
            left = scores.scatter(1, index, 0.0)
            weights = left / left.sum(dim=1, keepdim=True).clamp(min=1e-30)
        return Keep(index, weights, scores)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [EViT]
