"""Tokens with a low rank in the attention graph are removed, and before them some similar tokens."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

import sparsebench
from sparsebench import How, Keep, Place, Published, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class ZeroTPrune(Strategy):
    """Zero-TPrune (Wang et al. 2024): Weighted Page Rank of the tokens, then pruning by similarity, then by rank.

    I-stage: s <- A^T s is iterated in each head, from 1 / T, including the class token. The number of iterations is
    largest in the first quarter of the blocks, smaller in the middle, and 1 in the last quarter. Heads whose variance
    of s T is outside [low, high] are ignored; if no head is left, all are used. (s sums to 1, so its own variance is
    below 1 / T, and the bounds must refer to s T.) The s of the heads are combined by their root mean square.

    S-stage: in the order of s the tokens form two groups, alternating or as halves. In the less important group, the
    tokens whose most similar key (cosine, heads concatenated) in the other group is most similar are removed, up to the
    share `similar` of all tokens to remove. Then the tokens with the lowest s are removed. The paper sets the blocks
    and rates; here schedule and budget set them. `similar` and `groups` are this project's choice.
    """

    name: ClassVar[str] = "zero_tprune"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_maps", "keys"})
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Wang et al., Zero-TPrune, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{wang2024zerotprune,
  title = {{Zero-TPrune}: Zero-Shot Token Pruning through Leveraging of the Attention Graph in Pre-Trained Transformers}
   ,
  author = {Wang, Hongjie and Dedhia, Bhishma and Jha, Niraj K.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("zero_tprune:macs=0.653", "DeiT-S", 3.0),)
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "the blocks, the rates, the share of tokens removed as similar and the grouping are this project's choice; the "
        "bounds of a head's variance refer to s T"
    )

    iterations: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(
        (30, 5, 1), description="iterations in early, middle and late blocks"
    )
    low: float = Field(0.01, description="smallest variance of s T of a head that is used")
    high: float = Field(0.7, description="largest variance of s T of a head that is used")
    similar: float = Field(0.5, ge=0, le=1, description="share of similar tokens in the removed tokens")
    groups: Literal["alternate", "rank"] = "alternate"

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the products with A, and of the similarities between the groups."""
        ranks = self._rounds(place.block, place.depth) * (place.prefix + place.tokens) ** 2
        pairs = place.tokens // 2 * (place.tokens - place.tokens // 2)
        return place.heads * (ranks + pairs * place.head_width)

    def _rounds(self, block: int, depth: int) -> int:
        """Return the number of multiplications of s by A in this block."""
        return self.iterations[(block >= depth / 4) + (block >= 3 * depth / 4)]

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the highest ranks, without the most similar tokens."""
        s = self.rank(view)
        N = s.shape[1]
        order = Keep.top(s, N).index
        if self.groups == "alternate":
            first, second = order[:, ::2], order[:, 1::2]
        else:
            first, second = order.split([N - N // 2, N // 2], dim=1)

        # The S-stage: tokens of the second group leave whose keys are most similar to one of the first.
        keys = view.keys.transpose(1, 2).flatten(2)
        unit = keys / keys.norm(dim=2, keepdim=True).clamp(min=1e-12)
        A = unit.gather(1, first[:, :, None].expand(-1, -1, unit.shape[2]))
        B = unit.gather(1, second[:, :, None].expand(-1, -1, unit.shape[2]))
        closest = (B @ A.transpose(1, 2)).amax(dim=2)
        number = min(round(self.similar * (N - keep)), N // 2)
        leaving = second.gather(1, Keep.top(closest, number).index)
        return Keep(Keep.top(s.scatter(1, leaving, -1.0), keep).index, scores=s)

    def rank(self, view: TokenView) -> "Tensor":
        """Return (B, N), the importance of the patches after the I-stage."""
        A = view.attention_maps
        T = A.shape[-1]
        s = A.new_full((*A.shape[:2], 1, T), 1 / T)
        for _ in range(self._rounds(view.block, view.depth)):
            s = s @ A
        s = s[:, :, 0]
        spread = (s * T).var(dim=2, correction=0)
        counts = (spread >= self.low) & (spread <= self.high)
        counts = (counts | ~counts.any(dim=1, keepdim=True))[:, :, None].to(s.dtype)
        joined = ((counts * s.square()).sum(dim=1) / counts.sum(dim=1)).sqrt()
        return joined[:, -view.index.shape[1] :]


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [ZeroTPrune]
