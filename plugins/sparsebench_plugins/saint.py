"""Tokens that resemble many others are dropped in the first blocks; token counts differ between images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Mask, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class SAINT(Strategy):
    """Drops the tokens whose keys are close to those of many others, in the first half of the blocks.

    Jeddi et al. (2025): the patches, in their current order, are split into E, those at even positions, and O, those at
    odd positions. s_ij is the cosine of the keys (mean over heads) of token i in E and token j in O. A hit is
    s_ij >= threshold, and c_i is the number of hits of token i. r is the number of tokens of E with K hits or more. The
    score of token i is c_i exp(closeness (mean of its hits - threshold)), or the mean of its s_ij if it has no hit. The
    r tokens of E with the largest scores leave; this ranks all of E, so one with fewer than K very close hits can leave
    before one with K. The rest of E, by falling score, comes before O in the order that the next block splits. With
    r = 0 nothing changes.

    With a budget, an image with more tokens than the budget's count also loses the next tokens of E. Without a budget
    the threshold alone decides. Blocks from the share `until` of the depth on drop nothing.
    """

    name: ClassVar[str] = "saint"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    how: ClassVar[How] = "drop"
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5
    adaptive: ClassVar[bool] = True
    citation: ClassVar[str] = "Jeddi et al., Similarity-aware token pruning (SAINT), arXiv 2503.11549, 2025"
    bibtex: ClassVar[str] = """@article{jeddi2025saint,
  title = {Similarity-Aware Token Pruning: Your {VLM} but Faster},
  author = {Jeddi, Ahmadreza and Baghbanzadeh, Negin and Dolatabadi, Elham and Taati, Babak},
  journal = {arXiv preprint arXiv:2503.11549},
  year = {2025}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("saint:threshold=0.75", "ViT-H/14"),)
    differs: ClassVar[str] = (
        "r is counted for each image alone, while the released code uses the mean of r over the batch; with a budget, "
        "images above its token count lose more tokens"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "tokens at even places are compared with those at odd places"
    }

    threshold: float = Field(0.75, ge=-1, le=1, description="smallest cosine of a hit")
    K: int = Field(5, ge=1, description="hits that make a token count among those that leave")
    closeness: float = Field(10.0, ge=0, description="gamma, the weight of the mean of the hits in the score")
    until: float = Field(0.5, gt=0, le=1, description="share of the blocks in which tokens leave, from the first on")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between E and O."""
        if place.block >= self.until * place.depth:
            return 0.0
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Mask | None:
        """Drop the r tokens of E with the largest scores."""
        import torch

        from sparsebench.strategy.sorting import ranks, sort

        if view.block >= self.until * view.depth:
            return None
        rank, patch = _ranks_of_patches(view)
        there = view.there
        order = sort(rank.gather(1, patch).masked_fill(~there, rank.shape[1])).indices
        E, O = order[:, 0::2], order[:, 1::2]
        E_there, O_there = there.gather(1, E), there.gather(1, O)

        score, hits = self._scores(_cosines(view.keys, E, O), E_there[:, :, None] & O_there[:, None])
        falling = ranks(sort(score.masked_fill(~E_there, -torch.inf), descending=True).indices)
        over = (there.sum(dim=1) - keep).clamp(min=0)
        most = O_there.any(dim=1) * E_there.sum(dim=1)
        r = torch.minimum(torch.maximum((hits >= self.K).sum(dim=1), over), most)[:, None]

        # The order of the next block: E by falling score, then O. The r first tokens of E have left.
        places = torch.cat([falling, falling.new_tensor(range(E.shape[1], order.shape[1])).expand_as(O)], dim=1)
        changed = rank.scatter(1, patch.gather(1, torch.cat([E, O], dim=1)), places)
        view.memory["rank"] = torch.where(r > 0, changed, rank)
        return Mask(torch.ones_like(there).scatter(1, E, falling >= r))

    def _scores(self, s: "Tensor", pairs: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the (B, E) scores and numbers of hits, from the (B, E, O) cosines and which pairs exist."""
        hit = (s >= self.threshold) & pairs
        count = hit.sum(dim=2)
        mean_hit = s.where(hit, 0).sum(dim=2) / count.clamp(min=1)
        mean = s.where(pairs, 0).sum(dim=2) / pairs.sum(dim=2).clamp(min=1)
        close = count * (self.closeness * (mean_hit - self.threshold)).exp()
        return close.where(count > 0, mean), count


def _ranks_of_patches(view: TokenView) -> "tuple[Tensor, Tensor]":
    """Return the (B, patches + 1) ranks of all patches in the order of the method, and the (B, N) patch of each token.

    The last column of the ranks takes the padding, whose patch is -1 in the view.
    """
    import torch

    B, N = view.index.shape
    if "rank" not in view.memory:
        view.memory["rank"] = torch.arange(N + 1, device=view.index.device).expand(B, -1)
    rank = view.memory["rank"]
    return rank, view.index % rank.shape[1]


def _cosines(keys: "Tensor", E: "Tensor", O: "Tensor") -> "Tensor":
    """Return the (B, E, O) cosines of the keys, mean over heads."""
    import torch.nn.functional as F

    from sparsebench.strategy.tokens import gather

    unit = F.normalize(keys.mean(dim=1), dim=2)
    return gather(unit, E) @ gather(unit, O).mT


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [SAINT]
