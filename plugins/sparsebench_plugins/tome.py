"""Similar tokens are merged, a few in every block."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class ToMe(Strategy):
    """Merges the tokens with the most similar keys, by bipartite soft matching (Bolya et al., Section 3).

    Of the whole sequence, class and register tokens first, set A has the even places and B the odd. Each patch of A
    finds the patch of B with the most similar key (cosine of keys, mean over heads); the r pairs that are most alike
    are merged into their size-weighted mean, r the number that has to leave. Class and register tokens are never
    merged. The others of A go on in their order, then B, so that the next block deals them anew. Where there are no
    class and register tokens, the others of A go on most similar first. As published, in every block, at most half of
    the tokens; r tokens a block is the budget `per_block`. Attention after it weighs tokens by their sizes, unless
    `proportional` is off.

    Published with a class token, with a distillation token too, and with none; with registers the rule is the same.
    """

    name: ClassVar[str] = "tome"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Bolya et al., Token merging: your ViT but faster, ICLR 2023"
    bibtex: ClassVar[str] = """@inproceedings{bolya2023tome,
  title = {Token Merging: Your {ViT} But Faster},
  author = {Bolya, Daniel and Fu, Cheng-Yang and Dai, Xiaoliang and Zhang, Peizhao and Feichtenhofer, Christoph
    and Hoffman, Judy},
  booktitle = {International Conference on Learning Representations},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("tome:per_block=13", "DeiT-S", 2.7),
        Published("tome:per_block=26..0", "DeiT-S"),
        Published("tome:per_block=8", "DeiT-S", 3.4),
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r closest pairs."""
        from sparsebench.strategy.selection import bipartite

        return Merge(bipartite(view.keys, keep, view.prefix_count)[0])


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ToMe]
