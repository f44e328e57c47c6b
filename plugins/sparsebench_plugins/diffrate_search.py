"""Training learns how many tokens are dropped and merged in each block."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import LossInputs, Mask, Merge, Place, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class DiffRateSearch(Strategy):
    """Drops and merges tokens like `diffrate`, with token counts learned for each block (Chen et al., Section 3).

    In each block tokens are ranked by the class token's attention (received attention if there is no class token). The
    first p tokens are not dropped, and of these the first m stay; ranks m to p are merged into the most similar tokens
    that stay. Both counts are ceil(sum_n n alpha_n), with a softmax alpha over n = 1..N; a count is at most the count
    of the previous block. In training all tokens stay: rank i is kept with P_i = sum_(n >= i) alpha_n. The mask is
    1[i <= count] with the gradient of P_i. Means, sizes and attention of groups are as in the test, with gradients
    through the masks. The test uses the same counts for all images, and removes tokens.

    Added to the loss: `weight` times the squared difference between the MACs of the counts and those of the budget, as
    fractions of the dense MACs. The default weight is that of the published 5 (GMACs - target)^2 on a DeiT-S of 4.6
    GMACs.

    The initial counts are those of `diffrate`, as the means of binomial distributions. Their logits are `pace` times
    the learned parameters, which have the network's learning rate. With `frozen`, only the counts are learned, as in
    the paper; by default the network is trained in the same steps. In the paper the loss has no term of the MACs at
    first. The products of the cosines are counted in the MACs.
    """

    name: ClassVar[str] = "diffrate_search"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "attention"})
    expected_failures: ClassVar[Mapping[str, str]] = {
        "gradients_flow": "no class token reads what stays in the last block: the task gives its counts no gradient"
    }
    schedule: ClassVar[Schedule] = "every"
    trained: ClassVar[bool] = True
    added: ClassVar[frozenset[str]] = frozenset({"frozen"})
    adaptive: ClassVar[bool] = True
    citation: ClassVar[str] = "Chen et al., DiffRate: differentiable compression rate, ICCV 2023"
    bibtex: ClassVar[str] = """@inproceedings{chen2023diffrate,
  title = {{DiffRate}: Differentiable Compression Rate for Efficient Vision Transformers},
  author = {Chen, Mengzhao and Shao, Wenqi and Xu, Peng and Lin, Mingbao and Zhang, Kaipeng and Chao, Fei
    and Ji, Rongrong and Qiao, Yu and Luo, Ping},
  booktitle = {IEEE/CVF International Conference on Computer Vision},
  year = {2023}
}"""
    variant: ClassVar[bool] = True
    differs: ClassVar[str] = (
        "the network is trained in the same steps, while the paper learns only the counts (frozen=true), and the loss "
        "includes the MACs from the first step"
    )

    weight: float = Field(5 * 4.6**2, ge=0, description="weight of the squared difference from the budget's MACs")
    merged: float = Field(0.5, ge=0, le=1, description="initial share of merged tokens among those not kept")
    pace: float = Field(10.0, gt=0, description="factor of the learned parameters in the logits of the counts")
    proportional: bool = Field(True, description="later attention weights tokens by their sizes")
    frozen: bool = Field(False, description="only the counts are learned; the network is frozen")

    def module(self, place: Place) -> "Module":
        """Return the logits of p and m, divided by `pace`."""
        import torch
        from torch import nn

        N = place.patches

        def logits(count: float) -> nn.Parameter:
            share = min(max((count - 1) / max(1, N - 1), 5e-4 / N), 1 - 5e-4 / N)  # for finite logits
            binomial = torch.distributions.Binomial(N - 1, torch.tensor(share))
            return nn.Parameter(binomial.log_prob(torch.arange(N, dtype=torch.float32)) / self.pace)

        kept = place.keep + self.merged * (place.tokens - place.keep)
        return nn.ParameterDict({"p": logits(kept), "m": logits(place.keep)})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the cosines of all tokens with the kept tokens."""
        return place.tokens * place.keep * place.width

    def network_rate(self, done: float) -> float:
        """Freeze the network if `frozen`."""
        return 0.0 if self.frozen else 1.0

    def plan(self, view: TokenView, keep: int) -> Mask | Merge:
        """Drop the last ranks and merge the middle ones; in training with masks."""
        (P_p, p), (P_m, m) = self._counts(view)
        rank, stay = _ranks(view, int(m))
        cosine, match = _matches(view.tokens.detach(), stay)
        sizes = view.sizes * cosine
        if not view.training:
            return _merge(view, match.masked_fill(rank >= int(p), -1), match, sizes, int(m))
        not_dropped = _straight_through(rank, p, P_p)
        stays = _straight_through(rank, m, P_m)
        return _mask(view, not_dropped, stays, stay, match, sizes)

    def loss(self, inputs: LossInputs) -> "Tensor":
        """Return the weighted squared difference of the MACs."""
        difference: Tensor = inputs.spent(inputs.memory["counts"]) - inputs.macs
        return self.weight * difference.square()

    def _counts(self, view: TokenView) -> "tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]":
        """Return p and m of this block, each with its probabilities, see `_count`."""
        counts = view.memory.setdefault("counts", [])
        P_p, p = self._count(view.learned["p"], counts[-1] if counts else None)
        P_m, m = self._count(view.learned["m"], p)
        counts.append(m)
        return (P_p, p), (P_m, m)

    def _count(self, learned: "Tensor", most: "Tensor | None") -> "tuple[Tensor, Tensor]":
        """Return the (N,) probabilities that ranks are kept, and the integer count with the gradient of the mean."""
        import torch

        alpha = (self.pace * learned).softmax(dim=0)
        mean = (alpha * torch.arange(1, len(alpha) + 1, device=alpha.device)).sum()
        whole = (mean.detach() - 1e-3).ceil().clamp(min=1)  # in float32 a mean of 7 may exceed 7
        count = whole + (mean - mean.detach())
        return alpha.flip(0).cumsum(0).flip(0), count if most is None else torch.minimum(count, most)


