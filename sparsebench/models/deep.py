"""Strategies on any timm VisionTransformer or Eva, unmodified, and small Vision Transformers for small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from sparsebench.measure.cost import Scoring
from sparsebench.measure.selection import neighbour_agreement
from sparsebench.models.actor import Pass, SplitPass, exact, full, in_chunks
from sparsebench.models.attention import (
    PositionalAttention,
    attend,
    check_parts,
    fields_of,
    fuse_maps,
    gather_heads,
    positions_of,
    qkv,
    queries_keys,
    values_of,
)
from sparsebench.models.timm_parts import (
    POOLS,
    ClassAndMean,
    ConvStem,
    Rotations,
    branch_input,
    branch_output,
    check_block,
    input_channels,
    pool,
    refuse,
    vit_cost,
)
from sparsebench.records.record import Pooling
from sparsebench.strategy import tokens
from sparsebench.strategy.base import ModelOutputs, Strategy
from sparsebench.strategy.plan_checks import only_removes
from sparsebench.strategy.plans import Keep, Plan
from sparsebench.strategy.tokens import Resting
from sparsebench.strategy.view import NEEDS, RESULTS

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R BT.601), as in Pillow and torchvision."""
ELSEWHERE = {"input": frozenset({"pixels", "outputs"}), "block": frozenset({"previous_attention"})}
"""The fields of the view at the sites outside a block, besides the tokens. The sites inside have all other fields."""
NOT_AT = {"maps": frozenset({"branch", "values", "attention_input"}), "mlp": frozenset({"attention_input"})}
"""The fields that sites inside a block lack."""
TOKENS = frozenset({"tokens", "prefix"})


@dataclass(frozen=True, eq=False)
class _Attention:
    """The attention of one block before its output is computed.

    Attributes:
        attn: the attention module.
        q, k, v: (B, H, T, C / H) queries, keys and values.
        keys: bias and weights of the keys, see `attend`.
        maps: (B, H, T, T) the attention as the strategy changes it; None if it changes none.
        fields: the fields of the view that this attention gives.
    """

    attn: Any
    q: Tensor
    k: Tensor
    v: Tensor
    keys: dict[str, Tensor | None]
    maps: Tensor | None
    fields: dict[str, Callable[[], Any]]

    def output(self, rows: Tensor | None) -> Tensor:
        """Return the (B, Q, C) output for the queries at the (B, Q) positions `rows`; None for all T."""
        q, maps = self.q, self.maps
        if rows is not None:
            q = gather_heads(q, rows)
            maps = None if maps is None else gather_queries(maps, rows)
        return attend(self.attn, q, self.k, self.v, **self.keys, rows=rows, maps=maps)


