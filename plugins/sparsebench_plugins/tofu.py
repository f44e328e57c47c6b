"""Similar tokens leave: dropped in the first blocks, merged without loss of length in the others."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Keep, Merge, Place, Plan, Schedule, Site, Strategy, TokenView


class ToFu(Strategy):
    """Drops similar tokens where a network is least linear, and merges them where it is more so (Kim et al.).

    The pairs are found as in ToMe (Bolya et al. 2023, Section 3): tokens dealt in turn to A and B, each of A paired
    with the token of B whose key is most similar (cosine, mean over heads), the r closest pairs taken; the second
    patch goes to A, as where the class token, which is not among the tokens here, is the first of A. In the blocks
    before `merge_from` of the depth the token of A is dropped. From there on each group becomes the direction of its
    size-weighted mean times the length of its longest member (MLERP), as a mean of unlike tokens is shorter than they
    are. The paper sets from which block on by how linear the network is; the half here is this project's. The released
    code multiplies the mean by the longest length over that of the token of B instead.
    """

    name: ClassVar[str] = "tofu"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    citation: ClassVar[str] = "Kim et al., Token fusion: bridging the gap between token pruning and merging, WACV 2024"
    bibtex: ClassVar[str] = """@inproceedings{kim2024tofu,
  title = {Token Fusion: Bridging the Gap between Token Pruning and Token Merging},
  author = {Kim, Minchul and Gao, Shangqian and Hsu, Yen-Chang and Shen, Yilin and Jin, Hongxia},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year = {2024}
}"""
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    merge_from: float = Field(0.5, ge=0, le=1, description="share of the depth from which tokens are merged")
    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Plan:
        """Drop or merge the tokens of A in the r closest pairs."""
        import torch
        import torch.nn.functional as F

        from sparsebench.tokens import apply, sizes_after

        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        N = metric.shape[1]
        similarity, match = (metric[:, 1::2] @ metric[:, ::2].mT).max(dim=2)
        closest = similarity.argsort(dim=1, descending=True, stable=True)[:, : N - keep]
        host = torch.arange(N, device=metric.device).repeat(len(metric), 1)
        host = host.scatter(1, 2 * closest + 1, 2 * match.gather(1, closest))
        if view.block < self.merge_from * view.depth:
            gone = torch.zeros_like(host).scatter(1, 2 * closest + 1, 1)
            return Keep(gone.argsort(dim=1, stable=True)[:, :keep])
        plan = Merge.into(host)
        lengths, size = view.tokens.norm(dim=2), sizes_after(plan, view.sizes)
        longest = torch.zeros_like(size).scatter_reduce(1, plan.target, lengths, "amax")
        mean = apply(plan, view.tokens, view.sizes).norm(dim=2).clamp(min=1e-12)
        return Merge(plan.target, weight=view.sizes * (longest / mean / size).gather(1, plan.target))


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ToFu]
