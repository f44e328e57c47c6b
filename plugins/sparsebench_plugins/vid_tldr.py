"""Similar tokens are merged; tokens that attend to everything have little weight."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Schedule, Site, Strategy, TokenView


class VidTLDR(Strategy):
    """Merges the most similar pairs, weighted by the sharpness of each token's attention (Choi et al., vid-TLDR).

    With A the attention of the patches, mean over heads and without the sizes of tokens, the saliency of token i is
    sum_j A_ij log A_ij, the negative entropy of its attention. It is scaled to [0, 1] over the image. Values below the
    mean, the background, become 0, and the others are reduced by the mean and scaled to 1 again. The sets are those of
    ToMe (Bolya et al. 2023), and the pairs have the largest cosines of the tokens. In the mean of a group the weight of
    a token that leaves is its size times its saliency; the weight of the token that stays is its size. So the
    background adds nothing. The size of a group is the sum of these weights; later attention weights tokens by it,
    unless `proportional` is off.

    The paper merges in the first blocks of video networks without a class token. Here the saliency is that of the
    attention between patches, divided by its sum over them if there are class or register tokens.
    """

    name: ClassVar[str] = "vid_tldr"
    site: ClassVar[Site] = "attention"
    revision: ClassVar[int] = 2
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "queries", "keys"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Choi et al., vid-TLDR: training free token merging, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{choi2024vidtldr,
  title = {vid-TLDR: Training Free Token Merging for Light-weight Video Transformer},
  author = {Choi, Joonmyung and Lee, Sanghyeok and Chu, Jaewon and Choi, Minhyuk and Kim, Hyunwoo J.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    differs: ClassVar[str] = (
        "a head that averages tokens weights them by their sizes, which the released network does not"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the attention between patches, and of the similarities between A and B."""
        attention = place.tokens**2 * place.heads * place.head_width
        return attention + place.tokens // 2 * (place.tokens - place.tokens // 2) * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r most similar pairs, without the background."""
        import torch

        from sparsebench.strategy.selection import bipartite
        from sparsebench.strategy.tokens import Grouped, sizes_after

        target, leaves = bipartite(view.tokens[:, None], keep, view.prefix_count, in_order=True)
        queries, keys = view.queries.detach(), view.keys.detach()
        attention = (queries / queries.shape[3] ** 0.5 @ keys.mT).softmax(dim=3).mean(dim=1)
        sharp = torch.special.entr(attention).sum(dim=2).neg()
        low, high = sharp.amin(dim=1, keepdim=True), sharp.amax(dim=1, keepdim=True)
        scaled = (sharp - low) / (high - low).clamp(min=torch.finfo(sharp.dtype).tiny)
        above = (scaled - scaled.mean(dim=1, keepdim=True)).clamp(min=0)
        salient = above / above.amax(dim=1, keepdim=True).clamp(min=torch.finfo(sharp.dtype).tiny)
        share = view.sizes * torch.where(leaves, salient, 1)
        total = sizes_after(Grouped.of(Merge(target, sizes=share), keep), view.sizes)
        return Merge(target, weight=share / total.gather(1, target), sizes=share)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [VidTLDR]
