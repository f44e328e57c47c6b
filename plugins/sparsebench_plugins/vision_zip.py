"""The most attended tokens stay unchanged, and the others are merged into a few evenly spaced ones."""

from typing import ClassVar

from pydantic import Field

import sparsebench
from sparsebench import How, Merge, Place, Site, Strategy, TokenView


class VisionZip(Strategy):
    """Keeps dominant tokens and merges the others into contextual ones (Yang et al., Section 3).

    Dominant tokens are those with the most attention from the class token, mean over heads; without a class token the
    received attention is used. Of the others, in order of position, every s-th token from the first is a target; s is
    their number divided by the number of contextual tokens, rounded down. Each remaining token joins the target with
    the most similar key (cosine, mean over heads), or the first of equally similar ones. A contextual token is the mean
    of a target and its members.

    5/32 of the M tokens are contextual: the paper keeps 54 + 10, 108 + 20 and 162 + 30 of 576.
    """

    name: ClassVar[str] = "vision_zip"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "keys", "attention"})
    how: ClassVar[How] = "merge"
    citation: ClassVar[str] = "Yang et al., VisionZip: longer is better but not necessary in VLMs, CVPR 2025"
    bibtex: ClassVar[str] = """@inproceedings{yang2025visionzip,
  title = {{VisionZip}: Longer is Better but Not Necessary in Vision Language Models},
  author = {Yang, Senqiao and Chen, Yukang and Tian, Zhuotao and Wang, Chengyao and Li, Jingyao and Yu, Bei
    and Jia, Jiaya},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2025}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "acts within the network, while the paper acts once, before a language model; means weight tokens by their "
        "sizes; written from descriptions of the paper, in which keys are compared by their inner products"
    )

    contextual: float = Field(5 / 32, ge=0, le=1, description="share of merged tokens in the new tokens")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the similarities between the targets and the tokens that join them."""
        targets = self._targets(int(place.keep))
        return (place.tokens - place.keep) * targets * place.head_width

    def _targets(self, keep: int) -> int:
        return round(self.contextual * keep)

    def plan(self, view: TokenView, keep: int) -> Merge:
        """Keep the dominant tokens and merge the others into the targets."""
        import torch
        import torch.nn.functional as F

        from sparsebench.strategy.sorting import sort

        N, targets = view.attention.shape[1], self._targets(keep)
        order = sort(view.attention, descending=True).indices
        host = torch.arange(N, device=order.device).repeat(len(order), 1)
        others = sort(order[:, keep - targets :]).values
        if not targets:
            stays = torch.ones_like(host, dtype=torch.bool).scatter(1, others, False)
            return Merge(torch.where(stays, stays.cumsum(dim=1) - 1, -1), scores=view.attention)
        step = others.shape[1] // targets
        groups = others[:, : targets * step].unflatten(1, (targets, step))  # the first of a group is the target
        target = groups[:, :, 0]
        rest = torch.cat([groups[:, :, 1:].flatten(1), others[:, targets * step :]], dim=1)
        metric = F.normalize(view.keys.mean(dim=1), dim=2)
        rows = torch.arange(len(order), device=order.device)[:, None]
        match = (metric[rows, rest] @ metric[rows, target].mT).argmax(dim=2)
        return Merge.into(host.scatter(1, rest, target.gather(1, match)), scores=view.attention)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [VisionZip]
