"""The quantities of the theorems of Li et al. (ICLR 2023) as functions of their symbols.

Symbols: alpha_* and alpha_# are the shares of relevant and confusing tokens; sigma and delta the errors of the first
value matrix and of the first query and key matrices (Assumption 1); tau the largest distance of a token from its
pattern, for Gaussian noise about c0 sqrt(d); M patterns, m neurons, N samples, eta the step size.

What is "up to a constant" says how a quantity grows and not what it is: compare ratios and exponents. These functions
take numbers or arrays, which broadcast; where the condition behind a bound fails there is none, and it is infinite.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Numbers: TypeAlias = float | np.ndarray


def attention_mass(counts: np.ndarray, kap: float, relevant: int = 0) -> float:
    """Return sum_(i in S_*) softmax(x_i^T W_K^T W_Q x_l), the mean over all tokens l, before training.

    Exact for noiseless tokens on orthonormal patterns and W_K^T W_Q = kap I, thus for kap = (1 - delta)^2 where the
    first query and key matrices are (1 - delta) I: tokens of one pattern have the score kap, others 0.

    Args:
        counts: (M,) tokens or shares of each pattern.
        kap: see above.
        relevant: number of the relevant pattern.
    """
    shares = counts / counts.sum()
    weights = np.where(np.arange(len(shares)) == relevant, np.exp(kap), 1.0)
    return float((shares * shares[relevant] * weights / (1 + shares * np.expm1(kap))).sum())


def attention_limit(eta: Numbers, C: float = 1.0) -> Numbers:
    """Return 1 - eta^C, the attention mass on relevant tokens that training tends to at rate 1/t (Proposition 2).

    For step sizes below 1. C > 0 is a constant that the paper does not give.
    """
    return 1 - eta**C


def neurons_needed(N: Numbers, M: Numbers, eps: Numbers) -> Numbers:
    """Return eps^-2 M^2 log N, the neurons m of Theorem 1 up to a constant."""
    return M**2 * np.log(N) / eps**2


def relevant_needed(
    confusion: Numbers, sigma: Numbers, tau: Numbers, delta: Numbers, eps_S: Numbers = 0.5
) -> np.ndarray:
    """Return alpha_# / (eps_S e^-(delta + tau) (1 - (sigma + tau))), the least alpha_* of Theorem 1.

    eps_S lies in (0, 1/2); at its upper end, the default, the condition is weakest.
    """
    return confusion * _inverse(eps_S * np.exp(-(delta + tau)) * (1 - (sigma + tau)), 1)


def batch_needed(relevant: Numbers, sigma: Numbers, tau: Numbers, delta: Numbers) -> np.ndarray:
    """Return (alpha_* - e^-(delta + tau) (tau + sigma))^-2, the batch size B of Theorem 1 up to a constant."""
    return _inverse(relevant - np.exp(-(delta + tau)) * (tau + sigma), 2)


def samples_needed(
    relevant: Numbers, sigma: Numbers, tau: Numbers, zeta: Numbers = 1.0, c1: float = 1.0, c2: float = 1.0
) -> np.ndarray:
    """Return (alpha_* - c'(1 - zeta) - c''(sigma + tau))^-2, the samples N of Theorem 1 up to a constant.

    Args:
        relevant: alpha_*.
        sigma, tau: see above.
        zeta: at least about 1 - eta^10; by default its limit for small steps, 1.
        c1, c2: c' and c'', positive constants that the paper does not give; 1 stands in for them.
    """
    return _inverse(relevant - c1 * (1 - zeta) - c2 * (sigma + tau), 2)


def samples_needed_frozen(relevant: Numbers, sigma: Numbers, tau: Numbers) -> np.ndarray:
    """Return (alpha_* (alpha_* - sigma - tau))^-2, the samples N of Proposition 1 up to a constant.

    There W_K and W_Q stay as they began, and N grows as alpha_*^-4: trained attention saves a factor alpha_*^-2.
    """
    return _inverse(relevant * (relevant - sigma - tau), 2)


def steps_needed(
    relevant: Numbers, eta: Numbers, M: Numbers, sigma: Numbers, tau: Numbers, eps: Numbers = 0.0
) -> np.ndarray:
    """Return 1 / ((1 - eps - (sigma + tau) M / pi) eta alpha_*), the steps T of Theorem 1 up to a constant.

    eps is that of `neurons_needed`; 0, the default, stands for any number of neurons.
    """
    return _inverse((1 - eps - (sigma + tau) * M / np.pi) * eta * relevant, 1)


def lucky_neurons(W_O: np.ndarray, p: np.ndarray, sigma: float, tau: float) -> np.ndarray:
    """Return (m,) booleans, the neurons whose row of W_O is at an angle of at most sigma + tau to p.

    The paper's W(t) for p = p_1 and U(t) for p = p_2, the images of mu_1 and mu_2 in the values. Literally so: of
    Gaussian rows in ten dimensions about one in 10^9 is within 0.13 of p, whatever `lucky_bound` says.

    Args:
        W_O: (m, m_a) output matrix at step t; no row is 0.
        p: (m_a,) not 0.
        sigma, tau: see above; the angle is in radians.
    """
    cosines = W_O @ p / (np.linalg.norm(W_O, axis=1) * np.linalg.norm(p))
    return np.arccos(np.clip(cosines, -1, 1)) <= sigma + tau


def lucky_bound(m: Numbers, M: Numbers, sigma: Numbers, tau: Numbers, eps: Numbers = 0.0) -> np.ndarray:
    """Return (m / M) (1 - eps - (sigma + tau) M / pi), the least |W(0)| and |U(0)| by the paper; 0 where it is below.

    Neither set loses a neuron in training, so it bounds all later ones as well.
    """
    return np.maximum(m / M * (1 - eps - (sigma + tau) * M / np.pi), 0.0)


def _inverse(value: Numbers, power: int) -> np.ndarray:
    """Return value^-power where the value is positive, else infinity."""
    with np.errstate(divide="ignore"):
        return np.power(np.maximum(value, 0.0), -power)
