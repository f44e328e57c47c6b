"""The quantities of Li et al. (ICLR 2023) that its figures are compared with.

alpha_* is the share of relevant tokens; sigma and delta are the errors of the first value matrix and of the first query
and key matrices (Assumption 1); tau is the largest distance of a token from its pattern, for Gaussian noise about
c0 sqrt(d). Quantities "up to a constant" show only how they grow: compare ratios and exponents. Constants c'' that the
paper does not state are 1, and zeta is 1, its limit for small steps.

The functions take numbers or arrays, which broadcast. If the condition of a bound fails, the result is infinity.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Numbers: TypeAlias = float | np.ndarray


def attention_mass(counts: np.ndarray, kap: float) -> float:
    """Return sum_(i in S_*) softmax(x_i^T W_K^T W_Q x_l), the mean over all tokens l, before training.

    It is exact for noiseless tokens on orthonormal patterns and W_K^T W_Q = kap I. Then tokens of the same pattern have
    the score kap, others 0. If the first query and key matrices are (1 - delta) I, kap is (1 - delta)^2.

    Args:
        counts: (M,) tokens or shares of each pattern, the relevant one first.
        kap: see above.
    """
    shares = counts / counts.sum()
    weights = np.where(np.arange(len(shares)) == 0, np.exp(kap), 1.0)
    return float((shares * shares[0] * weights / (1 + shares * np.expm1(kap))).sum())


def samples_needed(relevant: Numbers, sigma: Numbers, tau: Numbers) -> np.ndarray:
    """Return (alpha_* - c'' (sigma + tau))^-2, the samples N of Theorem 1 up to a constant."""
    return _inverse(relevant - (sigma + tau), 2)


def samples_needed_frozen(relevant: Numbers, sigma: Numbers, tau: Numbers) -> np.ndarray:
    """Return (alpha_* (alpha_* - sigma - tau))^-2, the samples N of Proposition 1 up to a constant.

    W_K and W_Q are frozen there, and N grows as alpha_*^-4: training the attention saves a factor alpha_*^-2.
    """
    return _inverse(relevant * (relevant - sigma - tau), 2)


def steps_needed(relevant: Numbers, eta: Numbers, M: Numbers, sigma: Numbers, tau: Numbers) -> np.ndarray:
    """Return 1 / ((1 - (sigma + tau) M / pi) eta alpha_*), the steps T of Theorem 1 up to a constant.

    M is the number of patterns, eta the step size. The number of neurons is large: the paper's epsilon is 0.
    """
    return _inverse((1 - (sigma + tau) * M / np.pi) * eta * relevant, 1)


def _inverse(value: Numbers, power: int) -> np.ndarray:
    """Return value^-power where the value is positive, otherwise infinity."""
    with np.errstate(divide="ignore"):
        return np.power(np.maximum(value, 0.0), -power)
