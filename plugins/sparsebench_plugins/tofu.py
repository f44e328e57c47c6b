"""Similar tokens are dropped in the first blocks, and merged in the others, with the norm of the longest member."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Merge, Place, Plan, Published, Schedule, Site, Strategy, TokenView


class ToFu(Strategy):
    """Drops similar tokens in the least linear blocks, and merges them in more linear blocks (Kim et al.).

    The sets A and B, the r pairs and the order of the new tokens are those of `tome` (Bolya et al. 2023, Section 3). In
    the blocks before `merge_from` the tokens of A in the pairs are dropped. In later blocks each group becomes one
    token (MLERP): its plain mean, times the norm of its longest member, divided by a norm. As released this is the norm
    of the member in B; in the paper it is the norm of the mean, which is smaller than those of the members if these
    differ. The mean is not weighted by sizes; later attention is, with `proportional`.

    Tokens are dropped in the first round(`merge_from` depth) blocks, 7 of 12: the only known implementation merges from
    block 7, counted from 0. It is a re-implementation by the authors of PiToMe (Tran et al. 2024), and "released" means
    this implementation. The paper chooses the block by the linearity of the network. A network of one block drops.
    """

    name: ClassVar[str] = "tofu"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "drop+merge"
    citation: ClassVar[str] = "Kim et al., Token fusion: bridging the gap between token pruning and merging, WACV 2024"
    bibtex: ClassVar[str] = """@inproceedings{kim2024tofu,
  title = {Token Fusion: Bridging the Gap between Token Pruning and Token Merging},
  author = {Kim, Minchul and Gao, Shangqian and Hsu, Yen-Chang and Shen, Yilin and Jin, Hongxia},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("tofu:ratio=0.9", "DeiT-S"),)
    differs: ClassVar[str] = (
        "follows the only known implementation, by the authors of PiToMe; the paper divides a mean by its own norm "
        "(length=paper), and chooses the block from which tokens are merged by the linearity of the network"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    merge_from: float = Field(7 / 12, ge=0, le=1, description="share of the blocks in which tokens are dropped")
    length: Literal["released", "paper"] = Field(
        "released", description="the mean is divided by the norm of the member in B, or by its own norm"
    )
    proportional: bool = Field(False, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between A and B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Plan:
        """Drop or merge the tokens of A in the r most similar pairs."""
        import torch

        from sparsebench.strategy.selection import bipartite
        from sparsebench.strategy.sorting import sort
        from sparsebench.strategy.tokens import Grouped, apply

        target, leaves = bipartite(view.keys, keep, view.prefix_count)
        if view.block < round(self.merge_from * view.depth):
            return Keep(sort(target.masked_fill(leaves, target.shape[1])).indices[:, :keep], ordered=True)
        lengths = view.tokens.norm(dim=2)
        zeros = torch.zeros_like(lengths[:, :keep])
        longest = zeros.scatter_reduce(1, target, lengths, "amax")
        if self.length == "paper":
            plain = Merge(target, weight=torch.ones_like(lengths))
            divisor = apply(Grouped.of(plain, keep), view.tokens, view.sizes).norm(dim=2)  # the norm of the sum
        else:
            members = zeros.scatter_add(1, target, torch.ones_like(lengths))
            divisor = members * zeros.scatter_add(1, target, lengths.masked_fill(leaves, 0.0))
        return Merge(target, weight=(longest / divisor.clamp(min=1e-12)).gather(1, target))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ToFu]
