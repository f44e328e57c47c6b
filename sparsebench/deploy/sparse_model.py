"""The torch module of a timm model with a strategy."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import UserError
from sparsebench.measure.cost import Step, mean_step
from sparsebench.measure.schedule import counts_text
from sparsebench.models.actor import LEARNED, Actor, Pass
from sparsebench.models.base import supported
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.base import ModelOutputs
from sparsebench.strategy.plans import Mask, Mix
from sparsebench.strategy.tokens import patch_weights_after
from sparsebench.training.evaluation import patches_in
from sparsebench.training.fit import modules_of

PREFIX = "model."
_HOLDERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[SparseModel]] = weakref.WeakKeyDictionary()
"""The sparse network of each timm model; a model has at most one."""


class SparseModel(nn.Module):
    """A timm model with a strategy: called, trained and saved like the model.

    The weights are the tensors of the model, with the same names in `state_dict()`. Tensors that the strategy learns
    are there too, as `strategy.*`. The model itself stays dense.

    Attributes:
        model: the timm model.
        spec: the strategy with its budget and parameters, as for `apply`.
    """

    def __init__(self, network: DeepViT, actor: Actor, spec: str):
        super().__init__()
        self.model: nn.Module = network.module
        self.spec = spec
        self.training = self.model.training
        self._network = network
        self._actor = actor
        self._facts = _facts(network.module)
        actor.reads_all = False
        self._visit, self._removed, self._done = 0, False, 1.0
        self._teacher: DeepViT | None = None
        self._last: Pass | None = None
        if actor.learned:
            device = next(self.model.parameters()).device
            learned = modules_of(actor).to(device).train(self.training)
            self.add_module(LEARNED, learned)
        self.register_state_dict_post_hook(_plain_names)
        self.register_load_state_dict_pre_hook(_inner_names)
        _HOLDERS[self.model] = weakref.ref(self)

    @staticmethod
    def on(model: nn.Module) -> SparseModel | None:
        """Return the sparse network of a timm model, or None."""
        holder = _HOLDERS.get(model)
        return None if holder is None else holder()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._removed:
            _HOLDERS[self.model] = weakref.ref(self)

    def forward(self, x: Tensor) -> Any:
        """Return what the model returns for (B, channels, height, width) pixels, normalised as for the model."""
        acting = self._begin(x)
        network = self._network
        outputs = network.act(x, acting, lambda: network.restore(x)) if self._acts else self.model(x)
        self._end(x, acting)
        return outputs

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the (B, P + M, C) tokens that remain, after the last norm: what the model's head reads.

        The P class and register tokens come first. Kept patches follow in the order of the grid, row by row, unless the
        strategy orders them. Fused tokens are last. Merged tokens have the order in which the strategy numbers its
        groups: with `tome`, first the patches of one half that are in no group, then the other half. If images keep
        different numbers of tokens, shorter rows end with padding. `membership` says for which patches each token
        stands.

        Args:
            x: (B, channels, height, width) pixels, normalised as for the model.
        """
        acting = self._begin(x)
        network: Any = self._network
        tokens: Tensor
        if self._acts:
            tokens = network.features(x, acting, lambda: network.restore(x))
        else:
            tokens = network.module.forward_features(x)
        self._end(x, acting)
        return tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Return what the model's head returns for the tokens of the last call of `forward_features`.

        An average or an attention pool weights each token by its number of patches, which it knows from this call.

        Args:
            x: (B, P + M, C) the tokens.
            pre_logits: whether to return the pooled features, which the output layer reads.

        Raises:
            UserError: the tokens are not those of the last call.
        """
        last = self._last
        expected = None if last is None else (len(last.index), self._network.prefix + last.index.shape[1])
        if last is None or tuple(x.shape[:2]) != expected:
            raise UserError(
                "forward_head takes the tokens of the last call of forward_features",
                got=describe(x),
                allowed=None if expected is None else f"{expected} tokens",
                next_step="call forward_features first; or call the network, which does both",
            )
        if not self._acts:
            network: Any = self._network
            return network.module.forward_head(x, pre_logits=pre_logits)
        return self._network.head(x, last, pre_logits=pre_logits)

    def _begin(self, x: Tensor) -> Pass:
        """Check the pixels of a call, and start its pass."""
        if torch.jit.is_tracing():  # a trace fixes numbers that depend on the batch, such as random ones
            raise UserError(
                "torch.jit.trace would record the choices of one batch for all batches",
                next_step="use sparse.export(FILE), torch.export or torch.compile",
            )
        self._check(x)
        items = torch.arange(len(x), device=x.device)
        return self._actor.begin(items, self._visit, None, training=self.model.training, done=self._done)

    def _end(self, x: Tensor, acting: Pass) -> None:
        """Compute what the strategy's loss needs of the teacher, and store the pass of a call."""
        if self._teacher is not None and acting.learns:
            acting.teacher = self._teacher.tell_of(x)
        if not torch.compiler.is_compiling():
            self._visit += self.model.training
            self._last = acting

    @property
    def _acts(self) -> bool:
        """Whether the strategy acts in the next call; `dense` never does, and some strategies only in training."""
        strategy = self._actor.strategy
        return strategy.budgeted and (self.model.training or not strategy.trains_only)

    def _check(self, x: Tensor) -> None:
        """Raise UserError if the model was changed, or does not take these pixels."""
        if self._removed:
            raise UserError(f"'{self.spec}' was removed from this network", next_step="call apply again")
        now = _facts(self.model)
        changed = [
            f"its {fact} were {old}, and are {now[fact]}" for fact, old in self._facts.items() if old != now[fact]
        ]
        if self.model.training and getattr(self.model, "grad_checkpointing", False):
            changed.append("gradient checkpointing is on, which would run blocks twice")
        if changed:
            raise UserError(
                f"the network was changed after '{self.spec}' was applied to it: {changed[0]}",
                next_step="call .remove(), and apply again; or set_grad_checkpointing(False) if it is on",
            )
        weight = next(self.model.parameters())
        size = self._network.pixels
        fits = isinstance(x, Tensor) and x.ndim == 4 and tuple(x.shape[1:]) == size and x.device == weight.device
        mixed = fits and x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
        if not fits or (x.dtype != weight.dtype and not mixed):
            allowed = (
                f"(B, {', '.join(map(str, size))}) {weight.dtype} on {weight.device}, normalised as for the network"
            )
            raise UserError(
                "pixels",
                got=describe(x),
                allowed=allowed,
                next_step="resize them, call .to(), or create the network with img_size=... and in_chans=...",
            )

    def progress(self, done: float) -> float:
        """Tell the strategy the finished share of the training; EViT, for example, changes its keep rate with it.

        Returns:
            The factor for the learning rate of the model's own weights: 1 for most strategies; DynamicViT starts with
            0. Parameters of the strategy, `strategy.*`, have the full learning rate.

        Raises:
            UserError: the share is not in [0, 1].
        """
        if not 0 <= done <= 1:
            raise UserError("the finished share of the training", got=done, allowed="a number from 0 to 1")
        self._done = float(done)
        return float(self._actor.strategy.network_rate(self._done))

    def teach(self, teacher: nn.Module | None) -> None:
        """Set the teacher network, with which `loss()` compares in each call in training.

        Args:
            teacher: a timm model with the same input, for example a copy of the dense model. It is set to evaluation
                mode, is not trained, and is not part of this module. None for no teacher.

        Raises:
            UserError: the teacher is not such a model, has other input or other classes, or is the sparse model.
        """
        if teacher is None:
            self._teacher = None
            return
        if isinstance(teacher, SparseModel) or teacher is self.model:
            raise UserError("the teacher is the trained network itself", next_step="give a copy.deepcopy of the model")
        if not isinstance(teacher, nn.Module):
            raise UserError("the teacher", got=type(teacher).__name__, allowed="a timm model, or None")
        with supported("the teacher", got=type(teacher).__name__):
            network = DeepViT(teacher.eval())
        facts = [(vit.pixels, vit.module.num_classes) for vit in (network, self._network)]
        if facts[0] != facts[1]:
            got, allowed = (f"{classes} classes of {pixels} pixels" for pixels, classes in facts)
            raise UserError("the teacher has another input, or other classes", got=got, allowed=allowed)
        self._teacher = network

    def loss(self, teacher: ModelOutputs | None = None) -> Tensor:
        """Return the strategy's own loss for the last call in training; 0 if the strategy has no loss.

        Args:
            teacher: outputs of a dense network for the same images, if they are computed without `teach`.

        Raises:
            UserError: there was no call in training before, or the outputs of the teacher have no tokens.
        """
        if teacher is not None and not isinstance(teacher, ModelOutputs):
            raise UserError(
                "the teacher's outputs",
                got=type(teacher).__name__,
                allowed="ModelOutputs(logits, tokens)",
                next_step="or call sparse.teach(model): they are then computed in each call",
            )
        weight = next(self.model.parameters())
        if not (self._actor.strategy.has_loss and self._actor.acts):
            return weight.new_zeros(())
        if self._last is None or not self._last.learns:
            raise UserError(
                "there was no call in training, so there is no loss", next_step="call .train() and the network"
            )
        if teacher is not None:
            self._last.teacher = teacher
        return self._last.loss()

    def auxiliary(self) -> list[Tensor]:
        """Return further (B, classes) logits of the last call in training; add your loss of each, by the labels.

        Most strategies have none, see `Strategy.auxiliary`.

        Raises:
            UserError: there was no call in training before.
        """
        if not (self._actor.strategy.has_auxiliary and self._actor.acts):
            return []
        if self._last is None or not self._last.training:
            raise UserError(
                "there was no call in training, so there are no further logits",
                next_step="call .train() and the network",
            )
        return list(self._last.auxiliary())

    def kept(self, x: Tensor | None = None) -> Tensor:
        """Return (B, patches) booleans: which patches remain at the end, alone or as the first patch of a group.

        A fused token counts for no patch.

        All patches remain if the strategy did not act, for example in the test of a strategy that acts in training
        only.

        Args:
            x: pixels, with which the network is called; None for the last call.

        Raises:
            UserError: there was no call before and no pixels are given; or tokens are mixtures of many patches.
        """
        last = self._called(x, "kept")
        if any(isinstance(decision.plan, Mix) for decision in last.decisions):
            raise UserError(
                f"with '{self.spec}' each token is a mixture of many patches, so no patch is kept",
                next_step="see sparse.tokens for the token counts after each block",
            )
        return patches_in(last.index, self._network.cost.tokens)

    def membership(self, x: Tensor | None = None) -> Tensor:
        """Return (B, M, patches): for each remaining token, the weights of the patches for which it stands.

        Each row sums to 1. A kept patch has weight 1, and a merged or fused token the weights with which the strategy
        combined its patches. What a strategy adds to a kept patch from others, as `gtp` does, has no weight. Rows have
        the order of the tokens of `forward_features` after the class and register tokens. Rows of padding are 0. So are
        the columns of patches that were removed, or merged with weight 0, as `vid_tldr` may do. Each patch is in one
        token at most, so
        `(membership > 0).to(tokens).transpose(1, 2) @ tokens` puts (B, M, C) tokens on the grid, row by row.

        Args:
            x: pixels, with which the network is called; None for the last call.

        Raises:
            UserError: there was no call before and no pixels are given; or tokens are mixtures of many patches, which
                stand for no patches in particular.
        """
        last = self._called(x, "membership")
        patches = self._network.cost.tokens
        each_patch = torch.eye(patches, device=last.index.device)
        if last.whole:  # tokens that came back are in no plan
            return each_patch[last.index]
        weights = each_patch.expand(len(last.index), patches, patches)
        for decision in last.decisions:
            plan = decision.plan
            if isinstance(plan, Mix) or (isinstance(plan, Mask) and plan.values is not None):
                raise UserError(
                    f"with '{self.spec}' each token is a mixture of many patches, so it stands for none in particular",
                    next_step="see sparse.tokens for the token counts after each block",
                )
            weights = patch_weights_after(plan, weights, decision.sizes)
        return weights

    def _called(self, x: Tensor | None, method: str) -> Pass:
        """Call the network with pixels, if there are some, and return the pass of the last call."""
        if x is not None:
            with torch.no_grad():
                self(x)
        if self._last is None:
            raise UserError("the network was not called yet", next_step=f"give the pixels: {method}(x)")
        return self._last

    def steps(self) -> list[Step]:
        """Return the token counts of each block: as planned, or, if adaptive, the means of the last call."""
        actor = self._actor
        if not self._acts:
            return actor.cost.dense()
        if actor.strategy.adaptive and self._last is not None:
            return [mean_step([(len(self._last.items), step)]) for step in self._last.steps]
        traits = actor.traits._replace(scaled=actor.scaled)
        return actor.cost.steps(traits, tuple(actor.keep), tuple(actor.keep.values()))

    @property
    def tokens(self) -> tuple[float, ...]:
        """Number of patch tokens after each block."""
        return tuple(step.tokens_out for step in self.steps())

    @property
    def macs(self) -> float:
        """MACs of one image."""
        return self._actor.cost.macs(self.steps())

    @property
    def macs_ratio(self) -> float:
        """MACs of one image, as a fraction of the MACs of the dense model."""
        return self.macs / self._actor.cost.macs(self._actor.cost.dense())

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs: logits, or features for a model without a head, pooled as the model does."""
        network: Any = self._network
        return ("features",) if network.module.num_classes == 0 else ("logits",)

    def export(self, file: str | os.PathLike[str], batch: int = 1) -> Path:
        """Export the network in evaluation mode to a file for other programs.

        In ONNX files the input is named "pixels". The output is named "logits", or "features" for a model without a
        head, whose output are the pooled features.

        Args:
            file: name ending in .onnx (ONNX) or .pt2 (`torch.export.load`); the file must not exist.
            batch: batch size of the exported network.

        Raises:
            UserError: the strategy cannot be exported, or a library is missing.
        """
        from sparsebench.deploy.export import export

        return export(self, file, batch)

    def remove(self) -> nn.Module:
        """Remove the strategy and return the model; this module can no longer be called."""
        if SparseModel.on(self.model) is self:
            del _HOLDERS[self.model]
        self._removed, self._last = True, None
        return self.model

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse the copies of torch.nn.DataParallel, whose calls `loss` and `kept` would not see."""
        raise UserError(
            "torch.nn.DataParallel is not supported: it calls copies of the network",
            next_step="use torch.nn.parallel.DistributedDataParallel, with torchrun",
        )

    def __enter__(self) -> SparseModel:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def extra_repr(self) -> str:
        """Return the strategy, the MACs and the token counts, for `repr`."""
        facts = [self.spec, f"{self.macs_ratio:.3f} of the MACs"]
        if self._actor.strategy.budgeted:
            facts.append(counts_text(self._actor.strategy, self._actor.schedule))
        return ", ".join(facts)


def describe(value: Any) -> str:
    """Return shape, dtype, device and range of a tensor, or the type of another object."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    ends = f", {value.min():g}..{value.max():g}" if value.numel() and not value.is_meta else ""
    return f"{tuple(value.shape)} {value.dtype} on {value.device}{ends}"


def _facts(model: Any) -> dict[str, Any]:
    """Return the properties of a timm model on which a strategy's token counts depend."""
    embed = model.patch_embed
    return {
        "patches": tuple(embed.grid_size),
        "pixels of a patch": tuple(embed.patch_size),
        "class tokens": model.num_prefix_tokens,
        "blocks": len(model.blocks),
    }


def _plain_names(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Remove the prefix of the model's weights in a state dict."""
    for key in [key for key in state if key.startswith(prefix + PREFIX)]:
        state[prefix + key.removeprefix(prefix + PREFIX)] = state.pop(key)


def _inner_names(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Restore this prefix before loading; the inverse of `_plain_names`."""
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}{LEARNED}.")]:
        state[prefix + PREFIX + key.removeprefix(prefix)] = state.pop(key)
