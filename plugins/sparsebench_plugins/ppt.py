"""Unimportant tokens are dropped in images with a high variance of scores; in others similar tokens are merged."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Schedule, Site, Strategy, TokenView


class PPT(Strategy):
    """Drops or merges tokens, in each image and block by the variance of the scores (Wu et al., PPT).

    The score of token j is S_j = a_j ||v_j|| / sum_i a_i ||v_i||, with a_j the class token's attention, mean over heads
    (received attention if there is no class token), and v_j the value, all heads concatenated. If the variance of an
    image's scores is above `threshold` / P^2, with P the number of patches at the input, the tokens with the smallest
    scores are dropped. Otherwise pairs of tokens with similar keys are merged as in ToMe (Bolya et al. 2023). The token
    count is the same in both cases. Later attention weights tokens by their sizes, unless `proportional` is off.
    """

    name: ClassVar[str] = "ppt"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys", "values", "attention"})
    how: ClassVar[How] = "drop+merge"
    citation: ClassVar[str] = "Wu et al., PPT: token pruning and pooling for efficient vision transformers, 2023"
    bibtex: ClassVar[str] = """@article{wu2023ppt,
  title = {{PPT}: Token Pruning and Pooling for Efficient Vision Transformers},
  author = {Wu, Xinjian and Zeng, Fanhu and Wang, Xiudong and Chen, Xinghao},
  journal = {arXiv preprint arXiv:2310.01812},
  year = {2023}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "written from a description of the paper; chosen here are the threshold, which is the same for all networks in "
        "units of the squared mean score at the input, scores that sum to 1 as in ATS, the reduction in every block, "
        "and the attention by sizes"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    threshold: float = Field(1.0, ge=0, description="variance of the scores, times P^2, above which tokens are dropped")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B, which are computed for every image."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Drop the tokens with the lowest scores in some images, and merge the most similar pairs in the others."""
        import torch

        from sparsebench.strategy.selection import bipartite
        from sparsebench.strategy.sorting import ranks, sort

        contribution = view.attention * view.values.square().sum(dim=(1, 3)).sqrt()
        scores = contribution / contribution.sum(dim=1, keepdim=True).clamp(min=1e-30)
        patches = view.memory.setdefault("patches", scores.shape[1])
        drops = scores.var(dim=1, correction=0, keepdim=True) * patches**2 > self.threshold
        rank = ranks(sort(scores, descending=True).indices)
        stays = rank < keep
        pruned = torch.where(stays, stays.cumsum(dim=1) - 1, -1)
        merged, _ = bipartite(view.keys, keep, view.prefix_count)
        return Merge(torch.where(drops, pruned, merged), scores=scores)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PPT]
