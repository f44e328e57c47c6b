"""The most attended tokens stay, and each of the others is added to the most similar of them."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Convention, Disposal, Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class TPS(Strategy):
    """Keeps the tokens with the largest class attention, and adds each other token to its most similar kept token.

    This is eTPS of Wei et al. (2023), Section 3: the scores are EViT's, between attention and MLP; a pruned token q
    goes to the kept token h of the largest cosine, and h becomes (e h + sum e^cos(h, q) q) / (e + sum e^cos(h, q)).
    That is the disposal "squeeze", which any score can have; this is one of its published pairings. The other is dTPS,
    with DynamicViT's learned predictor, which the released networks are: `dynamic_vit:disposal=squeeze`. Without a
    class token the attention received takes its place. On the theory model, which only removes tokens, only
    disposal=drop can act.
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
        "as many tokens leave from the first step of a training on, where EViT's keep rate falls; this is eTPS, the "
        "released network is dTPS, a learned predictor and then squeeze: dynamic_vit:disposal=squeeze"
    )

    disposal: Disposal = "squeeze"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the attention."""
        return view.attention


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [TPS]
