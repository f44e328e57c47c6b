from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sparsebench.models.base import Shallow
from sparsebench.reproduce.trials import Trial
from sparsebench.tasks.theory import Theory

SIZES = tuple(sorted({round(2 ** (k / 8)) for k in range(8, 90)}))
"""Fine enough for N50 to be within a few percent of the size at which trials begin to succeed."""


def _trial(
    n: int = 8, repetition: int = 0, *, strategy: str = "dense", removed: float = 0.0, where: str = "both",
    diverged: bool = False, task: dict[str, Any] | None = None, model: dict[str, Any] | None = None,
    curves: dict[str, tuple[float, ...]] | None = None, **values: float | None,
) -> Trial:  # fmt: skip
    return Trial(
        task=Theory(**(task or {})), model=Shallow(**(model or {})), strategy=strategy, removed=removed, where=where,
        n=n, repetition=repetition, values={} if diverged else {"success": 1.0, "steps": 10.0} | values,
        curves={} if diverged else curves or {}, diverged=diverged,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_trial() -> Callable[..., Trial]:
    """Return a maker of trials: what is no parameter of the task or the model is a metric."""
    return _trial


@pytest.fixture(scope="session")
def grid_of() -> Callable[..., list[Trial]]:
    """Return a maker of the trials of one condition that succeed from about `n50` samples on.

    Repetitions differ by up to `spread`, a factor, about it.
    """

    def make(
        n50: float, *, repetitions: int = 8, spread: float = 1.15, sizes: Sequence[int] = SIZES, **options: Any
    ) -> list[Trial]:
        steps = [2 * r / (repetitions - 1) - 1 for r in range(repetitions)] if repetitions > 1 else [0.0]
        return [
            _trial(n, r, success=float(n >= n50 * spread**step), **options)
            for r, step in enumerate(steps)
            for n in sizes
        ]

    return make
