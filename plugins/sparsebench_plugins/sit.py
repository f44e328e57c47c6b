"""New tokens are sums of all tokens with learned weights."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Mix, Place, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch.nn import Module


class SiT(Strategy):
    """Computes K tokens from N with weights from a small network (Zong et al., token slimming).

    W (N, K) is the softmax over tokens of s MLP(X), and the new tokens are W^T X. The MLP is LN, C to C / 2, GELU,
    C / 2 to K. s is a learned number with the initial value 1; it is trained with the MLP and the network. K is the
    token count of the budget, and the new tokens have no positions. All products are counted in the MACs. The paper's
    distillation, which reconstructs all tokens from the new ones, is left out.
    """

    name: ClassVar[str] = "sit"
    site: ClassVar[Site] = "block"
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Zong et al., Self-slimmed vision transformer, ECCV 2022"
    bibtex: ClassVar[str] = """@inproceedings{zong2022sit,
  title = {Self-Slimmed Vision Transformer},
  author = {Zong, Zhuofan and Li, Kunchang and Song, Guanglu and Wang, Yali and Qiao, Yu and Leng, Biao and Liu, Yu},
  booktitle = {European Conference on Computer Vision},
  year = {2022}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = "without the distillation that reconstructs all tokens from the new ones"

    def module(self, place: Place) -> "Module":
        """Return the MLP, with s as its parameter `scale`."""
        import torch
        from torch import nn

        C, half = place.width, place.width // 2
        mlp = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, half), nn.GELU(), nn.Linear(half, int(place.keep)))
        mlp.register_parameter("scale", nn.Parameter(torch.ones(())))
        return mlp

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the MLP and of the sums."""
        C, half = place.width, place.width // 2
        return place.tokens * (C * half + half * place.keep + place.keep * C)

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Sum the tokens with the learned weights."""
        weight = (view.learned.scale * view.learned(view.tokens)).softmax(dim=1)
        return Mix(weight.mT)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [SiT]
