"""The most attended tokens stay, and of the others those without similar tokens."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Keep, Place, Site, Strategy, TokenView


class VisPruner(Strategy):
    """Keeps important tokens and, of the others, diverse ones (Zhang et al., Section 4).

    Half of the remaining tokens are those with the most attention from the class token, mean over heads; without a
    class token the received attention is used. The other half is left after duplicates are removed in rounds. A round
    compares the tokens at even positions with those at odd positions, and removes up to `step` tokens at even
    positions, those with the largest cosine to their most similar token.
    """

    name: ClassVar[str] = "vis_pruner"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "attention"})
    how: ClassVar[How] = "drop"
    citation: ClassVar[str] = "Zhang et al., Beyond text-visual attention (VisPruner), ICCV 2025, arXiv 2412.01818"
    bibtex: ClassVar[str] = """@inproceedings{zhang2025vispruner,
  title = {Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in {VLMs}},
  author = {Zhang, Qizhe and Cheng, Aosong and Lu, Ming and Zhang, Renrui and Zhuo, Zhiyong and Cao, Jiajun
    and Guo, Shaobo and She, Qi and Zhang, Shanghang},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  year = {2025}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "acts within the network, while the paper acts once, before a language model; the number of tokens that leave "
        "in a round is this project's choice"
    )
    expected_failures: ClassVar[Mapping[str, str]] = {
        "order_of_tokens_does_not_matter": "tokens at even places are compared with those at odd places"
    }

    important: float = Field(0.5, ge=0, le=1, description="share of the remaining tokens that attention selects")
    step: int = Field(8, gt=0, description="largest number of tokens that leave in a round")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the cosines of each round."""
        n, keep = int(place.tokens), int(place.keep)
        first = int(self.important * keep)
        return sum((R - R // 2) * (R // 2) for R, _ in self._rounds(n - first, keep - first)) * place.width

    def _rounds(self, tokens: int, keep: int) -> list[tuple[int, int]]:
        """Return for each round the number of tokens, and the number of those at even positions that leave."""
        rounds = []
        while tokens > max(keep, 1):
            leave = min(self.step, tokens - keep, tokens - tokens // 2)
            rounds.append((tokens, leave))
            tokens -= leave
        return rounds

    def plan(self, view: TokenView, keep: int) -> Keep:
        """Keep the important tokens and the diverse ones."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        first = int(self.important * keep)
        order = sort(view.attention, descending=True).indices
        others, unit = sort(order[:, first:]).values, F.normalize(view.tokens.detach(), dim=2)
        rows = torch.arange(len(order), device=order.device)[:, None]
        for _, leave in self._rounds(others.shape[1], keep - first):
            even, odd = others[:, ::2], others[:, 1::2]
            nearest = (unit[rows, even] @ unit[rows, odd].mT).amax(dim=2)
            stay = sort(nearest, descending=True).indices[:, leave:]
            others = sort(torch.cat([even.gather(1, stay), odd], dim=1)).values
        return Keep(torch.cat([order[:, :first], others[:, : keep - first]], dim=1), scores=view.attention)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [VisPruner]
