"""The least attended tokens are dropped, and the next ones are merged into those that stay."""

from itertools import pairwise
from typing import ClassVar

from pydantic import Field, PositiveInt, field_validator

import sparsebench
from sparsebench import How, Merge, Place, Published, Schedule, Site, Strategy, TokenView, UserError


class DiffRate(Strategy):
    """Drops the least attended tokens, and merges the next ones into similar kept tokens (Chen et al., Section 3).

    Tokens are ranked by the class token's attention, mean over heads (received attention if there is no class token).
    The first m stay, where m is the token count of the budget. Of the other N - m tokens the share `merged` with the
    higher ranks is merged, each into the most similar (cosine) of the m tokens; the rest is dropped. The new token of a
    group is the plain mean of its members. The size of a merged token is multiplied by its cosine (at least 0) before
    it is added. Later attention weights tokens by their sizes, unless `proportional` is off. The strategy acts in every
    block.

    The published method searches how many tokens are dropped and merged in each block; `diffrate_search` does this. Its
    results can be set here: `counts` of the budget are the numbers of tokens that stay, and `undropped` the numbers of
    tokens between dropping and merging. Without `undropped`, the share `merged` applies in all blocks; its default, one
    half, is this project's choice.
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
        "a token that is merged with a negative cosine adds nothing to the size; without `undropped` the share of "
        "merged tokens is the same in all blocks"
    )
    schedule: ClassVar[Schedule] = "every"

    merged: float = Field(0.5, ge=0, le=1, description="share of the tokens not kept that are merged, not dropped")
    undropped: tuple[PositiveInt, ...] | None = Field(
        None, description="token counts in each block of the network after dropping and before merging"
    )
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    @field_validator("undropped")
    @classmethod
    def _check_undropped(cls, undropped: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if undropped is not None and any(a < b for a, b in pairwise(undropped)):
            raise ValueError("numbers must not increase")
        return undropped

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between merged tokens and kept tokens."""
        return self._merging(place.block, place.depth, place.tokens, place.keep) * place.keep * place.width

    def _merging(self, block: int, depth: int, tokens: float, keep: float) -> int:
        """Return the number of tokens that are merged in a block."""
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
    """Return the strategy class."""
    return [DiffRate]
