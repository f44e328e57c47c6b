"""Tokens that rest for one block, and the attention by which they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from sparsebench.models.actor import Pass


def reads_attention(acting: Pass, block: int) -> bool:
    """Say whether the strategy chooses by this block's attention before the next one."""
    reads = "previous_attention" in acting.requires and acting.site == "block"  # a replay requires nothing
    return reads and block + 1 < acting.actor.depth and acting.acts(block + 1)


@contextmanager
def only_active(acting: Pass, active: Tensor) -> Iterator[None]:
    """Have the tokens at those positions (B, M) take part alone, for one block; the others rest."""
    index, sizes, previous = acting.index, acting.sizes, acting.previous
    acting.index, acting.sizes = index.gather(1, active), sizes.gather(1, active)
    acting.resting = index.shape[1] - active.shape[1]
    yield
    acting.index, acting.sizes, acting.resting = index, sizes, 0
    if previous is not None and acting.previous is not None and acting.previous is not previous:
        acting.previous = previous.scatter(1, active, acting.previous)
