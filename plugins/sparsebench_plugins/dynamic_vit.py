"""A small network learns which tokens can be removed; a term of the loss sets how many."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

import sparsebench
from sparsebench import Disposal, LossInputs, Mask, Place, Plan, Published, Site, Strategy, TokenView
from sparsebench.strategy.plans import dispose, squeeze

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class DynamicViT(Strategy):
    """Keeps the tokens with the largest keep probability, by a predictor that is trained with the network.

    Rao et al. (2021): before the block of a stage, z = GELU(W LN(x)). The first half of z is the token's own; the
    second half is replaced by its mean over the tokens that are still kept. From both halves three layers compute the
    log-probabilities to keep and to drop the token. In training all tokens stay: a hard Gumbel-softmax draws D in
    {0, 1} for each token, attention leaves out tokens with D = 0 (eq. 11), and gradients are straight-through. In the
    test the K most probable tokens are gathered.

    Training begins with the weights of the dense network of the same data and repetition, which is also the teacher.
    Added to the loss: `share` times the mean over stages of (mean_i D_i - rho)^2, where rho is the budget's share of
    the tokens at the stage; `kl` times KL(teacher || student) of the logits, as released, or KL(student || teacher)
    with divergence=paper; and `distillation` times the mean squared difference of the final kept tokens, without
    gradients to D. The network's own weights are frozen in the first share `frozen` of the training (published: 5 of 30
    epochs); then they have `backbone_rate` times the recipe's learning rate. The predictor always has the recipe's.

    With disposal=squeeze the strategy is dTPS of Wei et al. (2023), whose released networks have this predictor: each
    token that leaves at a stage is added to the kept token with the largest cosine, see `tps`. In training the present
    tokens with D = 0 are added to those with D = 1, without gradients to D. It cannot act on the theory models.
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
    published: ClassVar[tuple[Published, ...]] = (Published("dynamic_vit:keep_rate=0.7", "DeiT-S", 2.9),)

    disposals: ClassVar[tuple[Disposal, ...]] = ("drop", "squeeze")

    share: float = Field(2.0, ge=0, description="weight of the squared difference to the budget's share of tokens")
    kl: float = Field(0.5, ge=0, description="weight of the divergence of the logits from the teacher's")
    distillation: float = Field(0.5, ge=0, description="weight of the difference of kept tokens to the teacher's")
    divergence: Literal["released", "paper"] = Field(
        "released", description="KL(teacher || student), or as in the paper KL(student || teacher)"
    )
    backbone_rate: float = Field(0.01, ge=0, description="factor of the learning rate of the network's own weights")
    frozen: float = Field(1 / 6, ge=0, le=1, description="first share of the training, with these weights frozen")

    def module(self, place: Place) -> "Module":
        """Return the two halves of the predictor."""
        from torch import nn

        C = place.width
        embedding = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.GELU())
        classifier = nn.Sequential(
            nn.Linear(2 * (C // 2), C // 2), nn.GELU(), nn.Linear(C // 2, C // 4), nn.GELU(), nn.Linear(C // 4, 2)
        )
        return nn.ModuleDict({"own": embedding, "both": classifier})

    def own_macs(self, place: Place) -> float:
        """Return the MACs of the predictor."""
        C = place.width
        return place.tokens * (C * C + 2 * (C // 2) * (C // 2) + (C // 2) * (C // 4) + (C // 4) * 2)

    def plan(self, view: TokenView, keep: int) -> Plan:
        """Keep the most probable tokens; in training draw them."""
        import torch
        import torch.nn.functional as F

        x, before = view.tokens, view.weights
        half = x.shape[2] // 2
        z = view.learned["own"](x)
        D = before[:, :, None]
        # The mean of the second half over the tokens that are still there.
        common = (D * z[:, :, half : 2 * half]).sum(dim=1, keepdim=True) / D.sum(dim=1, keepdim=True).clamp(min=1e-6)
        features = torch.cat([z[:, :, :half], common.expand(-1, z.shape[1], -1)], dim=2)
        log_p = F.log_softmax(view.learned["both"](features), dim=2)
        if not view.training:
            return dispose(self.disposal, log_p[:, :, 0], keep, view)

        # Gumbel noise draws; the gradient is that of the soft choice.
        noise = torch.stack([view.random(0), view.random(1)], dim=2).clamp(1e-7, 1 - 1e-7)
        soft = (log_p - (-noise.log()).log()).softmax(dim=2)[:, :, 0]
        drawn = (soft > 0.5).to(soft.dtype) + soft - soft.detach()
        view.memory.setdefault("kept", {})[view.block] = before * drawn
        hosts = (before > 0.5) & (soft > 0.5)
        values = squeeze(x, hosts, (before > 0.5) & ~hosts) if self.disposal == "squeeze" else None
        return Mask(drawn, scores=log_p[:, :, 0].detach(), values=values)

    def network_rate(self, done: float) -> float:
        """Freeze the network at first; then let it learn slowly."""
        return 0.0 if done < self.frozen else self.backbone_rate

    def inactive(self, teacher: bool) -> tuple[str, ...]:
        """Return the terms whose weight is 0, and those that need a missing teacher."""
        weights = {"share": self.share, "kl": self.kl, "distillation": self.distillation}
        return tuple(name for name, weight in weights.items() if not (weight and (teacher or name == "share")))

    def loss(self, inputs: LossInputs) -> "Tensor":
        """Return the weighted sum of the three terms."""
        import torch
        import torch.nn.functional as F

        drawn = inputs.memory["kept"]
        errors = torch.stack([(D.mean(dim=1) - inputs.shares[block]).square().mean() for block, D in drawn.items()])
        loss = self.share * errors.mean()
        if inputs.teacher is None:
            return loss
        student, teacher = (F.log_softmax(outputs.logits, dim=1) for outputs in (inputs.student, inputs.teacher))
        first, second = (teacher, student) if self.divergence == "released" else (student, teacher)
        divergence = F.kl_div(second, first, reduction="batchmean", log_target=True)
        kept = inputs.weights.detach()
        distances = (inputs.student.tokens - inputs.teacher.tokens).square().mean(dim=2)
        tokens = (kept * distances).sum() / kept.sum().clamp(min=1e-6)
        return loss + self.kl * divergence + self.distillation * tokens


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [DynamicViT]
