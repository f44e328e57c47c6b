"""Similar tokens are merged, by an embedding that is learned for this alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Plan, Published, Schedule, Shift, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class DTEM(Strategy):
    """Merges the tokens that are closest in a learned embedding, with the network frozen.

    Lee and Hong (2024): in each block a linear layer maps the input of the attention to the width of one head (two
    heads from 1024 channels on). In the test the strategy is `tome`, with this embedding in place of the keys.

    In training no token leaves, and merging is soft. Of the n patches that take part, in their current order, those at
    even positions (E) can leave, and those at odd positions (O) receive. Each token of E has scores cos / tau for its
    `partners` most similar tokens of O. r times, p is the softmax of score / spread over all these pairs; the chosen
    parts p are added up to T, and log(1 - sum of p) is added to the scores of each token of E. Rows of T with a sum
    above 1 are divided by it. A token of O becomes the mean with weights: its size, and T times the sizes of E. Its
    size grows by the same, and the sizes in E shrink by the share that left. Then E and O together are sorted by
    falling size, and the last r no longer take part. All tokens stay in attention, with e^(query . key) times their
    size.

    The embedding reads its input without gradients. Only the embeddings are trained.
    """

    name: ClassVar[str] = "dtem"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "attention_input"})
    how: ClassVar[How] = "merge"
    schedule: ClassVar[Schedule] = "every"
    most: ClassVar[float] = 0.5
    trained: ClassVar[bool] = True
    citation: ClassVar[str] = "Lee and Hong, Learning to merge tokens via decoupled embedding (DTEM), NeurIPS 2024"
    bibtex: ClassVar[str] = """@inproceedings{lee2024dtem,
  title = {Learning to Merge Tokens via Decoupled Embedding for Efficient Vision Transformers},
  author = {Lee, Dong Hoon and Hong, Seunghoon},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("dtem:per_block=16", "DeiT-S"),)
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "pairs are made of tokens at even and at odd places",
        "gradients_flow": "a merge after the last attention does not reach a class token",
    }

    partners: int = Field(3, ge=1, description="tokens that each leaving token is matched with in training")
    tau: float = Field(0.1, gt=0, description="temperature of the similarity in training")
    spread: float = Field(0.1, gt=0, description="temperature of the choice of pairs in training")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")

    def module(self, place: Place) -> "Module":
        """Return the embedding."""
        from torch import nn

        return nn.Linear(place.width, _width(place))

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the embedding, and of the similarities between A and B."""
        pairs = place.tokens // 2 * (place.tokens - place.tokens // 2)
        return (place.tokens * place.width + pairs) * _width(place)

    def network_rate(self, done: float) -> float:
        """Freeze the network."""
        return 0.0

    def plan(self, view: TokenView, keep: int) -> Plan:
        """Merge the r most similar pairs; in training softly."""
        from sparsebench.strategy.selection import bipartite

        metric = view.learned(view.attention_input.detach())
        if view.training:
            return self._softly(view, metric, keep)
        return Merge(bipartite(metric[:, None], keep, view.prefix_count)[0])

    def _softly(self, view: TokenView, metric: "Tensor", keep: int) -> Shift:
        """Return the changed tokens and sizes; all tokens stay."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort
        from sparsebench.strategy.tokens import gather

        x, w = view.tokens, view.sizes.to(view.tokens.dtype)
        n, order = _part_and_order(view)
        r = min(n - keep, n // 2)
        if r < 1:
            return Shift(torch.zeros_like(x), sizes=w)
        E, O = order[:, 0:n:2], order[:, 1:n:2]
        unit = F.normalize(metric, dim=2)
        T = self._chosen(gather(unit, E) @ gather(unit, O).mT, r)
        moved, sizes = _merged_softly(x, w, E, O, T)

        # The next block pairs the largest n - r tokens, by falling size.
        both = torch.cat([E, O], dim=1)
        falling = sort(sizes.detach().gather(1, both), descending=True).indices
        view.memory["order"] = torch.cat([both.gather(1, falling), order[:, n:]], dim=1)
        view.memory["part"] = n - r
        return Shift(moved - x, sizes=sizes)

    def _chosen(self, cosine: "Tensor", r: int) -> "Tensor":
        """Return (B, E, O), the share of each token of E that joins each token of O, from their cosines."""
        import torch

        best = cosine.topk(min(self.partners, cosine.shape[2]), dim=2)
        s, chosen = best.values / self.tau, torch.zeros_like(best.values)
        for _ in range(r):
            p = (s / self.spread).flatten(1).softmax(dim=1).view_as(s)
            chosen = chosen + p
            s = s + (1 - p.sum(dim=2, keepdim=True)).clamp(min=2**-23).log()
        chosen = chosen / chosen.sum(dim=2, keepdim=True).clamp(min=1).detach()
        return torch.zeros_like(cosine).scatter(2, best.indices, chosen)


def _part_and_order(view: TokenView) -> "tuple[int, Tensor]":
    """Return the number of tokens that still take part, and the (B, N) tokens in their order, those first."""
    import torch

    memory, (B, N, _) = view.memory, view.tokens.shape
    if "order" not in memory:
        memory["order"] = torch.arange(N, device=view.tokens.device).expand(B, -1)
        memory["part"] = N
    return memory["part"], memory["order"]


def _merged_softly(x: "Tensor", w: "Tensor", E: "Tensor", O: "Tensor", T: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the tokens and the sizes after the tokens of O received their shares.

    Args:
        x, w: (B, N, C) tokens and (B, N) sizes.
        E, O: the numbers of the tokens of both.
        T: (B, E, O) the share of each token of E that joins each token of O.
    """
    from sparsebench.strategy.tokens import gather

    leaving = T.mT * w.gather(1, E)[:, None]  # (B, O, E): what each token of O receives
    size_O = w.gather(1, O) + leaving.sum(dim=2)
    x_O = (w.gather(1, O)[:, :, None] * gather(x, O) + leaving @ gather(x, E)) / size_O[:, :, None]
    rest = 1 - T.sum(dim=2)
    rest = rest + (rest.clamp(0, 1) - rest).detach()  # a plain clamp would have no gradient at its ends
    sizes = w.scatter(1, O, size_O).scatter(1, E, w.gather(1, E) * rest)
    return x.scatter(1, O[:, :, None].expand_as(x_O), x_O), sizes


def _width(place: Place) -> int:
    """Return the width of the embedding."""
    return place.head_width * (2 if place.width >= 1024 else 1)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DTEM]