def _ranks(view: TokenView, m: int) -> "tuple[Tensor, Tensor]":
    """Return the (B, N) ranks of the tokens by falling attention, and the (B, m) first tokens, in their order.

    In training tokens that were removed by a mask come last.
    """
    from sparsebench.strategy.sorting import ranks, sort

    attention = view.attention.detach().masked_fill(view.weights.detach() < 0.5, -1.0)
    ranked = sort(attention, descending=True).indices
    return ranks(ranked), sort(ranked[:, :m]).values


def _matches(tokens: "Tensor", stay: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return (B, N), the largest cosine of each token with one that stays, and which of these it is.

    A token that stays has cosine 1 with itself. Negative cosines are 0.
    """
    import torch
    import torch.nn.functional as F

    unit = F.normalize(tokens, dim=2)
    chosen = unit.gather(1, stay[:, :, None].expand(-1, -1, unit.shape[2]))
    cosine, match = (unit @ chosen.mT).clamp(min=0).max(dim=2)
    places = torch.arange(stay.shape[1], device=stay.device).expand_as(stay)
    return cosine.scatter(1, stay, 1.0), match.scatter(1, stay, places)


def _merge(view: TokenView, target: "Tensor", match: "Tensor", sizes: "Tensor", m: int) -> Merge:
    """Return the plan of the test: means of m groups.

    Args:
        view: the view.
        target: (B, N) the group of each token; -1 if it is dropped.
        match: the same, also of dropped tokens.
        sizes: (B, N) what each token adds to the size of its group.
        m: the number of groups.
    """
    import torch

    member = (target >= 0).to(sizes.dtype)
    count = torch.zeros_like(sizes[:, :m]).scatter_add(1, match, member).gather(1, match)
    return Merge(target, scores=view.attention, weight=1 / count, sizes=sizes)


def _mask(
    view: TokenView, not_dropped: "Tensor", stays: "Tensor", stay: "Tensor", match: "Tensor", sizes: "Tensor"
) -> Mask:
    """Return the plan in training: the means and sizes of groups in place of the tokens that stay.

    Args:
        view: the view.
        not_dropped, stays: (B, N) 0 or 1 with gradients: whether a token is not dropped, and whether it stays.
        stay: (B, m) the tokens that stay.
        match: (B, N) which of these each token joins.
        sizes: (B, N) what each token adds to the size of its group.
    """
    import torch.nn.functional as F

    joins = (view.weights * not_dropped * (1 - stays)).scatter(1, stay, 1.0)
    groups = (F.one_hot(match, stay.shape[1]) * joins[:, :, None]).mT  # (B, m, N)
    mean = groups @ view.tokens / groups.sum(dim=2, keepdim=True)
    values = view.tokens.scatter(1, stay[:, :, None].expand_as(mean), mean.to(view.tokens.dtype))
    new_sizes = view.sizes.scatter(1, stay, (groups @ sizes[:, :, None])[:, :, 0].to(view.sizes.dtype))
    return Mask(not_dropped * stays, view.attention.detach(), values, new_sizes)


def _straight_through(rank: "Tensor", count: "Tensor", P: "Tensor") -> "Tensor":
    """Return 1 for ranks below the count, 0 for the others, with the gradient of P."""
    soft = P[rank]
    return (rank < count.detach()).to(soft.dtype) + (soft - soft.detach())


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DiffRateSearch]
