"""Similar tokens are merged, a few in every block."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Merge, Place, Schedule, Site, Strategy, TokenView


class ToMe(Strategy):
    """Merges the tokens whose keys are most alike, by bipartite soft matching (Bolya et al., Section 3).

    Tokens are dealt in turn to two sets A and B; each of A finds the token of B with the most similar key (cosine of
    keys, mean over heads); the r pairs that are most alike are merged into their size-weighted mean, r the number that
    has to leave. The others of A go on, then B, so that the next block deals them anew. Attention after it weighs
    tokens by their sizes. As published, in every block, at most half of the tokens; r tokens a block is the budget
    `per_block`.

    The class token is not among the tokens here: it is never merged. As where it is the first of A, the second patch
    goes to A and the first to B. With no class token or several the published split starts with the other set.
    """

    name: ClassVar[str] = "tome"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys"})
    citation: ClassVar[str] = "Bolya et al., Token merging: your ViT but faster, ICLR 2023"
    bibtex: ClassVar[str] = """@inproceedings{bolya2023tome,
  title = {Token Merging: Your {ViT} But Faster},
  author = {Bolya, Daniel and Fu, Cheng-Yang and Dai, Xiaoliang and Zhang, Peizhao and Feichtenhofer, Christoph
    and Hoffman, Judy},
  booktitle = {International Conference on Learning Representations},
  year = {2023}
}"""
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places"
    }
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5

    proportional: bool = Field(True, description="attention after it weighs tokens by their sizes")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities of A to B."""
        return place.tokens // 2 * (place.tokens - place.tokens // 2) * place.head_width

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Merge the r closest pairs."""
        import torch
        import torch.nn.functional as F

        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        B, N, a, r = *metric.shape[:2], metric.shape[1] // 2, metric.shape[1] - keep
        similarity, match = (metric[:, 1::2] @ metric[:, ::2].mT).max(dim=2)
        rank = similarity.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        merges = rank < r
        place = (~merges).cumsum(dim=1) - 1  # of those of A that go on
        target = metric.new_empty(B, N, dtype=torch.int64)
        target[:, ::2] = torch.arange(a - r, keep, device=metric.device)
        target[:, 1::2] = torch.where(merges, a - r + match, place)
        return Merge(target)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [ToMe]
