"""The state of a training under way, as tensors by name, and going on from it."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, under


class _Stateful(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: dict[str, Tensor], /) -> None: ...


def can_be_resumed(training: Training) -> bool:
    """Say whether its state can be taken: steps by autograd."""
    return isinstance(training.steps, Autograd)


def state_of(training: Training) -> dict[str, Tensor]:
    """Return all that the rest of a training depends on: what its parts hold, and torch's random state (dropout)."""
    state = {f"{part}.{name}": value for part, holder in _parts(training).items()
             for name, value in holder.state().items()}  # fmt: skip
    state["random.cpu"] = torch.get_rng_state()
    if _device(training).type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(_device(training))
    return state


def resume(training: Training, state: dict[str, Tensor]) -> None:
    """Make the training go on from that state.

    Raises:
        ValueError: it is the state of another training; nothing has changed then.
    """
    for name, value in state_of(training).items():
        if name not in state or state[name].shape != value.shape:
            raise ValueError(f"its '{name}' does not fit")
    for part, holder in _parts(training).items():
        holder.load(under(f"{part}.", state))
    torch.set_rng_state(state["random.cpu"])
    if _device(training).type == "cuda":
        torch.cuda.set_rng_state(state["random.cuda"], _device(training))


def _parts(training: Training) -> dict[str, _Stateful]:
    parts: dict[str, _Stateful] = {"steps": cast(Autograd, training.steps), "course": training.course}
    return parts if training.early is None else parts | {"early": training.early}


def _device(training: Training) -> torch.device:
    return cast(Autograd, training.steps).samples.labels.device
