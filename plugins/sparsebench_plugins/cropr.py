"""Learned queries score the tokens after each block; the tokens that left can come back before the last block."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module


class Cropr(Strategy):
    """Keeps the tokens with the largest products with learned queries, which auxiliary heads train.

    Bergner et al. (2025): after each block the score of token i is sum_q q . x_i over the learned queries q of this
    block; the tokens with the smallest scores leave. With `projections` the queries, and the tokens after a LayerNorm,
    are first multiplied by learned matrices. With `returns=-1` all tokens come back before the last block, unchanged
    since they left: the last-layer fusion of the paper.

    In training each block also has an auxiliary head. Its query attends to all tokens, class token included: z =
    softmax(q . x / sqrt(head width)) x, in `heads` parts of the channels; z + MLP(LN(z)) goes through a LayerNorm and a
    linear layer to logits, whose loss is added to that of the network. Gradients of this loss reach the queries and the
    heads, not the network. Without projections several queries act as one, their sum, and `heads` changes only the
    auxiliary heads.
    """

    name: ClassVar[str] = "cropr"
    site: ClassVar[Site] = "mlp"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "prefix"})
    how: ClassVar[How] = "drop"
    schedule: ClassVar[Schedule] = "every"
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Bergner et al., Token Cropr: faster ViTs for quite a few tasks, CVPR 2025"
    bibtex: ClassVar[str] = """@inproceedings{bergner2025cropr,
  title = {Token {Cropr}: Faster {ViTs} for Quite a Few Tasks},
  author = {Bergner, Benjamin and Lippert, Christoph and Mahendran, Aravindh},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2025}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("cropr:per_block=8,returns=-1", "MAE ViT-L"),)
    differs: ClassVar[str] = (
        "per_block=R removes R tokens after each block, while the released code removes R + 1 after the first: use "
        "counts; the learning rates of the paper, layer by layer, are not used"
    )

    queries: int = Field(1, ge=1, description="learned queries of a block")
    heads: int = Field(1, ge=1, description="heads of the auxiliary attention")
    projections: bool = Field(False, description="LayerNorm of the tokens, and learned matrices of queries and keys")

    def module(self, place: Place) -> "Module":
        """Return the queries, the projections and the auxiliary head of a block."""
        from torch import nn

        C = place.width
        queries = nn.Embedding(self.queries, C)
        nn.init.normal_(queries.weight, std=0.02)
        parts = nn.ModuleDict({"queries": queries})
        if self.projections:
            parts["norm"] = nn.LayerNorm(C, eps=1e-5)
            parts["q"], parts["k"] = (nn.Linear(C, C, bias=False) for _ in range(2))
        if place.classes:
            parts["mlp"] = nn.Sequential(nn.LayerNorm(C, eps=1e-6), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
            parts["head"] = nn.Sequential(nn.LayerNorm(C, eps=1e-5), nn.Linear(C, place.classes))
        return parts

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the scores; the auxiliary head is not computed in the test."""
        C, N = place.width, place.tokens
        projections = (N + self.queries) * C * C if self.projections else 0
        return projections + N * C

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the tokens with the largest scores."""
        queries = view.learned["queries"].weight
        tokens = view.tokens
        if self.projections:
            queries, tokens = view.learned["q"](queries), view.learned["k"](view.learned["norm"](tokens))
        scores = (tokens.detach() @ queries.detach().sum(dim=0)[:, None])[:, :, 0]
        if view.training and "head" in view.learned:
            view.memory.setdefault("logits", []).append(self._logits(view))
        return Keep.top(scores, keep)

    def _logits(self, view: TokenView) -> "Tensor":
        """Return the (B, classes) logits of the auxiliary head."""
        import torch

        parts, queries = view.learned, view.learned["queries"].weight
        x = torch.cat([view.prefix, view.tokens], dim=1).detach()
        keys = x
        if self.projections:
            queries, keys = parts["q"](queries), parts["k"](parts["norm"](x))
        # (B, H, T, d) and (H, Q, d)
        keys, values = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (keys, x))
        q = queries.unflatten(1, (self.heads, -1)).transpose(0, 1)
        attention = (q @ keys.mT / q.shape[2] ** 0.5).softmax(dim=3)
        z = (attention @ values).transpose(1, 2).flatten(2)
        z = z + parts["mlp"](z)
        return parts["head"](z).mean(dim=1)

    def auxiliary(self, memory: dict[str, Any]) -> "Sequence[Tensor]":
        """Return the logits of the auxiliary heads."""
        return memory.get("logits", [])


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Cropr]