class DeepViT:
    """A timm VisionTransformer or Eva on which a strategy can act.

    The model is not changed. Without a strategy it is called as it is. With a strategy its parts are called here, in
    timm's order, with the decisions in between.

    In bfloat16, autocast computes the model's products. The strategy's inputs and computations stay in float32, so
    rounding causes no ties between scores. Tokens are merged in float32, and logits are float32.

    Args:
        vit: the timm model.
        mean, std: normalisation of its pixels: one number, or one per channel. If the network has another number of
            channels, such as 1 or 4 instead of RGB, their mean is used for all channels.
        precision: precision of products, "float32" or "bfloat16"; the weights are not converted.

    Attributes:
        module: the timm model.
        grid, patch: (rows, columns) of its patches, and (height, width) of a patch in pixels.
        channels: number of input channels; for a network with one channel, colour images are converted to grey.
        cost: the cost model.
        attention_source: see `Network.attention_source`.

    Raises:
        UnsupportedError: tokens cannot be dropped safely in this architecture.
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
        self.channels = input_channels(vit.patch_embed)
        device = next(vit.parameters()).device
        for name, values in (("pixel_mean", mean), ("pixel_std", std)):  # buffers, to follow the model's device
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
        """(channels, height, width) of the model's input."""
        (rows, columns), (height, width) = self.grid, self.patch
        return self.channels, rows * height, columns * width

    def __call__(self, images: Tensor, acting: Pass | None = None) -> Tensor:
        """Return (B, classes) logits for (B, channels, height, width) images: uint8, or real numbers in [0, 1].

        A network with one channel also takes images with three channels.
        """
        normed = self.normalise(images)
        with self._precision(images.device.type):
            if acting is None:
                return self.module(normed).to(normed.dtype)
            return self.act(normed, acting, lambda: self._real(images)).to(normed.dtype)

    def act(self, normed: Tensor, acting: Pass, pixels: Callable[[], Tensor]) -> Any:
        """Return the output of the model with the strategy.

        Args:
            normed: (B, channels, height, width) normalised images.
            acting: the pass.
            pixels: returns the same images in [0, 1].
        """
        return _call(self.module, partial(self._forward, acting, pixels), normed)

    def _forward(self, acting: Pass, pixels: Callable[[], Tensor], normed: Tensor) -> Any:
        return self.head(self.features(normed, acting, pixels), acting)

    def features(self, normed: Tensor, acting: Pass, pixels: Callable[[], Tensor]) -> Tensor:
        """Return the (B, P + M, C) remaining tokens after the last norm: what the head reads. See `act`.

        The P class and register tokens come first.
        """
        vit = self.module
        if acting.reads_out:
            self.check(acting.actor.strategy)
        placed = vit._pos_embed(vit.patch_embed(normed))
        x, table = placed if isinstance(vit, Eva) else (placed, None)
        if acting.acts_at("input", 0):
            x = self._input(pixels, acting, x)
        x = vit.norm_pre(x)
        if acting.keeps_left:
            acting.left = [(vit.norm_pre(gone), patch) for gone, patch in acting.left]
        if acting.starts:
            acting.start(self._tokens(x))
        turn = Rotations(vit, self.grid, table)
        for number, block in enumerate(vit.blocks):
            x = _call(block, partial(self._block, acting, turn, number, block), x)
        if acting.reads_out:
            patches = x[:, self.prefix :]
            x = torch.cat([acting.read_out(x[:, : self.prefix], patches), patches], dim=1)
        normalised: Tensor = vit.norm(x)
        return normalised

    def head(self, x: Tensor, acting: Pass, *, pre_logits: bool = False) -> Any:
        """Return the output of the head for the tokens of `features` of the same pass.

        Args:
            x: (B, P + M, C) the tokens.
            acting: the pass.
            pre_logits: whether to return the pooled features that the output layer reads, (B, C) in most networks.
        """
        vit = self.module
        if acting.whole or vit.global_pool not in POOLS:
            outputs = vit.forward_head(x, pre_logits=pre_logits)
        else:
            outputs = vit.head_drop(vit.fc_norm(pool(vit, acting, x)))
            outputs = outputs if pre_logits else vit.head(outputs)
        if acting.learns and not pre_logits:
            logits = outputs if isinstance(outputs, Tensor) else outputs[0]  # distilled models return two in training
            patches = x[:, self.prefix :].to(acting.sizes.dtype)
            acting.student = ModelOutputs(logits.to(next(vit.parameters()).dtype), patches)
        return outputs

    def drop_head(self, pooling: Pooling) -> None:
        """Make features the outputs: (B, C), what the head would read, or the mean of the patches after the last norm.

        Raises:
            UnsupportedError: the mean of patches is asked of a network with a distillation token.
        """
        vit = self.module
        vit.head = nn.Identity()
        if hasattr(vit, "head_dist"):
            vit.head_dist = nn.Identity()
        self.cost = vit_cost(vit)  # with the MACs of the model's pool, whatever pools here
        if pooling == "patches":
            if hasattr(vit, "head_dist"):
                raise UnsupportedError("a network with a distillation token pools two tokens, not its patches")
            vit.attn_pool, vit.global_pool = None, "avg"
            if hasattr(vit, "pool_include_prefix"):
                vit.pool_include_prefix = False
            if isinstance(vit, ClassAndMean):
                vit.pools_class = False

    @torch.no_grad()
    def patches(self, images: Tensor, acting: Pass | None = None) -> Tensor:
        """Return the (B, M, C) patch tokens that remain, after the last norm and timm's `fc_norm`, without gradients.

        `fc_norm` is the identity unless the model has its norm after pooling. See `__call__` for the arguments.
        """
        normed, vit = self.normalise(images), self.module
        with self._precision(images.device.type):
            if acting is None:
                x = vit.forward_features(normed)
            else:
                x = self.features(normed, acting, lambda: self._real(images))
            return vit.fc_norm(x[:, self.prefix :]).to(normed.dtype)

    @torch.no_grad()
    def tell(self, images: Tensor) -> ModelOutputs:
        """Return the outputs for images without a strategy and without gradients."""
        with self._precision(images.device.type):
            return self.tell_of(self.normalise(images))

    @torch.no_grad()
    def tell_of(self, normed: Tensor) -> ModelOutputs:
        """Return the outputs for normalised images without a strategy and without gradients."""
        x = self.module.forward_features(normed)
        return ModelOutputs(self.module.forward_head(x).to(normed.dtype), x[:, self.prefix :].to(normed.dtype))

    def normalise(self, images: Tensor) -> Tensor:
        """Return images as the model takes them: real numbers, minus the mean, divided by the std."""
        real = self._real(images)
        mean, std = self.module.pixel_mean.to(real.dtype), self.module.pixel_std.to(real.dtype)
        return (real - mean if real is images else real.sub_(mean)).div_(std)

    def restore(self, normed: Tensor) -> Tensor:
        """Return normalised images in [0, 1], the inverse of `normalise`."""
        return normed * self.module.pixel_std.to(normed.dtype) + self.module.pixel_mean.to(normed.dtype)

    def _real(self, images: Tensor) -> Tensor:
        """Return images in [0, 1] with the number of channels of the network."""
        if not images.is_floating_point():
            images = images.to(next(self.module.parameters()).dtype).div_(255)
        if self.channels == 1 and images.shape[1] == 3:
            return (images * images.new_tensor(LUMA).reshape(3, 1, 1)).sum(dim=1, keepdim=True)
        return images

    @contextmanager
    def _precision(self, device: str) -> Iterator[None]:
        """Compute products in the network's precision, with the faster attention kernel.

        On a CPU torch's fused attention in bfloat16 takes 1.4 to 1.7 times as long as plain attention, and 1.9 to 7
        times with the gradient (torch 2.15, one thread, 37 to 1025 tokens). In float32 fused attention is faster.
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
        """Return the tokens x after the plan, see `tokens.apply`."""
        with exact(x.device):
            return tokens.apply(plan, x, sizes, self.prefix)

    def check(self, strategy: Strategy) -> None:
        """Raise UnsupportedError if the strategy needs something that the architecture does not have."""
        site = strategy.at_site()
        inside = NEEDS.difference({"relevance"}, *ELSEWHERE.values(), NOT_AT.get(site, ()))
        fields = TOKENS | ELSEWHERE.get(site, inside)
        for block in self.module.blocks if site not in ELSEWHERE else ():
            check_block(block)
            if site == "maps":
                check_parts(block.attn)
        fields -= frozenset() if self.class_rows else {"class_attention"}
        if missing := sorted(strategy.reads() - fields):
            raise UnsupportedError(
                f"'{strategy.name}' needs {', '.join(missing)}, which this network of {self.class_rows} class tokens "
                f"cannot give at the {site} site (it gives {', '.join(sorted(fields))})"
            )
        if strategy.reads_out and self.module.global_pool != "token":
            raise UnsupportedError(
                f"'{strategy.name}' changes the class token for the head, and this network's head does not read it "
                f"(global_pool={self.module.global_pool})"
            )

    def _input(self, pixels: Callable[[], Tensor], acting: Pass, x: Tensor) -> Tensor:
        """Return the tokens after a decision at the input site: after the position embedding."""
        fields = {
            **self._tokens(x),
            "pixels": lambda: _cut(pixels(), self.patch),
            "outputs": lambda: in_chunks(partial(self._whole, full(x[:, : self.prefix])), len(x)),
        }
        plan = acting.decide(0, fields)
        return x if plan is None else self._change(acting, plan, x, x.new_ones(x.shape[0], self.cost.tokens))

    def _change(self, acting: Pass, plan: Plan, x: Tensor, sizes: Tensor) -> Tensor:
        """Return the tokens x after the plan; keep those that leave if they come back later."""
        if acting.keeps_left:
            acting.leave(x[:, self.prefix :])
        return self._apply(plan, x, sizes)

    def _whole(self, prefix: Tensor, tokens_: Tensor, sample: Tensor) -> Tensor:
        """Return the logits for (R, N, C) patch tokens at the input site, in evaluation mode.

        `prefix` has the (B, P, C) class and register tokens, and `sample` the (R,) number of each row's sample.
        """
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
        """Run one block, with a decision before it or inside it."""
        if acting.comes_back(number):
            x = torch.cat([x[:, : self.prefix], acting.come_back(x[:, self.prefix :])], dim=1)
        if acting.acts_at("block", number):
            sizes, fields = acting.sizes, self._tokens(x)
            if (previous := acting.previous) is not None:
                fields["previous_attention"] = lambda: previous
            plan = acting.decide(number, fields)
            if isinstance(plan, Resting) and plan.index.shape[1]:
                return self._run_active(acting, turn, number, block, x, plan.active)
            x = x if plan is None else self._change(acting, plan, x, sizes)
        if acting.acts_at("maps", number):
            return self._run_fused(acting, number, block, x)
        return self._run(acting, turn, number, block, x)

    def _run_active(self, acting: Pass, turn: Rotations, number: int, block: Any, x: Tensor, active: Tensor) -> Tensor:
        """Run one block only on the tokens at the (B, M) positions `active`; the others rest."""
        rows = tokens.with_prefix(active, self.prefix)
        acting.begin_rest(active)
        new = self._run(acting, turn, number, block, tokens.gather(x, rows))
        acting.end_rest(active)
        return tokens.put_back(x, rows, new)

    def _run(self, acting: Pass, turn: Rotations, number: int, block: Any, x: Tensor) -> Tensor:
        """Run one block on the tokens that take part, with a decision inside it."""
        positional = isinstance(block.attn, PositionalAttention)
        rope = {"rope": positions_of(self.module, acting)} if positional else turn.of(number, acting)
        acts = acting.acts_at("attention", number) or acting.acts_at("mlp", number)
        read_next = _read_next(acting, number)
        if not (acts or read_next or positional) and acting.even:
            acting.record_block(acting.present)
            return type(block).forward(block, x, **rope)

        check_block(block)
        tokens_in = acting.present
        attention = self._attention(acting, block, x, rope, acts)
        if read_next:
            acting.previous = self._times_keys(attention.fields["attention"], acting.sizes)
        x, early = self._run_attention(acting, number, block, x, attention)
        tokens_out = acting.present
        x = self._run_mlp(acting, number, block, x, attention)

        scoring: Scoring = ""
        if attention.maps is None and acts:
            scoring = self.cost.scoring(acting.requires)
        elif attention.maps is None and read_next:
            scoring = self.cost.scoring(frozenset({"attention"}))
        acting.record_block(tokens_in, tokens_out, early=early, scoring=scoring)
        return x

    def _attention(self, acting: Pass, block: Any, x: Tensor, rope: dict[str, Tensor], acts: bool) -> _Attention:
        """Return the attention of a block before its output is computed.

        Args:
            acting: the pass.
            block: the block.
            x: the tokens at its input.
            rope: the keyword argument of rotations or positions.
            acts: whether the strategy acts in this block, so that it may change the attention.
        """
        keys = self._keys(acting)
        normed = branch_input(block, 1, x)
        q, k, v = qkv(block.attn, normed, **rope)
        present = acting.sizes > 0 if acting.ragged else None
        maps = self._changed_maps(acting, block.attn, q, k, v, keys) if acts else None
        fields = fields_of(block.attn, q, k, v, self.prefix, self.class_rows, **keys, present=present, maps=maps)
        fields["attention_input"] = lambda: normed[:, self.prefix :]
        return _Attention(block.attn, q, k, v, keys, maps, fields)

    def _run_attention(
        self, acting: Pass, number: int, block: Any, x: Tensor, attention: _Attention
    ) -> tuple[Tensor, bool]:
        """Run the attention of a block, with a decision if the strategy acts here.

        If the strategy needs no result of the attention, it decides first, and only the remaining tokens are queries
        (all are keys and values). The result is the same with fewer MACs.

        Returns:
            The tokens after it, and whether tokens left before it.
        """
        sizes = acting.sizes
        acts = acting.acts_at("attention", number)
        reads_result = bool(RESULTS & acting.requires)
        plan = None
        rows = None
        if acts and not reads_result:
            plan = acting.decide(number, attention.fields)
            if isinstance(plan, Keep) and only_removes(plan):
                rows = tokens.rows_of(plan, self.prefix)
                x = self._change(acting, plan, x, sizes)
        branch = branch_output(block, 1, attention.output(rows))
        x = x + branch
        if acts and reads_result:
            plan = acting.decide(number, self._fields_after(attention, x, branch))
        if plan is not None and rows is None:
            x = self._change(acting, plan, x, sizes)
        return x, rows is not None

    def _run_mlp(self, acting: Pass, number: int, block: Any, x: Tensor, attention: _Attention) -> Tensor:
        """Run the MLP of a block, with a decision after it if the strategy acts there: it reads what the MLP added."""
        sizes = acting.sizes
        acts = acting.acts_at("mlp", number)
        branch = branch_output(block, 2, block.mlp(branch_input(block, 2, x)))
        x = x + branch
        plan = acting.decide(number, self._fields_after(attention, x, branch)) if acts else None
        return x if plan is None else self._change(acting, plan, x, sizes)

    def _fields_after(self, attention: _Attention, x: Tensor, branch: Tensor) -> dict[str, Callable[[], Any]]:
        """Return the fields of the view after a part of a block that added `branch` to the tokens, which are now x."""
        return {**attention.fields, **self._tokens(x), "branch": lambda: branch[:, self.prefix :]}

    def _changed_maps(
        self, acting: Pass, attn: Any, q: Tensor, k: Tensor, v: Tensor, keys: dict[str, Tensor | None]
    ) -> Tensor | None:
        """Return the (B, H, T, T) attention as the strategy changes it; None if it changes none."""
        if not acting.changes_maps:
            return None
        fields = fields_of(attn, q, k, v, self.prefix, self.class_rows, **keys)
        return acting.maps(fields["attention_maps"]())

    def _run_fused(self, acting: Pass, number: int, block: Any, x: Tensor) -> Tensor:
        """Run one block with a decision between the attention matrices and their product with the values.

        The tokens of the block's input leave or merge, and the matrices with them. Values are computed of what remains.
        """
        check_block(block)
        check_parts(block.attn)
        attn: Any = block.attn
        tokens_in = acting.present
        sizes = acting.sizes
        keys = self._keys(acting)
        q, k = queries_keys(attn, branch_input(block, 1, x))
        maps = fields_of(attn, q, k, k, self.prefix, self.class_rows, **keys)["attention_maps"]()
        maps = acting.maps(maps) if acting.changes_maps else maps
        present = sizes > 0 if acting.ragged else None
        fields = fields_of(attn, q, k, k, self.prefix, self.class_rows, **keys, present=present, maps=maps)
        plan = acting.decide(number, {**fields, **self._tokens(x)})
        if plan is not None:
            maps = fuse_maps(maps, plan, sizes, self.prefix)
            x = self._change(acting, plan, x, sizes)
        v = values_of(attn, branch_input(block, 1, x))
        x = x + branch_output(block, 1, attend(attn, q, k, v, maps=maps))
        acting.record_block(tokens_in, fused=True)
        return x + branch_output(block, 2, block.mlp(branch_input(block, 2, x)))

    def _times_keys(self, attention: Callable[[], Tensor], sizes: Tensor) -> Tensor:
        """Return (B, N) attention times the number of keys, see `TokenView.previous_attention`."""
        with exact(sizes.device):
            number_of_keys = self.prefix + (sizes > 0).sum(dim=1, keepdim=True)
            return full(attention()) * number_of_keys

    def _keys(self, acting: Pass) -> dict[str, Tensor | None]:
        """Return the bias and the weights of the P + N current tokens as keys, see `attend`."""
        bias = acting.bias()
        soft = F.pad(acting.sizes, (self.prefix, 0), value=1.0) if acting.soft else None
        return {
            "soft": soft,
            "bias": None if bias is None else F.pad(bias, (self.prefix, 0))[:, None, None, :],
            "weights": F.pad(acting.weights(), (self.prefix, 0), value=1.0) if acting.masked else None,
        }


def gather_queries(maps: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (B, Q) of (B, H, T, T) attention as (B, H, Q, T)."""
    return maps.gather(2, rows[:, None, :, None].expand(-1, maps.shape[1], -1, maps.shape[3]))


