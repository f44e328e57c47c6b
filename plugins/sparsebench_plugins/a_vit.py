"""Each token gathers halting scores, one a layer, and is gone when it has enough of them."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Lesson, Mask, Place, Schedule, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AViT(Strategy):
    """Lets a token halt when the halting scores it has gathered come to one; how deep it gets hangs on the image.

    Yin et al. (2022): after layer l token k has the score h_k^l = sigmoid(gamma X_k^l[0] + beta), made of the first
    channel of its embedding, and 1 after the last layer. It halts at the first l* at which the sum of its scores
    reaches 1 - epsilon, with the remainder R_k = 1 - sum_{l < l*} h_k^l, and is then gone from the attention of all
    others, in training and in the test. The head reads sum_{l < l*} h^l X^l + R X^{l*} of the class token; so it
    needs one that the head reads. It cannot act on the theory models.

    Added to the loss, mean over images: `ponder` times the mean of l* + R_k over the tokens, the class token among
    them; and `distribution` times KL(H || prior), where H^l is the mean score of layer l, of tokens that are gone 0,
    divided by the sum over the layers and clamped to [.01, .99], and the prior the normal density of mean `target` and
    variance 1 at the layers, divided by its sum. The published target is 8 of 12. Here it is the number of blocks that
    a token goes through in the mean when the budget's counts are kept, so that tokens that halt there spend it. How
    much is spent is learned all the same, and need not be what was asked for: the record says what it was.

    `beta` is -ln(L - 1) unless it is given, for a network of L layers: then h = 1 / L where the first channel is 0, the
    largest beta with which a token whose channel stays there goes through all layers. A network that begins with random
    weights has its first channel about 0, off by .3 to .7 (measured), so that some tokens halt early from the start,
    some never, and many have a gradient. The published values, -30 for DeiT-Ti and -75 for DeiT-S, go with the first
    channel of those pretrained networks: where it is about 0 they halt nothing, and have no gradient to learn it.
    Blocks after that in which the class token of all images halts learn nothing from the labels.

    What differs: a class token that has halted stays as a key, which changes nothing that the head reads, but may
    change when patches halt after it; register and distillation tokens never halt; of an image whose patches have all
    halted, the one that has gathered least goes on. With `--blocks`, scores are gathered before those blocks only.
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

    gamma: float = Field(10.0, description="what the first channel is multiplied by")
    beta: float | None = Field(None, description="what is added to it; -ln(L - 1) unless given; published: -30, -75")
    epsilon: float = Field(0.01, ge=0, lt=1, description="a token halts when its scores come to one less this")
    ponder: float = Field(5e-4, ge=0, description="weight of the mean depth and remainder")
    distribution: float = Field(1e-3, ge=0, description="weight of the divergence of the scores from the prior")
    target: float | None = Field(None, ge=1, description="the prior's mean, in layers; the budget's unless given")

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the scores, and of one term of what the head reads; block 0 stands for the last layer."""
        return place.width + (place.tokens + 1 if place.block else 0)

    def plan(self, view: TokenView, keep: int) -> Mask | None:
        """Let tokens halt by what the blocks before have made of them."""
        import torch

        patch, class_token, memory = view.tokens[:, :, 0], view.prefix[:, 0], view.memory
        if not memory:
            nothing = patch.new_zeros(len(patch), patch.shape[1] + 1)
            memory |= {"sum": nothing, "cost": nothing, "running": nothing == 0, "scores": {}, "depth": view.depth}
        if view.block == 0:
            return None
        # One column for each patch of the input and one for the class token, into which padding (-1) is written first.
        columns = view.index % memory["sum"].shape[1]
        beta = -math.log(view.depth - 1) if self.beta is None else self.beta
        h = torch.zeros_like(memory["sum"]).scatter(1, columns, torch.sigmoid(self.gamma * patch + beta))
        own = torch.sigmoid(self.gamma * class_token[:, :1] + beta)
        self._gather(memory, view.block, torch.cat([h[:, :-1], own], dim=1), class_token)
        total = memory["sum"].gather(1, columns).detach()
        stays = memory["running"].gather(1, columns) & view.there
        least = total.masked_fill(~view.there, torch.inf).sort(dim=1, stable=True).indices[:, :1]
        last = torch.zeros_like(stays).scatter(1, least, True)
        return Mask(stays | (last & ~stays.any(dim=1, keepdim=True)), scores=-total)

    def _gather(self, memory: dict[str, Any], layer: int, h: "Tensor", class_token: "Tensor") -> None:
        """Add the scores h (B, 1 + patches) of a layer, and what the head reads of the (B, C) class token there."""
        import torch

        running, before = memory["running"], memory["sum"]
        h = h * running
        halts = running & (before + h >= 1 - self.epsilon)
        share = torch.where(halts, 1 - before, h)
        memory["scores"][layer] = h
        memory["sum"], memory["running"] = before + h, running & ~halts
        memory["cost"] = torch.where(halts, layer + share, memory["cost"])
        memory["read"] = memory.get("read", 0.0) + share[:, -1:] * class_token

    def read_out(self, memory: dict[str, Any], prefix: "Tensor") -> "Tensor":
        """Return the class token as it halted, and the others as they are."""
        import torch

        self._gather(memory, memory["depth"], torch.ones_like(memory["sum"]), prefix[:, 0])
        return torch.cat([memory["read"][:, None], prefix[:, 1:]], dim=1)

    def loss(self, lesson: Lesson) -> "Tensor":
        """Return the weighted sum of the two terms."""
        import torch

        scores = lesson.memory["scores"]
        H = torch.stack([h.mean(dim=1) for h in scores.values()], dim=1)
        H = (H / H.sum(dim=1, keepdim=True)).clamp(0.01, 0.99)
        target = self._budgeted(lesson) if self.target is None else self.target
        prior = (-0.5 * (H.new_tensor(list(scores)) - target).square()).log_softmax(dim=0)
        divergence = (H * (H.log() - prior)).sum(dim=1).mean()
        return self.ponder * lesson.memory["cost"].mean() + self.distribution * divergence

    @staticmethod
    def _budgeted(lesson: Lesson) -> float:
        """Return how many blocks a token goes through when the budget's counts are kept, mean over the tokens."""
        share, deep = 1.0, 0.0
        for block in range(lesson.memory["depth"]):
            share = lesson.shares.get(block, share)
            deep += share
        return deep


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [AViT]
