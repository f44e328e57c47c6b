"""Clusters of tokens around density peaks are merged."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Published, Site, Strategy, TokenView


class DPCKNN(Strategy):
    """Merges the tokens around each density peak, with equal weights (Zeng et al., Section 3.2).

    With d_ij = ||x_i - x_j|| / sqrt(C): the density of token i is rho_i = exp(-mean d_ij^2) over its k nearest tokens,
    including itself, plus noise of at most 1e-6 that breaks ties. delta_i is the distance to the nearest token of
    higher density; for the densest token it is the distance to the farthest token. The tokens with the largest
    rho delta are the centres, in order of position; each other token joins the nearest centre. The strategy acts on the
    input of a block, in stages.

    The published weights exp(W x) of the members are learned; here all weights are 1, as in its use without training.
    The class token is not clustered here.
    """

    name: ClassVar[str] = "dpc_knn"
    site: ClassVar[Site] = "block"
    draws_random: ClassVar[bool] = True
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Zeng et al., Not all tokens are equal (TCFormer), CVPR 2022"
    bibtex: ClassVar[str] = """@inproceedings{zeng2022tcformer,
  title = {Not All Tokens Are Equal: Human-centric Visual Analysis via Token Clustering Transformer},
  author = {Zeng, Wang and Jin, Sheng and Liu, Wentao and Qian, Chen and Luo, Ping and Ouyang, Wanli
    and Wang, Xiaogang},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2022}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("dpc_knn:keep_rate=0.7", "DeiT-S"),)
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = "all members of a cluster have the same weight, while the published weights are learned"

    neighbours: int = Field(5, gt=0, description="k, number of nearest tokens that define the density")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the distances of all tokens."""
        return place.tokens * place.tokens * place.width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge each token into its centre."""
        import torch

        from sparsebench.strategy.sorting import sort

        x = view.tokens.detach()
        N = x.shape[1]
        d = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / x.shape[2] ** 0.5
        nearest = d.topk(min(self.neighbours, N), dim=2, largest=False).values
        # Two tokens that are nearest to each other have equal densities; in float32 the noise may not separate them.
        rho = (-nearest.square().mean(dim=2)).exp().double() + 1e-6 * view.random()
        higher = rho[:, None] > rho[:, :, None]
        delta = d.masked_fill(~higher, float("inf")).amin(dim=2)
        score = rho * torch.where(delta.isinf(), d.amax(dim=2), delta)
        centres = sort(sort(score, descending=True).indices[:, :keep]).values
        target = d.gather(2, centres[:, None].expand(-1, N, -1)).argmin(dim=2)
        target = target.scatter(1, centres, torch.arange(keep, device=x.device).expand_as(centres))
        ones = torch.ones_like(view.sizes)
        count = torch.zeros_like(ones[:, :keep]).scatter_add(1, target, ones)
        return Merge(target, scores=score, weight=1 / count.gather(1, target))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DPCKNN]
