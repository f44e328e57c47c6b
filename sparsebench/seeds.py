"""Random numbers named by their purpose, so that no draw depends on order, batching or machine."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def seed_of(*dimensions: object) -> int:
    """Return 63 bits that depend on the named dimensions and on nothing else."""
    text = "\x1f".join(map(str, dimensions)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(*dimensions: object) -> np.random.Generator:
    """Return a numpy generator for the named dimensions."""
    return np.random.Generator(np.random.Philox(seed_of(*dimensions)))


def _to_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(keys: Tensor, value: int | Tensor) -> Tensor:
    """Return new int64 keys from keys of any shape and a value.

    One round of SplitMix64 (Steele, Lea and Flood 2014), in integer arithmetic only, so that all devices agree.
    """
    x = keys + (_to_signed(value * _GOLDEN % 2**64) if isinstance(value, int) else value * _to_signed(_GOLDEN))
    x = (x ^ _shift(x, 30)) * _to_signed(_MIX[0])
    x = (x ^ _shift(x, 27)) * _to_signed(_MIX[1])
    return x ^ _shift(x, 31)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Return (B, count) float32 numbers in [0, 1): one row for each of the (B,) int64 keys."""
    import torch

    steps = torch.arange(1, count + 1, device=keys.device)
    return _shift(mix(keys[:, None], steps), 40).to(torch.float32) / 2**24


def global_states() -> dict[str, Any]:
    """Return the global random states of torch (on the CPU), NumPy and Python by library, in a form to compare."""
    import torch

    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, np.asarray(keys).tobytes(), *rest),
        "random": random.getstate(),
    }


@contextmanager
def global_states_kept() -> Iterator[None]:
    """Restore the global random states of torch (on the CPU), NumPy and Python at the end."""
    import torch

    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
