"""A small network learns which tokens can go, and how many is a term of the loss."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

import sparsebench
from sparsebench import Keep, Lesson, Mask, Place, Plan, Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class DynamicViT(Strategy):
    """Keeps the tokens that a predictor, trained with the network, gives the largest probability to be kept.

    Rao et al. (2021): before a stage's block, z = GELU(W LN(x)); the first half of z is the token's own, the mean of
    the second half over the tokens still kept is common to all; from both, three layers make the log-probabilities to
    keep and to drop. In training all tokens stay: a hard Gumbel-softmax draws D in {0, 1} for each, attention leaves
    out what has D = 0 (eq. 11), and gradients go straight through. In the test the K most probable are gathered.

    Added to the loss: `ratio` times the mean over the stages of (mean_i D_i - K / N)^2; and, where the network began
    with weights trained for these classes (--weights, --pretrained), which are then its teacher, `kl` times
    KL(student || teacher) of the logits and `distillation` times the mean squared difference of the final tokens that
    were kept. It cannot act on the theory models.
    """

    name: ClassVar[str] = "dynamic_vit"
    site: ClassVar[Site] = "block"
    trained: ClassVar[bool] = True
    distils: ClassVar[bool] = True
    citation: ClassVar[str] = "Rao et al., DynamicViT: efficient ViTs with dynamic token sparsification, NeurIPS 2021"
    bibtex: ClassVar[str] = """@inproceedings{rao2021dynamicvit,
  title = {{DynamicViT}: Efficient Vision Transformers with Dynamic Token Sparsification},
  author = {Rao, Yongming and Zhao, Wenliang and Liu, Benlin and Lu, Jiwen and Zhou, Jie and Hsieh, Cho-Jui},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2021}
}"""

    ratio: float = Field(2.0, ge=0, description="weight of the squared difference to the share of tokens to be kept")
    kl: float = Field(0.5, ge=0, description="weight of the divergence of the logits from the teacher's")
    distillation: float = Field(0.5, ge=0, description="weight of the difference of kept tokens to the teacher's")

    def module(self, place: Place) -> "Module":
        """Return the two halves of the predictor."""
        from torch import nn

        C = place.width
        own = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.GELU())
        both = nn.Sequential(
            nn.Linear(2 * (C // 2), C // 2), nn.GELU(), nn.Linear(C // 2, C // 4), nn.GELU(), nn.Linear(C // 4, 2)
        )
        return nn.ModuleDict({"own": own, "both": both})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the predictor."""
        C = place.width
        return place.tokens * (C * C + 2 * (C // 2) * (C // 2) + (C // 2) * (C // 4) + (C // 4) * 2)

    def plan(self, view: TokenView, keep: int) -> Plan:
        """Keep the most probable; in training draw a mask."""
        import torch
        import torch.nn.functional as F

        half, D = view.tokens.shape[2] // 2, view.weights[:, :, None]
        z = view.learned["own"](view.tokens)
        common = (D * z[:, :, half : 2 * half]).sum(dim=1, keepdim=True) / D.sum(dim=1, keepdim=True).clamp(min=1e-6)
        both = torch.cat([z[:, :, :half], common.expand(-1, z.shape[1], -1)], dim=2)
        log_p = F.log_softmax(view.learned["both"](both), dim=2)
        if not view.training:
            return Keep.top(log_p[:, :, 0], keep)
        noise = torch.stack([view.random(0), view.random(1)], dim=2).clamp(1e-7, 1 - 1e-7)
        soft = (log_p - (-noise.log()).log()).softmax(dim=2)[:, :, 0]
        drawn = (soft > 0.5).to(soft.dtype) + soft - soft.detach()
        view.memory.setdefault("kept", {})[view.block] = view.weights * drawn
        return Mask(drawn, scores=log_p[:, :, 0].detach())

    def loss(self, lesson: Lesson) -> "Tensor":
        """Return the weighted sum of the three terms."""
        import torch
        import torch.nn.functional as F

        kept = lesson.memory["kept"]
        off = torch.stack([(D.mean(dim=1) - lesson.shares[block]).square().mean() for block, D in kept.items()])
        loss = self.ratio * off.mean()
        if lesson.teacher is None:
            return loss
        student, teacher = (F.log_softmax(told.logits, dim=1) for told in (lesson.student, lesson.teacher))
        away = (lesson.student.tokens - lesson.teacher.tokens).square().mean(dim=2)
        tokens = (lesson.weights * away).sum() / lesson.weights.sum().clamp(min=1e-6)
        return (
            loss
            + self.kl * F.kl_div(teacher, student, reduction="batchmean", log_target=True)
            + (self.distillation * tokens)
        )


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [DynamicViT]
