"""Each token gathers halting scores, one a layer, and is gone when it has enough of them."""

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

import sparsebench
from sparsebench import LossInputs, Mask, Place, Published, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AViT(Strategy):
    """Halts a token when its halting scores add up to one, so the depth of a token depends on the image.

    Yin et al. (2022): after layer l token k has the score h_k^l = sigmoid(gamma X_k^l[0] + beta), made of the first
    channel of its embedding, and 1 after the last layer. It halts at the first l* at which the sum of its scores
    reaches 1 - epsilon, with the remainder R_k = 1 - sum_{l < l*} h_k^l, and is then gone from the attention of all
    others. In training it stays in the network as a zero, so that it still has scores; in the test it is removed. The
    head reads sum_{l < l*} h^l X^l + R X^{l*} of the class token; so it needs one that the head reads. It cannot act on
    the theory models.

    Added to the loss: `ponder` times l* + R_k, mean over tokens and images, the class token among the tokens; and
    `distribution` times mean_l p_l (log p_l - log H_l). p_l is the normal density of mean `target` and variance 1 at
    layer l, not divided by its sum. H_l is the mean of sigmoid(gamma X_k^l[0] + beta) over all tokens, halted or not,
    and images of the batch (of each part, where a batch is cut), in the last layer as in any, divided by the sum over
    the layers and clamped to [.01, .99]. The default target is the published one, layer 9 of 12: 3/4 of the depth.
    "budget" is the number of blocks that a token goes through in the mean when the budget's counts are kept, so that
    tokens that halt there spend it. Either way how much is spent is learned, and need not be what was asked for: the
    record says what it was.

    `beta` is -ln(L - 1) unless it is given, for a network of L layers: then h = 1 / L where the first channel is 0, the
    largest beta with which a token whose channel stays there goes through all layers. A network that begins with random
    weights has its first channel about 0, off by .3 to .7 (measured), so that some tokens halt early from the start,
    some never, and many have a gradient. The published values, -30 for DeiT-Ti and -75 for DeiT-S, go with the first
    channel of those pretrained networks: where it is about 0 they halt nothing, and have no gradient to learn it.
    Blocks after that in which the class token of all images halts learn nothing from the labels.

    What differs: a class token that has halted stays as a key, which changes nothing that the head reads, but may
    change when patches halt after it; in training a patch that has halted attends to itself too; register and
    distillation tokens never halt; of an image whose patches have all halted, the one of the last to halt that has
    gathered least goes on, as no image may be left without a patch. With blocks in the budget (`blocks=3+6+9`), scores
    are gathered before those blocks and after the last only.
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
        "beta depends on the depth unless it is given; a class token that has halted stays as a key, register and "
        "distillation tokens never halt, and an image keeps one patch at least; in training a patch that has halted "
        "attends to itself too"
    )

    scale: float = Field(10.0, description="gamma, what the first channel is multiplied by")
    beta: float | None = Field(None, description="what is added to it; -ln(L - 1) unless given; published: -30, -75")
    epsilon: float = Field(0.01, ge=0, lt=1, description="a token halts when its scores come to one less this")
    ponder: float = Field(5e-4, ge=0, description="weight of the mean depth and remainder")
    distribution: float = Field(1e-3, ge=0, description="weight of the divergence of the scores from the prior")
    target: float | Literal["budget"] | None = Field(
        None, description="the prior's mean, 1 or more layers, or the budget's; 3/4 of the depth unless given"
    )

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: Any) -> Any:
        if isinstance(target, float) and target < 1:
            raise ValueError("a number of layers must be 1 or more")
        return target

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the scores, and of one term of what the head reads; block 0 stands for the last layer."""
        return place.width + (place.tokens + 1 if place.block else 0)

    def plan(self, view: TokenView, keep: int) -> Mask | None:
        """Let tokens halt by what the blocks before have made of them."""
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
        """Add the scores h (B, patches + 1) of a layer, and what the head reads of the (B, C) class token there."""
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
        """Return the class token as it halted, and the others as they are."""
        import torch

        h, depth = memory["sum"], memory["depth"]
        if memory["training"]:  # only there all tokens have a score, and only there it is asked for
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
        """Return the prior's mean."""
        if self.target == "budget":
            return self._budgeted(inputs)
        return 0.75 * inputs.memory["depth"] if self.target is None else self.target

    @staticmethod
    def _budgeted(inputs: LossInputs) -> float:
        """Return how many blocks a token goes through when the budget's counts are kept, mean over the tokens."""
        share, blocks = 1.0, 0.0
        for block in range(inputs.memory["depth"]):
            share = inputs.shares.get(block, share)
            blocks += share
        return blocks


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [AViT]
