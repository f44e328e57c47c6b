"""The most attended tokens stay, and each other token is added to the most similar of them."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Convention, Disposal, Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class TPS(Strategy):
    """Keeps the tokens with the largest class attention, and adds each other token to its most similar kept token.

    This is eTPS of Wei et al. (2023), Section 3. The scores are those of EViT, between attention and MLP. A pruned
    token q is added to the kept token h with the largest cosine, and h becomes (e h + sum e^cos(h, q) q) /
    (e + sum e^cos(h, q)). This is the disposal "squeeze", which can be used with any scores. The publication has two
    combinations: this one, and dTPS with DynamicViT's learned predictor, `dynamic_vit:disposal=squeeze`. The released
    networks are dTPS. Without a class token the received attention is used. On the theory model, which only removes
    tokens, only disposal=drop is possible.
    """

    name: ClassVar[str] = "tps"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    convention: ClassVar[Convention] = "compound-ceil"
    citation: ClassVar[str] = "Wei et al., Joint token pruning and squeezing (TPS), CVPR 2023"
    bibtex: ClassVar[str] = """@inproceedings{wei2023tps,
  title = {Joint Token Pruning and Squeezing Towards More Aggressive Compression of Vision Transformers},
  author = {Wei, Siyuan and Ye, Tianzhu and Zhang, Shen and Tang, Yao and Liang, Jiajun},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("tps:keep_rate=0.7,convention=compound-ceil", "DeiT-S", 3.0),
    )
    differs: ClassVar[str] = (
        "in training the token counts are constant, while EViT's keep rate falls; this is eTPS, while the released "
        "network is dTPS, a learned predictor with squeeze: dynamic_vit:disposal=squeeze"
    )

    disposal: Disposal = "squeeze"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the attention."""
        return view.attention


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [TPS]
