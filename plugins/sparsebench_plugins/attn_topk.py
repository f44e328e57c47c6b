"""The most attended tokens stay."""

from typing import TYPE_CHECKING, ClassVar, Literal

import sparsebench
from sparsebench import Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AttnTopK(Strategy):
    """Keeps the tokens with the largest attention in the current block, and drops the others.

    The score is the class token's attention, mean over heads: EViT (Liang et al. 2022) without its fused token. Without
    a class token it is the received attention, mean over heads and queries; the record says which is used. "mean_query"
    uses the mean of the patches' queries instead of the class token's query, and needs no class token.
    """

    name: ClassVar[str] = "attn_topk"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    citation: ClassVar[str] = "Liang et al., Not all patches are what you need (EViT), ICLR 2022"
    bibtex: ClassVar[str] = """@inproceedings{liang2022evit,
  title = {Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations},
  author = {Liang, Youwei and Ge, Chongjian and Tong, Zhan and Song, Yibing and Wang, Jue and Xie, Pengtao},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("attn_topk:keep_rate=0.7,convention=compound-ceil", "DeiT-S", 3.0),
        Published("attn_topk:keep_rate=0.9,convention=compound-ceil", "DeiT-S", 4.0),
        Published("attn_topk:keep_rate=0.5,convention=compound-ceil", "DeiT-S", 2.3),
    )
    differs: ClassVar[str] = (
        "in training the token counts are constant, while EViT's keep rate falls; with disposal=fuse it is not EViT, "
        "whose fused token is weighted by attention"
    )

    attention: Literal["auto", "class", "received", "mean_query"] = "auto"

    def requires(self) -> frozenset[str]:
        """Return the field of the attention that is used."""
        return frozenset({"attention" if self.attention == "auto" else f"{self.attention}_attention"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the attention."""
        (field,) = self.requires()
        return getattr(view, field)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [AttnTopK]
