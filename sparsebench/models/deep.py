"""Acting on any timm VisionTransformer or Eva, unmodified, and on small Vision Transformers for small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import Attention, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sparsebench import seeds
from sparsebench.errors import UnsupportedError
from sparsebench.measure.selection import neighbour_agreement
from sparsebench.models.actor import Pass, SplitPass, exact, full, in_chunks
from sparsebench.models.attention import PositionalAttention, attend, fields_of, gather_heads, positions_of, qkv
from sparsebench.models.timm_parts import (
    POOLS,
    ConvStem,
    Rotations,
    branch_input,
    branch_output,
    check_block,
    pool,
    refuse,
    vit_cost,
)
from sparsebench.strategy import tokens
from sparsebench.strategy.base import ModelOutputs, Strategy
from sparsebench.strategy.plans import Keep, Plan
from sparsebench.strategy.tokens import Resting
from sparsebench.strategy.view import NEEDS, RESULTS

LUMA = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in grey (ITU-R BT.601), as Pillow and torchvision have them."""
ELSEWHERE = {"input": frozenset({"pixels", "outputs"}), "block": frozenset({"previous_attention"})}
"""The fields of the view, beside the tokens, that a site other than attention gives, which gives all others."""
TOKENS = frozenset({"tokens", "prefix"})


