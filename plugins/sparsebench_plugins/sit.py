"""Learned weights distribute each token over fewer tokens."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Mix, Place, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch.nn import Module


class SiT(Strategy):
    """Computes K tokens from N with weights from a small network (Zong et al., token slimming).

    W (N, K) = softmax over the tokens of s MLP(X), and W^T X goes on. The MLP is LN, C to C / 2, GELU, C / 2 to K, and
    s a learned number that begins as 1; both are trained with the network. K is the number that the budget gives, and
    what comes out stands for no place. Before the block; class and register tokens pass by. All products are among the
    MACs. The paper's distillation, for which tokens are made of the few again, is left out.
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
    differs: ClassVar[str] = "without the distillation for which tokens are made of the few again"

    def module(self, place: Place) -> "Module":
        """Return the MLP, which holds s too."""
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
        """Sum the tokens."""
        weight = (view.learned.scale * view.learned(view.tokens)).softmax(dim=1)
        return Mix(weight.mT)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [SiT]