def _call(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return `forward(x)`; if the module has hooks, call it with `forward` as its forward pass, so that they run."""
    if not (module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks):
        return forward(x)
    module.forward = forward
    try:
        return module(x)
    finally:
        del module.forward


def _cut(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the (B, N, channels, height, width) pixels of each patch of (B, channels, ...) images."""
    height, width = patch
    return images.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _read_next(acting: Pass, block: int) -> bool:
    """Return whether the strategy reads the attention of this block before the next block."""
    reads = "previous_attention" in acting.requires and acting.site == "block"  # a replay requires nothing
    return reads and block + 1 < acting.actor.depth and acting.acts(block + 1)


class PositionalDeepViT(DeepViT):
    """A timm VisionTransformer with positional attention, see `small_vit`; it measures what positions learn.

    Args:
        vit: the model.
        order: (N,) row-major place of the patch that each position shows; None for row-major order.
        precision: see `DeepViT`.
    """

    shows: ClassVar = {"neighbour_agreement": "fraction", "neighbour_agreement_shuffled": "fraction"}
    shuffles: ClassVar[int] = 20

    def __init__(self, vit: Any, order: np.ndarray | None = None, *, precision: str = "float32"):
        super().__init__(vit, precision=precision)
        self.order = np.arange(self.cost.tokens) if order is None else order

    def similarity(self) -> np.ndarray:
        """Return (N, N) float64 (P W_Q)(P W_K)^T / sqrt(d_h) of the patches in the first block, mean over heads."""
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
        """Return the similarity of the first block, flattened by rows; rows and columns are positions, not patches."""
        return {"similarity": tuple(self.similarity().flatten().tolist())}


def small_vit(
    canvas: int,
    classes: int,
    *,
    patch: int,
    dim: int,
    depth: int,
    heads: int,
    attention: str = "content",
    stem: str = "linear",
) -> VisionTransformer:
    """Return a timm VisionTransformer for images of canvas x canvas pixels, with random weights.

    The attention is "content", as in timm, or "positional", with the same random weights. The patch embedding (stem) is
    "linear" or "conv".
    """
    positional = attention == "positional"
    vit = VisionTransformer(
        img_size=canvas,
        patch_size=patch,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        num_classes=classes,
        embed_layer=ConvStem if stem == "conv" else PatchEmbed,
        attn_layer=PositionalAttention if positional else Attention,
    )
    for block in vit.blocks if positional else ():
        attn: Any = block.attn
        attn.model = (vit,)
    return vit
