"""The most attended tokens stay, each averaged with the tokens most similar to it."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Mix, Place, Site, Strategy, TokenView


class PruMerge(Strategy):
    """Averages each of the most attended tokens with its most similar tokens (Shang et al., Algorithm 1).

    The centres are the tokens with the most attention a from the class token, mean over heads; without a class token
    the received attention is used. A centre becomes the mean, with weights a, of itself and of the k other tokens whose
    keys are most similar to its own (inner product, mean over heads). A token may belong to several centres or to none.
    The centres are in order of position. The paper has k = 32 of 576 tokens; here k is this share of the N tokens.
    """

    name: ClassVar[str] = "pru_merge"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys", "attention"})
    how: ClassVar[How] = "mix"
    citation: ClassVar[str] = "Shang et al., LLaVA-PruMerge: adaptive token reduction, ICCV 2025, arXiv 2403.15388"
    bibtex: ClassVar[str] = """@inproceedings{shang2025prumerge,
  title = {{LLaVA-PruMerge}: Adaptive Token Reduction for Efficient Large Multimodal Models},
  author = {Shang, Yuzhang and Cai, Mu and Xu, Bingxin and Lee, Yong Jae and Yan, Yan},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  year = {2025}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "acts within the network, while the paper acts once, before a language model; the budget sets the token count, "
        "while the paper keeps outliers of the attention; the weights of a mean sum to 1"
    )

    share: float = Field(1 / 18, gt=0, le=1, description="k, the number of similar tokens, as a share of N")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the products of keys, and of the means."""
        return place.tokens * place.keep * (place.head_width + place.width)

    def plan(self, view: TokenView, keep: int) -> Mix:
        """Merge the most similar tokens into each centre."""
        import torch

        from sparsebench.strategy.sorting import sort

        N = view.attention.shape[1]
        centres = sort(sort(view.attention, descending=True).indices[:, :keep]).values
        keys, rows = view.keys.mean(dim=1), torch.arange(len(centres), device=centres.device)[:, None]
        near = (keys[rows, centres] @ keys.mT).scatter(2, centres[..., None], torch.inf)  # itself first
        k = min(N, 1 + max(1, round(self.share * N)))
        order = sort(near, descending=True).indices[..., :k]
        weight = torch.zeros_like(near).scatter(2, order, view.attention[:, None].expand_as(near).gather(2, order))
        return Mix(weight / weight.sum(dim=2, keepdim=True).clamp(min=1e-30), scores=view.attention)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PruMerge]
