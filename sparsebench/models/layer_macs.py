"""MACs of the layers of a part of a network: in closed form for layers of torch and timm, counted for others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError, one_line

TOKENS = ((2, 2), (2, 4), (3, 4))
"""(images, tokens) of the calls that count a part for tokens."""
IMAGES = ((4,), (8,), (12,))
"""Numbers of images of the calls that count a part for whole images, such as a head."""


def is_shipped(layer: nn.Module) -> bool:
    """Return whether the layer's class is of torch or timm, and its forward pass is that of the class."""
    return type(layer).__module__.startswith(("torch.nn.modules.", "timm.")) and "forward" not in vars(layer)


def has_weights(layer: nn.Module) -> bool:
    """Return whether the layer itself, without its inner layers, has a matrix, packed weights or `in_features`."""
    values: list[Any] = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if not is_shipped(layer):  # another class may have weights that are no parameters
        values += vars(layer).values()
    if hasattr(layer, "in_features"):
        return True
    return any(isinstance(value, torch.ScriptObject) or _is_matrix(value) for value in values)


def _is_matrix(value: Any) -> bool:
    """Return whether a value is a tensor with several sides longer than 1."""
    return isinstance(value, Tensor) and sum(side > 1 for side in value.shape) > 1


def is_known(layer: nn.Module) -> bool:
    """Return whether the products of a layer are known from its class: a linear layer, or a layer without weights."""
    return is_shipped(layer) and (isinstance(layer, nn.Linear) or not has_weights(layer))


def macs_per_row(name: str, part: nn.Module | None, width: int, like: Tensor, leads: Sequence[Any] = TOKENS) -> int:
    """Return the MACs of a part of a network for each row (token) of its input.

    For linear layers of torch and timm these are their input times their output features. A part with other layers is
    called, in evaluation mode, with rows of zeros, and torch's FLOP counter counts its products. A layer whose
    products the counter does not know, as of quantized weights, counts like a linear layer of its features. Products
    that do not depend on the input, such as of a parametrization, are left out.

    Args:
        name: the part's name in the network, for errors.
        part: the part, or None.
        width: number of input features.
        like: a tensor with the precision and the device of the input.
        leads: the leading dimensions of three inputs, with 4, 8 and 12 rows.

    Raises:
        UnsupportedError: a layer's MACs are unknown, or are not the same for each row.
    """
    if part is None:
        return 0
    layers = [layer for _, layer in part.named_modules(remove_duplicate=False)]  # a layer may be used twice
    if all(map(is_known, layers)):
        return sum(layer.in_features * layer.out_features for layer in layers if isinstance(layer, nn.Linear))
    return counted_per_row(name, part, [like.new_zeros(*lead, width) for lead in leads], 4)


def counted_per_row(name: str, part: nn.Module, inputs: Sequence[Tensor], rows: int) -> int:
    """Return the counted MACs of a part for each row of its input.

    Args:
        name, part: see `macs_per_row`, also for errors.
        inputs: three inputs, each with this many more rows than the one before.
        rows: the number of these rows.
    """
    first, second, third = (counted(name, part, x) for x in inputs)
    macs, rest = divmod(second - first, rows)
    if rest or third - second != second - first:
        raise unknown_macs(name, part, "they are not the same for each token")
    return macs


def counted(name: str, part: nn.Module, x: Tensor) -> int:
    """Return the MACs of a call of the part in evaluation mode; for `name` and errors see `macs_per_row`."""
    counter, others = FlopCounterMode(display=False), [0]
    names = {layer: f"{name}.{inner}".rstrip(".") for inner, layer in part.named_modules()}
    before: dict[nn.Module, int] = {}

    def total() -> int:
        return int(counter.get_total_flops()) // 2 + others[0]

    def begin(layer: nn.Module, _args: Any) -> None:
        before[layer] = total()

    def end(layer: nn.Module, args: Any, output: Any) -> None:
        if total() == before[layer]:
            others[0] += _by_features(names[layer], layer, args, output)

    training = [layer for layer in part.modules() if layer.training]
    lists = [layer for layer in part.modules() if isinstance(layer, ParametrizationList)]
    only_weights = {layer for inside in lists for layer in inside.modules()}  # they compute weights, not outputs
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())  # without gradients the counter refuses parameters as inputs
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the counter does not know the fused kernel of CPUs
        for layer in filter(has_weights, set(part.modules()) - only_weights):
            stack.callback(layer.register_forward_pre_hook(begin).remove)
            stack.callback(layer.register_forward_hook(end).remove)
        for layer in training:
            layer.training = False
            stack.callback(setattr, layer, "training", True)
        try:
            with counter:
                part(x)
        except UnsupportedError:
            raise
        except Exception as error:  # layers of users may raise anything
            raise unknown_macs(name, part, one_line(error)[:200]) from error
        return total()


def _by_features(name: str, layer: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the MACs of a call in which the counter knew no product: those of a linear layer of the same features."""
    inner, outer = (getattr(layer, key, None) for key in ("in_features", "out_features"))
    widths = [x.shape[-1] for x in (*args[:1], output) if isinstance(x, Tensor) and x.ndim]
    if inner is None or outer is None or widths != [inner, outer]:
        raise unknown_macs(name, layer, "torch's FLOP counter knows none of its products")
    return int(output.numel() * inner)


def unknown_macs(name: str, layer: nn.Module, why: str) -> UnsupportedError:
    """Return the error for a layer whose MACs are unknown."""
    return UnsupportedError(f"MACs of its layer `{name}` ({type(layer).__name__}) are unknown: {why}")
