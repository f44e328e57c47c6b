"""Similar tokens are merged, some in every block."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView


class ToMe(Strategy):
    """Merges the tokens with the most similar keys, by bipartite soft matching (Bolya et al., Section 3).

    In the whole sequence, with class and register tokens first, A is the set of tokens at even positions and B the set
    of tokens at odd positions. Each patch of A is paired with the patch of B whose key is most similar (cosine, mean
    over heads). The r most similar pairs are merged into their size-weighted means, where r is the number of tokens to
    remove. Class and register tokens are never merged. The other tokens of A come first, in their order, then B, so
    that the next block forms new sets. If there are no class and register tokens, those of A are ordered by similarity,
    most similar first. As published, the strategy acts in every block, and removes at most half of the tokens; the
    budget `per_block` sets r. Later attention weights tokens by their sizes, unless `proportional` is off.

    The method was published with a class token, also with a distillation token, and with neither. The rule with
    registers is the same.
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

    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r most similar pairs."""
        from sparsebench.strategy.selection import bipartite

        return Merge(bipartite(view.keys, keep, view.prefix_count)[0])


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ToMe]
