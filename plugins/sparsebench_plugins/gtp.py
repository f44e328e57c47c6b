"""Tokens pass a part of themselves to their neighbours in a graph before they leave."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor

NEIGHBOURS = 8
"""Nearest tokens that a token has in the semantic graph; on the grid it has at most as many."""


class GTP(Strategy):
    """Drops the tokens that are heard by few or easily regenerated, after they propagate along a graph.

    Xu et al. (2024): the score of patch j is max_h A_jj max_h sum_i A_ij, for the heads h of the attention A and all
    queries i. The tokens with the smallest scores leave. Before that each is added to its neighbours that stay: x_k +
    alpha sum_p G_kp x_p. The sizes change alike, s_k + alpha sum_p G_kp s_p, and later attention weights tokens by
    them, unless `proportional` is off. The patches that stay have the order of falling scores. The class token neither
    leaves nor receives.

    The graph G is built once, from the patches before the first block, and keeps only the rows and columns of the
    tokens that stay. Spatial: the eight neighbours on the grid. Semantic: the eight patches with the largest cosine.
    Mixed: either. G = D^-1/2 a D^-1/2, for the 0/1 matrix a with row sums D.

    With theta < 1 the entries of each attention matrix below its k-th smallest become 0, with k = floor(T^2 (1 -
    theta)) for T tokens. This matrix multiplies the values, not normalised again, and gives the scores.
    """

    name: ClassVar[str] = "gtp"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "attention_maps"})
    how: ClassVar[How] = "merge"
    schedule: ClassVar[Schedule] = "every"
    citation: ClassVar[str] = (
        "Xu et al., GTP-ViT: efficient vision transformers via graph-based token propagation, WACV 2024"
    )
    bibtex: ClassVar[str] = """@inproceedings{xu2024gtpvit,
  title = {{GTP-ViT}: Efficient Vision Transformers via Graph-based Token Propagation},
  author = {Xu, Xuwei and Wang, Sen and Chen, Yudong and Zheng, Yanping and Wei, Zhewei and Liu, Jiajun},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (
        Published("gtp:per_block=8", "DeiT-B"),
        Published("gtp:per_block=14", "DeiT-B"),
    )

    graph: Literal["mixed", "spatial", "semantic"] = Field("mixed", description="which patches are neighbours")
    alpha: float = Field(0.1, ge=0, description="share of a token that its neighbours receive, times their weight")
    theta: float = Field(1.0, gt=0, le=1, description="share of the entries that each attention matrix keeps")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def start(self, view: TokenView) -> None:
        """Build the graph of the patches."""
        import torch

        B, N = view.index.shape
        neighbours = torch.zeros(B, N, N, dtype=torch.bool, device=view.index.device)
        if self.graph != "semantic":
            neighbours = neighbours | _on_grid(view)
        if self.graph != "spatial":
            neighbours = neighbours | _nearest(view.tokens)
        a = neighbours.to(view.tokens.dtype)
        scale = a.sum(dim=2).clamp(min=1).rsqrt()
        view.memory["graph"] = scale[:, :, None] * a * scale[:, None]

    def maps(self, maps: "Tensor") -> "Tensor":
        """Set the smallest entries of each matrix to 0."""
        from sparsebench.strategy.sorting import sort

        T = maps.shape[-1]
        k = int(T * T * (1 - self.theta))
        if k == 0:
            return maps
        smallest = sort(maps.flatten(2)).values[:, :, k - 1, None, None]
        return maps.where(maps >= smallest, 0)

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the propagation, and of the cosines of the graph."""
        propagation = place.keep * (place.tokens - place.keep) * place.width
        builds = self.graph != "spatial" and place.tokens == place.patches
        return propagation + builds * place.patches**2 * place.width

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Drop the tokens with the smallest scores, after they propagate."""
        from sparsebench.strategy.sorting import sort
        from sparsebench.strategy.tokens import gather

        P, maps = view.prefix_count, view.attention_maps
        itself = maps.diagonal(dim1=2, dim2=3).amax(dim=1)
        heard = maps.sum(dim=2).amax(dim=1)
        scores = (itself * heard)[:, P:]
        order = sort(scores, descending=True).indices
        stay, leave = order[:, :keep], order[:, keep:]

        graph = gather(view.pairs(view.memory["graph"]), stay)
        share = self.alpha * graph.gather(2, leave[:, None].expand(-1, keep, -1))
        gone = gather(view.tokens, leave)
        sizes = view.sizes.gather(1, stay) + (share * view.sizes.gather(1, leave)[:, None]).sum(dim=2)
        return Keep(stay, scores=scores, ordered=True, add=share @ gone, sizes=sizes)


def _on_grid(view: TokenView) -> "Tensor":
    """Return (N, N) booleans: whether two patches are neighbours on the grid, also diagonally."""
    import torch

    if view.grid is None:
        raise sparsebench.UnsupportedError(
            "'gtp' has neighbours on a grid, and these tokens have none: use graph=semantic"
        )
    rows, columns = view.grid
    patch = torch.arange(rows * columns, device=view.index.device)
    row, column = patch // columns, patch % columns
    near = ((row - row[:, None]).abs() <= 1) & ((column - column[:, None]).abs() <= 1)
    return near & (patch != patch[:, None])


def _nearest(tokens: "Tensor") -> "Tensor":
    """Return (B, N, N) booleans: whether column p is one of the nearest patches of row k, by cosine."""
    import torch
    import torch.nn.functional as F

    from sparsebench.strategy.sorting import sort

    unit = F.normalize(tokens, dim=2)
    cosine = unit @ unit.mT
    N = cosine.shape[1]
    # A row includes the patch itself, so the limit is the value that eight others and the patch itself reach.
    limit = sort(cosine, descending=True).values[:, :, min(NEIGHBOURS, N - 1), None]
    return (cosine >= limit) & ~torch.eye(N, dtype=torch.bool, device=tokens.device)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [GTP]