class DeepViT:
    """A timm VisionTransformer or Eva that a strategy can act on; without one it is just called.

    Nothing of the model is changed: where a strategy acts, the parts of the model are called here in timm's order, with
    the choices between them.

    In bfloat16 the products of the model are made by autocast. What a strategy sees and computes stays in float32, so
    that rounding makes no ties between scores, and tokens are merged in float32; logits are float32.

    Args:
        vit: the model.
        mean, std: what its pixels are normalised with, one for all channels or one a channel; of others, as of RGB for
            a network of one channel or four, their mean is for all.
        precision: of products, "float32" or "bfloat16"; the weights keep their own.

    Attributes:
        module: the timm model.
        grid: (rows, columns) of its patches; `patch` their (height, width) in pixels.
        channels: of its pixels; a network of one takes pictures in colour as grey.
        cost: its closed form.
        attention_source: what "attention" means here, for the record.

    Raises:
        UnsupportedError: an architecture in which tokens cannot be dropped safely, with the reason.
    """

    def __init__(
        self,
        vit: Any,
        *,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        precision: str = "float32",
    ):
        refuse(vit)
        self.halved = precision == "bfloat16"
        self.module = vit
        self.channels: int = next(part.in_channels for part in vit.patch_embed.modules() if isinstance(part, nn.Conv2d))
        device = next(vit.parameters()).device
        for name, values in (("pixel_mean", mean), ("pixel_std", std)):  # which go where the weights go
            each = torch.tensor(values, dtype=torch.float64, device=device).reshape(-1, 1, 1)
            each = each if len(each) == self.channels else each.mean(dim=0, keepdim=True)
            vit.register_buffer(name, each, persistent=False)
        self.prefix: int = vit.num_prefix_tokens
        self.grid: tuple[int, int] = tuple(self.module.patch_embed.grid_size)
        self.patch: tuple[int, int] = tuple(self.module.patch_embed.patch_size)
        self.cost = vit_cost(vit)
        self.class_rows = self.cost.class_rows
        self.attention_source = ("received", "class", "class+distillation")[self.class_rows]

    @property
    def pixels(self) -> tuple[int, int, int]:
        """(channels, height, width) of what the model takes."""
        (rows, columns), (height, width) = self.grid, self.patch
        return self.channels, rows * height, columns * width

    def __call__(self, images: Tensor, acting: Pass | None = None) -> Tensor:
        """Return logits (B, classes) of images (B, channels, height, width): uint8, or real in [0, 1].

        For a network of one channel they may have three.
        """
        normed = self.normalise(images)
        with self._precision(images.device.type):
            if acting is None:
                return self.module(normed).to(normed.dtype)
            return self.act(normed, acting, lambda: self._real(images)).to(normed.dtype)

    def act(self, normed: Tensor, acting: Pass, pixels: Callable[[], Tensor]) -> Any:
        """Return what the model returns, the strategy acting.

        Args:
            normed: (B, channels, height, width), as the model takes them.
            acting: the pass.
            pixels: gives the same images in [0, 1].
        """
        return _call(self.module, partial(self._forward, acting, pixels), normed)

    def _forward(self, acting: Pass, pixels: Callable[[], Tensor], normed: Tensor) -> Any:
        vit = self.module
        if acting.reads_out:
            self.check(acting.actor.strategy)
        placed = vit._pos_embed(vit.patch_embed(normed))
        x, table = placed if isinstance(vit, Eva) else (placed, None)
        if acting.acts_at("input", 0):
            x = self._input(pixels, acting, x)
        x = vit.norm_pre(x)
        turn = Rotations(vit, self.grid, table)
        for number, block in enumerate(vit.blocks):
            x = _call(block, partial(self._block, acting, turn, number, block), x)
        if acting.reads_out:
            patches = x[:, self.prefix :]
            x = torch.cat([acting.read_out(x[:, : self.prefix], patches), patches], dim=1)
        x = vit.norm(x)
        if acting.whole or vit.global_pool not in POOLS:
            outputs = vit.forward_head(x)
        else:
            outputs = vit.head(vit.head_drop(vit.fc_norm(pool(vit, acting, x))))
        if acting.learns:
            logits = outputs if isinstance(outputs, Tensor) else outputs[0]  # distilled ones give two in training
            seen = x[:, self.prefix :].to(acting.sizes.dtype)
            acting.student = ModelOutputs(logits.to(normed.dtype), seen)
        return outputs

    @torch.no_grad()
    def tell(self, images: Tensor) -> ModelOutputs:
        """Return what comes out of images, as they come, with nothing acting, without gradients."""
        with self._precision(images.device.type):
            return self.tell_of(self.normalise(images))

    @torch.no_grad()
    def tell_of(self, normed: Tensor) -> ModelOutputs:
        """Return what comes out of pixels as the model takes them, with nothing acting, without gradients."""
        x = self.module.forward_features(normed)
        return ModelOutputs(self.module.forward_head(x).to(normed.dtype), x[:, self.prefix :].to(normed.dtype))

    def normalise(self, images: Tensor) -> Tensor:
        """Return images, as they come, as the model takes them: real, their mean taken away, divided by their std."""
        real = self._real(images)
        mean, std = self.module.pixel_mean.to(real.dtype), self.module.pixel_std.to(real.dtype)
        return (real - mean if real is images else real.sub_(mean)).div_(std)

    def restore(self, normed: Tensor) -> Tensor:
        """Return images in [0, 1] from what `normalise` makes of them."""
        return normed * self.module.pixel_std.to(normed.dtype) + self.module.pixel_mean.to(normed.dtype)

    def _real(self, images: Tensor) -> Tensor:
        """Return images in [0, 1], as many channels as the network has."""
        if not images.is_floating_point():
            images = images.to(next(self.module.parameters()).dtype).div_(255)
        if self.channels == 1 and images.shape[1] == 3:
            return (images * images.new_tensor(LUMA).reshape(3, 1, 1)).sum(dim=1, keepdim=True)
        return images

    @contextmanager
    def _precision(self, device: str) -> Iterator[None]:
        """Make products in the network's precision, with the attention kernel that is the faster one in it.

        On a CPU torch's fused attention in bfloat16 takes 1.4 to 1.7 times as long as plain attention, and 1.9 to 7
        times with its gradient (torch 2.15, one thread, 37 to 1025 tokens); in float32 it is the faster one.
        """
        if not self.halved:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device, torch.bfloat16))
            for part in self.module.modules() if device == "cpu" else ():
                if getattr(part, "fused_attn", False):
                    part.fused_attn = False
                    stack.callback(setattr, part, "fused_attn", True)
            yield

    def _apply(self, plan: Plan, x: Tensor, sizes: Tensor) -> Tensor:
        """Return what the plan makes of the tokens x, see `tokens.apply`."""
        with exact(x.device):
            return tokens.apply(plan, x, sizes, self.prefix)

    def check(self, strategy: Strategy) -> None:
        """Raise UnsupportedError for a strategy that needs what the architecture cannot give."""
        site = strategy.site
        given = TOKENS | ELSEWHERE.get(site, NEEDS.difference({"relevance"}, *ELSEWHERE.values()))
        for block in self.module.blocks if site == "attention" else ():
            check_block(block)
        given -= frozenset() if self.class_rows else {"class_attention"}
        if missing := sorted(strategy.reads() - given):
            raise UnsupportedError(
                f"'{strategy.name}' needs {', '.join(missing)}, which this network of {self.class_rows} class tokens "
                f"cannot give at the {site} site (it gives {', '.join(sorted(given))})"
            )
        if strategy.reads_out and self.module.global_pool != "token":
            raise UnsupportedError(
                f"'{strategy.name}' says what the head reads of the class token, and this network's head reads another"
                f" (global_pool={self.module.global_pool})"
            )

    def _input(self, pixels: Callable[[], Tensor], acting: Pass, x: Tensor) -> Tensor:
        """Act after the position embedding, before the first block."""
        given = {
            **self._tokens(x),
            "pixels": lambda: _cut(pixels(), self.patch),
            "outputs": lambda: in_chunks(partial(self._whole, full(x[:, : self.prefix])), len(x)),
        }
        plan = acting.decide(0, given)
        return x if plan is None else self._apply(plan, x, x.new_ones(x.shape[0], self.cost.tokens))

    def _whole(self, prefix: Tensor, tokens_: Tensor, sample: Tensor) -> Tensor:
        """Return the logits of other patch tokens at the input site, with each sample's prefix (B, P, C), in a test."""
        vit = self.module
        training = [part for part in vit.modules() if part.training]
        try:
            for part in training:
                part.training = False
            x = vit.norm_pre(torch.cat([prefix[sample], tokens_.to(prefix.dtype)], dim=1))
            table = None if getattr(vit, "rope", None) is None else vit.rope.get_embed(shape=list(self.grid))
            turn = Rotations(vit, self.grid, table)
            for number, block in enumerate(vit.blocks):
                x = block(x, **turn.of(number))
            return vit.forward_head(vit.norm(x))
        finally:
            for part in training:
                part.training = True

    def _tokens(self, x: Tensor) -> dict[str, Callable[[], Any]]:
        return {"tokens": lambda: x[:, self.prefix :], "prefix": lambda: x[:, : self.prefix]}

    def _block(self, acting: Pass, turn: Rotations, number: int, block: Any, x: Tensor) -> Tensor:
        """Run one block, with the strategy's choice before it or inside it."""
        if acting.acts_at("block", number):
            sizes, given = acting.sizes, self._tokens(x)
            if (previous := acting.previous) is not None:
                given["previous_attention"] = lambda: previous
            plan = acting.decide(number, given)
            if isinstance(plan, Resting) and plan.index.shape[1]:
                return self._run_active(acting, turn, number, block, x, plan.active)
            x = x if plan is None else self._apply(plan, x, sizes)
        return self._run(acting, turn, number, block, x)

    def _run_active(self, acting: Pass, turn: Rotations, number: int, block: Any, x: Tensor, active: Tensor) -> Tensor:
        """Run one block on the tokens at those positions (B, M) alone; the others rest."""
        index, sizes, previous = acting.index, acting.sizes, acting.previous
        acting.index, acting.sizes = index.gather(1, active), sizes.gather(1, active)
        acting.resting = index.shape[1] - active.shape[1]
        rows = tokens.with_prefix(active, self.prefix)
        new = self._run(acting, turn, number, block, tokens.gather(x, rows))
        acting.index, acting.sizes, acting.resting = index, sizes, 0
        if previous is not None and acting.previous is not None and acting.previous is not previous:
            acting.previous = previous.scatter(1, active, acting.previous)
        return tokens.put_back(x, rows, new)

    def _run(self, acting: Pass, turn: Rotations, number: int, block: Any, x: Tensor) -> Tensor:
        """Run one block on the tokens that take part, with the strategy's choice inside it.

        Where the choice needs nothing that attention makes, it comes first and only the tokens that stay are queries
        (all are keys and values): the same result for fewer MACs.
        """
        positional = isinstance(block.attn, PositionalAttention)
        rope = {"rope": positions_of(self.module, acting)} if positional else turn.of(number, acting)
        acts, looked = acting.acts_at("attention", number), _reads_attention(acting, number)
        if not (acts or looked or positional) and acting.even:
            acting.went(acting.present)
            return type(block).forward(block, x, **rope)
        check_block(block)
        came, sizes, keys, after = acting.present, acting.sizes, self._keys(acting), RESULTS & acting.requires
        q, k, v = qkv(block.attn, branch_input(block, 1, x), **rope)
        there = sizes > 0 if acting.ragged else None
        given = fields_of(block.attn, q, k, v, self.prefix, self.class_rows, **keys, present=there)
        plan, rows = None, None
        if looked:  # the strategy chooses by it before the next block
            with exact(x.device):
                acting.previous = full(given["attention"]()) * (self.prefix + (sizes > 0).sum(dim=1, keepdim=True))
        if acts and not after:
            plan = acting.decide(number, given)
            if isinstance(plan, Keep) and plan.fuse is None:
                rows = tokens.rows_of(plan, self.prefix)
                q, x = gather_heads(q, rows), tokens.gather(x, rows)
        branch = branch_output(block, 1, attend(block.attn, q, k, v, **keys, rows=rows))
        x = x + branch
        if acts and after:
            given |= {**self._tokens(x), "branch": lambda: branch[:, self.prefix :]}
            plan = acting.decide(number, given)
        scoring = self.cost.scoring(acting.requires if acts else ["attention"] * looked)
        acting.went(came, early=rows is not None, scoring=scoring)
        if plan is not None and rows is None:
            x = self._apply(plan, x, sizes)
        return x + branch_output(block, 2, block.mlp(branch_input(block, 2, x)))

    def _keys(self, acting: Pass) -> dict[str, Tensor | None]:
        """Return what makes the P + N tokens of the moment count differently as keys, see `attend`."""
        bias = acting.bias()
        return {
            "bias": None if bias is None else F.pad(bias, (self.prefix, 0))[:, None, None, :],
            "weights": F.pad(acting.weights, (self.prefix, 0), value=1.0) if acting.masked else None,
        }


