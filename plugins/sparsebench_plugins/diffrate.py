"""The least attended tokens are dropped, the next ones merged into those that stay."""

from itertools import pairwise
from typing import ClassVar

from pydantic import Field, PositiveInt, field_validator

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView, UserError


class DiffRate(Strategy):
    """Drops the least attended tokens, and merges the next ones into similar kept tokens (Chen et al., Section 3).

    Tokens are ranked by the class token's attention, mean over heads (attention received, where there is no class
    token). The first m stay, m the number that the budget gives; of the N - m others the share `merged`, the higher
    ranks, is merged, each into the token of the first m with the largest cosine, and the rest is dropped. A group's
    token is the plain mean of its members; a merged token's size is multiplied by its cosine (at least 0) before it is
    added. Attention after it weighs tokens by their sizes, unless `proportional` is off. In every block.

    The published method searches how many are dropped and merged in each block, which `diffrate_search` does. What it
    found can be given: `counts` of the budget are the numbers that stay, and `undropped` those that are left between
    dropping and merging. Without these the share divides what leaves in all blocks; one half is this project's.
    """

    name: ClassVar[str] = "diffrate"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "attention"})
    how: ClassVar[How] = "drop+merge"
    citation: ClassVar[str] = "Chen et al., DiffRate: differentiable compression rate, ICCV 2023"
    bibtex: ClassVar[str] = """@inproceedings{chen2023diffrate,
  title = {{DiffRate}: Differentiable Compression Rate for Efficient Vision Transformers},
  author = {Chen, Mengzhao and Shao, Wenqi and Xu, Peng and Lin, Mingbao and Zhang, Kaipeng and Chao, Fei
    and Ji, Rongrong and Qiao, Yu and Luo, Ping},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  year = {2023}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published(
            "diffrate:counts=196+193+175+155+140+132+120+106+87+63+55+2,"
            "undropped=196+195+189+167+149+138+128+116+98+77+57+2",
            "DeiT-S",
            2.9,
        ),
    )
    differs: ClassVar[str] = (
        "a token that merges into one of a negative cosine adds nothing to its size; without `undropped` one share "
        "divides what leaves in all blocks"
    )
    schedule: ClassVar[Schedule] = "every"

    merged: float = Field(0.5, ge=0, le=1, description="share of the tokens not kept that is merged, not dropped")
    undropped: tuple[PositiveInt, ...] | None = Field(
        None, description="tokens left in each block of the network when some are dropped and none merged yet"
    )
    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    @field_validator("undropped")
    @classmethod
    def _check_undropped(cls, undropped: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if undropped is not None and any(a < b for a, b in pairwise(undropped)):
            raise ValueError("numbers must never be more than before")
        return undropped

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of those that merge to those that stay."""
        return self._merging(place.block, place.depth, place.tokens, place.keep) * place.keep * place.width

    def _merging(self, block: int, depth: int, tokens: float, keep: float) -> int:
        """Return how many tokens merge in a block."""
        if self.undropped is None:
            return round(self.merged * (tokens - keep))
        if len(self.undropped) != depth:
            raise UserError(
                "diffrate: tokens left when some are dropped (undropped)", got=f"{len(self.undropped)} of them",
                allowed=f"{depth}, one for each block of this model",
            )  # fmt: skip
        return int(max(0, min(tokens, self.undropped[block]) - keep))

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Drop the last ranks and merge the middle ones."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        ranked = sort(view.attention, descending=True).indices
        N = ranked.shape[1]
        stay = sort(ranked[:, :keep]).values
        goes = ranked[:, keep : keep + self._merging(view.block, view.depth, N, keep)]
        unit = F.normalize(view.tokens.detach(), dim=2)
        leaving, staying = (unit.gather(1, i[:, :, None].expand(-1, -1, unit.shape[2])) for i in (goes, stay))
        cosine, match = (leaving @ staying.mT).max(dim=2)
        target = torch.full_like(ranked, -1).scatter(1, goes, match)
        target = target.scatter(1, stay, torch.arange(keep, device=stay.device).expand_as(stay))
        ones = torch.ones_like(view.sizes)
        count = ones[:, :keep].scatter_add(1, match, ones[:, : goes.shape[1]]).gather(1, target.clamp(min=0))
        reduced = view.sizes.gather(1, goes) * cosine.clamp(min=0)
        sizes = view.sizes.scatter(1, goes, reduced.to(view.sizes.dtype))
        return Merge(target, scores=view.attention, weight=1 / count, sizes=sizes)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [DiffRate]
