"""Similar tokens are merged; tokens that attend to everything have little weight."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Schedule, Site, Strategy, TokenView


class VidTLDR(Strategy):
    """Merges the pairs of ToMe, weighted by the sharpness of each token's attention (Choi et al., vid-TLDR).

    With A the attention between patches, mean over heads, the saliency of token i is sum_j A_ij log A_ij, the negative
    entropy of its attention. It is scaled to [0, 1] over the image, and values below the mean, the background, become
    0. The pairs are those of ToMe (Bolya et al. 2023). In the mean of a group, the weight of a token that leaves is its
    size times its saliency; the weight of the token that stays is its size. So the background adds nothing. The size
    of a group is the sum of sizes; later attention weights tokens by it, unless `proportional` is off.

    The mean is divided by the sum of these weights, which a description of the paper leaves open. The paper merges in
    the first blocks of video networks.
    """

    name: ClassVar[str] = "vid_tldr"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys", "attention_maps"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Choi et al., vid-TLDR: training free token merging, CVPR 2024"
    bibtex: ClassVar[str] = """@inproceedings{choi2024vidtldr,
  title = {vid-TLDR: Training Free Token Merging for Light-weight Video Transformer},
  author = {Choi, Joonmyung and Lee, Sanghyeok and Chu, Jaewon and Choi, Minhyuk and Kim, Hyunwoo J.},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2024}
}"""
    differs: ClassVar[str] = "written from a description of the paper; the divisor of the weights is chosen here"
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
        """Merge the r most similar pairs, without the background."""
        import torch

        from sparsebench.strategy.selection import bipartite

        target, leaves = bipartite(view.keys, keep, view.prefix_count)
        N = target.shape[1]
        maps = view.attention_maps[..., -N:, -N:].detach().mean(dim=1)
        sharp = torch.special.entr(maps).sum(dim=2).neg()
        low, high = sharp.amin(dim=1, keepdim=True), sharp.amax(dim=1, keepdim=True)
        scaled = (sharp - low) / (high - low).clamp(min=torch.finfo(sharp.dtype).tiny)
        salient = torch.where(scaled < scaled.mean(dim=1, keepdim=True), 0, scaled)
        share = view.sizes * torch.where(leaves, salient, 1)
        total = torch.zeros_like(share[:, :keep]).scatter_add(1, target, share)
        return Merge(target, weight=share / total.gather(1, target))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [VidTLDR]
