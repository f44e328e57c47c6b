"""The most attended tokens stay, and the others go on as one."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Keep, Site, Strategy, TokenView


class EViT(Strategy):
    """Keeps the tokens with the largest class attention and fuses the others, weighted by theirs.

    Liang et al. (2022): between attention and MLP, a_i the attention from the class token to token i, mean over heads;
    K - 1 tokens with the largest a_i stay and the others become sum a_i x_i, the last of the K. The next stage treats
    that token as any other. The paper writes an average; what its results were made with are the a_i as they are, so
    that the length of the fused token tells how much attention it stands for. Both are here. With a keep rate and the
    convention "compound-ceil" the counts are the published ones. Without a class token the attention received takes
    its place. It cannot act on the theory model, which only removes tokens.
    """

    name: ClassVar[str] = "evit"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "tokens"})
    fuses: ClassVar[bool] = True
    citation: ClassVar[str] = "Liang et al., Not all patches are what you need (EViT), ICLR 2022"
    bibtex: ClassVar[str] = """@inproceedings{liang2022evit,
  title = {Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations},
  author = {Liang, Youwei and Ge, Chongjian and Tong, Zhan and Song, Yibing and Wang, Jue and Xie, Pengtao},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}"""

    renormalise: bool = Field(False, description="divide the weights of what is fused by their sum")

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep one token fewer than go on; the rest is the last."""
        scores = weights = view.attention
        index = Keep.top(scores, keep - 1).index
        if self.renormalise:
            left = scores.scatter(1, index, 0.0)
            weights = left / left.sum(dim=1, keepdim=True).clamp(min=1e-30)
        return Keep(index, weights, scores)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [EViT]
