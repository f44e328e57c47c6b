"""Similar tokens are merged, weighted by what the class token takes from them."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class ToMeCIS(Strategy):
    """Merges the pairs of ToMe, in means that are weighted by the class importance of each token.

    Seol, Roh and Chung (2023): the pairs are those of `tome`, the r most similar keys of tokens at even and at odd positions.
    The class importance of token j is w_j = a_j ||v_j||: its attention from the class token, mean over heads, and the
    norm of its value, mean over heads. The new token of a group is sum w x / sum w. The importance is computed anew in
    every block. Sizes add up; they act only in later attention, which weights tokens by them unless `proportional` is
    off. A class token is needed.
    """

    name: ClassVar[str] = "tome_cis"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys", "values", "class_attention"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Seol et al., Token merging with class importance score, IECON 2023"
    bibtex: ClassVar[str] = """@inproceedings{seol2023tomecis,
  title = {Token Merging with Class Importance Score},
  author = {Seol and Roh and Chung},
  booktitle = {Annual Conference of the IEEE Industrial Electronics Society},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("tome_cis:per_block=13", "DeiT-S", 2.7),
        Published("tome_cis:per_block=8", "DeiT-S", 3.4),
        Published("tome_cis:per_block=16", "DeiT-S", 2.3),
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r most similar pairs, weighted by class importance."""
        import torch

        from sparsebench.strategy.selection import bipartite
        from sparsebench.strategy.tokens import Grouped, sizes_after

        target, _ = bipartite(view.keys, keep, view.prefix_count)
        importance = view.class_attention * view.values.mean(dim=1).norm(dim=2)
        importance = importance.clamp(min=torch.finfo(importance.dtype).tiny)
        total = sizes_after(Grouped.of(Merge(target, sizes=importance), keep), view.sizes)
        return Merge(target, weight=importance / total.gather(1, target))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ToMeCIS]
