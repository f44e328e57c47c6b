"""A token gathers halting scores, one per layer, and is removed when their sum reaches one."""

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

import sparsebench
from sparsebench import LossInputs, Mask, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AViT(Strategy):
    """Halts a token when its halting scores add up to one, so the depth of a token depends on the image.

    Yin et al. (2022): after layer l token k has the score h_k^l = sigmoid(gamma X_k^l[0] + beta), from the first
    channel of its embedding; after the last layer the score is 1. The token halts at the first layer l* at which the
    sum of its scores reaches 1 - epsilon. Its remainder is R_k = 1 - sum_{l < l*} h_k^l. Other tokens no longer attend
    to a halted token. In training it stays in the network as zeros, so that it still has scores; in the test it is
    removed. The head reads sum_{l < l*} h^l X^l + R X^{l*} of the class token, so the head must read a class token. The
    strategy cannot act on the theory models.

    Two terms are added to the loss. The first is `ponder` times the mean of l* + R_k over images and tokens, including
    the class token. The second is `distribution` times mean_l p_l (log p_l - log H_l). p_l is the density at l of the
    normal distribution with mean `target` and variance 1, not divided by its sum over layers. H_l is the mean of
    sigmoid(gamma X_k^l[0] + beta) over all tokens, halted or not, and all images of the batch (of each part, if a batch
    is split), also in the last layer; it is divided by its sum over layers and clamped to [.01, .99]. The default
    target is the published one, layer 9 of 12: 3/4 of the depth. "budget" is the mean number of blocks that a token
    goes through with the budget's token counts, so that tokens that halt there meet the budget. In both cases the cost
    is learned and may differ from the budget; the record has the realised cost.

    By default `beta` is -ln(L - 1) for a network of L layers. Then h = 1 / L if the first channel is 0. This is the
    largest beta with which a token whose first channel stays 0 goes through all layers. In a network with random
    initial weights the first channel is 0 with a spread of .3 to .7 (measured): from the start some tokens halt early,
    some never halt, and many have a gradient. The published values, -30 for DeiT-Ti and -75 for DeiT-S, fit the first
    channel of these pretrained networks. If the first channel is about 0, they halt no token, and there is no gradient
    to learn the channel. Blocks after the block in which the class token of all images halts learn nothing from labels.

    Differences to the paper: a halted class token stays as a key, which does not change what the head reads but may
    change when patches halt later. In training a halted patch also attends to itself. Register and distillation tokens
    never halt. If all patches of an image have halted, the one with the smallest sum of scores among the last to halt
    stays, because each image must keep a patch. With blocks in the budget (`blocks=3+6+9`), scores are gathered only
    before these blocks and after the last block.
    """

    name: ClassVar[str] = "a_vit"
    site: ClassVar[Site] = "block"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens", "prefix"})
    schedule: ClassVar[Schedule] = "every"
    trained: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True
    citation: ClassVar[str] = "Yin et al., A-ViT: adaptive tokens for efficient vision transformer, CVPR 2022"
    bibtex: ClassVar[str] = """@inproceedings{yin2022avit,
  title = {{A-ViT}: Adaptive Tokens for Efficient Vision Transformer},
  author = {Yin, Hongxu and Vahdat, Arash and Alvarez, Jose M. and Mallya, Arun and Kautz, Jan and Molchanov, Pavlo},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year = {2022}
}"""
    published: ClassVar[tuple[Published, ...]] = (Published("a_vit:beta=-75", "DeiT-S", 3.6),)
    differs: ClassVar[str] = (
        "by default beta depends on the depth; a halted class token stays as a key, register and distillation tokens "
        "never halt, and an image keeps at least one patch; in training a halted patch also attends to itself"
    )

    scale: float = Field(10.0, description="gamma, the factor of the first channel")
    beta: float | None = Field(None, description="added to the product; default -ln(L - 1); published: -30, -75")
    epsilon: float = Field(0.01, ge=0, lt=1, description="a token halts when its scores sum to 1 - epsilon or more")
    ponder: float = Field(5e-4, ge=0, description="weight of the mean depth and remainder")
    distribution: float = Field(1e-3, ge=0, description="weight of the divergence of the scores from the prior")
    target: float | Literal["budget"] | None = Field(
        None, description='mean of the prior: 1 or more layers, or "budget"; default 3/4 of the depth'
    )

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: Any) -> Any:
        if isinstance(target, float) and target < 1:
            raise ValueError("a number of layers must be 1 or more")
        return target

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the scores, and of one term of the read-out; block 0 stands for the last layer."""
        return place.width + (place.tokens + 1 if place.block else 0)

    def plan(self, view: TokenView, keep: int) -> Mask | None:
        """Halt tokens by their scores after the previous blocks."""
        import torch

        from sparsebench.strategy.sorting import sort

        x, class_token, memory = view.tokens, view.prefix[:, 0], view.memory
        if not memory:
            zeros = x.new_zeros(len(x), x.shape[1] + 1)
            memory |= {"sum": zeros, "cost": zeros, "running": zeros == 0, "scores": {}}
            memory |= {"depth": view.depth, "training": view.training}
        if view.block == 0:
            return None
        # One column for each patch of the input and one for the class token, into which padding (-1) is written first.
        columns = view.index % memory["sum"].shape[1]
        h = torch.zeros_like(memory["sum"]).scatter(1, columns, self._scores(x, view.depth))
        of_class = self._scores(class_token[:, None], view.depth)
        self._gather(memory, view.block, torch.cat([h[:, :-1], of_class], dim=1), class_token)
        present = view.there & (view.weights > 0)
        total = memory["sum"].gather(1, columns).detach()
        stays = memory["running"].gather(1, columns) & present
        least = sort(total.masked_fill(~present, torch.inf)).indices[:, :1]
        least_gathered = torch.zeros_like(stays).scatter(1, least, True)
        stays = stays | (least_gathered & ~stays.any(dim=1, keepdim=True))
        if not view.training:
            return Mask(stays, scores=-total)
        return Mask(stays.to(total.dtype), scores=-total, values=x * stays[:, :, None])

    def _scores(self, x: "Tensor", depth: int) -> "Tensor":
        """Return (B, N), the halting scores of tokens (B, N, C)."""
        beta = -math.log(max(1, depth - 1)) if self.beta is None else self.beta
        return (self.scale * x[:, :, 0] + beta).sigmoid()

    def _gather(self, memory: dict[str, Any], layer: int, h: "Tensor", class_token: "Tensor") -> None:
        """Add the scores h (B, patches + 1) of a layer, and its term of the read-out of the (B, C) class token."""
        import torch

        if memory["training"]:
            memory["scores"][layer] = h
        running, before = memory["running"], memory["sum"]
        h = (torch.ones_like(h) if layer == memory["depth"] else h) * running
        halts = running & (before + h >= 1 - self.epsilon)
        share = torch.where(halts, 1 - before, h)
        memory["sum"], memory["running"] = before + h, running & ~halts
        memory["cost"] = torch.where(halts, layer + share, memory["cost"])
        memory["read"] = memory.get("read", 0.0) + share[:, -1:] * class_token

    def read_out(self, memory: dict[str, Any], prefix: "Tensor", tokens: "Tensor") -> "Tensor":
        """Return the class token's weighted sum over layers, and the other prefix tokens unchanged."""
        import torch

        h, depth = memory["sum"], memory["depth"]
        if memory["training"]:  # where all tokens have a score, which the loss needs
            h = self._scores(torch.cat([tokens, prefix[:, :1]], dim=1), depth)
        self._gather(memory, depth, h, prefix[:, 0])
        return torch.cat([memory["read"][:, None], prefix[:, 1:]], dim=1)

    def loss(self, inputs: LossInputs) -> "Tensor":
        """Return the weighted sum of the two terms."""
        import torch

        scores = inputs.memory["scores"]
        H = torch.stack([h.mean() for h in scores.values()])
        H = (H / H.sum()).clamp(0.01, 0.99)
        log_prior = -0.5 * (H.new_tensor(list(scores)) - self._target(inputs)).square() - 0.5 * math.log(2 * math.pi)
        divergence = (log_prior.exp() * (log_prior - H.log())).mean()
        return self.ponder * inputs.memory["cost"].mean() + self.distribution * divergence

    def inactive(self, teacher: bool) -> tuple[str, ...]:
        """Return the terms whose weight is 0."""
        weights = {"ponder": self.ponder, "distribution": self.distribution}
        return tuple(name for name, weight in weights.items() if not weight)

    def _target(self, inputs: LossInputs) -> float:
        """Return the mean of the prior."""
        if self.target == "budget":
            return self._budgeted(inputs)
        return 0.75 * inputs.memory["depth"] if self.target is None else self.target

    @staticmethod
    def _budgeted(inputs: LossInputs) -> float:
        """Return the mean number of blocks that a token goes through with the budget's token counts."""
        share, blocks = 1.0, 0.0
        for block in range(inputs.memory["depth"]):
            share = inputs.shares.get(block, share)
            blocks += share
        return blocks


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [AViT]