def _call(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return what a forward pass makes of a module's input, with the hooks that users have put on the module."""
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return forward(x)
    before = vars(module).get("forward")
    module.forward = forward
    try:
        return module(x)
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _cut(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return (B, N, channels, height, width), the pixels of each patch of images."""
    height, width = patch
    return images.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _reads_attention(acting: Pass, block: int) -> bool:
    """Say whether the strategy chooses by this block's attention before the next one."""
    reads = "previous_attention" in acting.requires and acting.site == "block"  # a replay requires nothing
    return reads and block + 1 < acting.actor.depth and acting.acts(block + 1)


class PositionalDeepViT(DeepViT):
    """A timm VisionTransformer whose attention is positional, as `small_vit` makes it; it shows what positions learn.

    Args:
        vit: the model.
        order: (N,) the place in plain order of the patch that each position shows; None for plain order.
        precision: see `DeepViT`.
    """

    shows: ClassVar = {"neighbour_agreement": "fraction", "neighbour_agreement_shuffled": "fraction"}
    shuffles: ClassVar[int] = 20

    def __init__(self, vit: Any, order: np.ndarray | None = None, *, precision: str = "float32"):
        super().__init__(vit, precision=precision)
        self.order = np.arange(self.cost.tokens) if order is None else order

    def similarity(self) -> np.ndarray:
        """Return (N, N) float64, (P W_Q)(P W_K)^T / sqrt(d_h) of the first block, patches only, mean over heads."""
        attn = self.module.blocks[0].attn
        with torch.no_grad():
            q, k = attn.queries_keys(self.module.pos_embed)
            similarity = (q * attn.scale @ k.transpose(-2, -1)).mean(dim=1)[0, self.prefix :, self.prefix :]
        return similarity.double().cpu().numpy()

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return the neighbour agreement of the first block, and its mean over `shuffles` shuffled orders."""
        similarity = self.similarity()
        null = [
            neighbour_agreement(similarity, self.grid, seeds.generator("shuffled positions", i).permutation(self.order))
            for i in range(self.shuffles)
        ]
        return {
            "neighbour_agreement": neighbour_agreement(similarity, self.grid, self.order),
            "neighbour_agreement_shuffled": float(np.mean(null)),
        }

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """Return the similarity of the first block, row by row, positions as the images show them."""
        return {"similarity": tuple(self.similarity().flatten().tolist())}


def small_vit(
    canvas: int, classes: int, *, attention: str = "content", stem: str = "linear", **sizes: int
) -> VisionTransformer:
    """Return a timm VisionTransformer for small images: patch, dim, depth, heads, with random weights.

    Its attention is "content", as timm has it, or "positional". The random weights are the same for both. Its patches
    are made by a "linear" projection or by "conv"olutions.
    """
    positional = attention == "positional"
    vit = VisionTransformer(
        img_size=canvas,
        patch_size=sizes["patch"],
        embed_dim=sizes["dim"],
        depth=sizes["depth"],
        num_heads=sizes["heads"],
        num_classes=classes,
        embed_layer=ConvStem if stem == "conv" else PatchEmbed,
        attn_layer=PositionalAttention if positional else Attention,
    )
    for block in vit.blocks if positional else ():
        attn: Any = block.attn
        attn.model = (vit,)
    return vit
