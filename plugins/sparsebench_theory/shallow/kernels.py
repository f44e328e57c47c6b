"""Compiled kernels for the gradient step of the shallow Vision Transformer in closed form, one sample at a time.

With K = W_K^T W_Q and C = W_O W_V, eq. (1) of Li et al. (ICLR 2023) is, for the tokens x_1 .. x_S of a sample with
read-out vectors a_1 .. a_S,

    A_sl = softmax_s(x_s^T K x_l),  z_l = sum_s A_sl x_s,  h_l = C z_l,  F = (1 / S) sum_l a_l^T relu(h_l)

and with v_l = a_l * 1[h_l > 0], G_l = C^T v_l and c = (dLoss / dF) / S its gradients are

    dC = c sum_l v_l z_l^T,   dS_sl = c A_sl (x_s - z_l)^T G_l,   dK = sum_sl dS_sl x_s x_l^T
    dW_O = dC W_V^T,  dW_V = W_O^T dC,  dW_Q = W_K dK,  dW_K = W_Q dK^T

Arrays are flat. Innermost loops have a length that is known at compile time: neurons are in tiles of TILE, attending
tokens in blocks of LANES, and the width D of a token is twice the length of the argument `half`, zeros of the number
type. Otherwise the compiler does not keep a token in registers, and a step takes three times as long. Sums over D in
such a loop are split into halves of D, since the compiler unrolls ten products, but not twenty. Beyond D = 20 a step is
several times slower than its operations require. D is padded to an even number, and S to a multiple of 4; below, D and
S include the padding, which is 0.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.cpython.unsafe.tuple import tuple_setitem

TILE, LANES = 256, 32
# The compiler may reorder sums and fuse multiply-adds, but must respect NaN and infinity.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

Weights = namedtuple("Weights", "Q K V O a")
"""W_Q, W_K, W_V (D, D); W_O as [tile][D][TILE]; the read-out vectors as [tile][L][TILE], with L padded to even."""

Work = namedtuple("Work", "C dC dK dV P XT E Z G v scale bits small")


def work_space(D: int, S: int, tiles: int, dtype: Any) -> Work:
    """Return work space for samples with S tokens of width D, both with padding, which stays 0."""
    lanes = -(-S // LANES) * LANES
    sizes = {
        "C": tiles * D * TILE, "dC": tiles * D * TILE, "dK": D * D, "dV": D * D, "P": S * D, "XT": lanes * D,
        "E": lanes * S, "Z": lanes * D, "G": lanes * D, "v": tiles * S * TILE, "scale": lanes, "small": (D + 1) * LANES,
    }  # fmt: skip
    return Work(bits=np.zeros(S * LANES, np.int32), **{name: np.zeros(n, dtype) for name, n in sizes.items()})


OPTIONS: dict[str, Any] = {"fastmath": _FAST, "error_model": "numpy", "forceinline": True}
part = numba.njit(**OPTIONS)
"""Compile a part of a kernel, which is inlined."""


def compile_kernel(function: Callable[..., Any]) -> Any:
    """Compile a function, and cache the machine code on disk, if possible.

    Called parts are inlined. With a call of a separate function, a process that compiles would use another copy of it,
    with another order of sums, than a process that reads the cache.
    """
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(**OPTIONS)(function)


@part
def _row(flat: Any, start: int, zeros: Any) -> Any:
    """Return len(zeros) numbers from `start` on as a tuple, in registers."""
    out = zeros
    for k in range(len(zeros)):
        out = tuple_setitem(out, k, flat[start + k])  # type: ignore[call-arg]
    return out


@part
def _exp(x: Any, bits: Any, n: int) -> None:
    """Replace n numbers <= 0 by their exponentials.

    In float32 this is 2^k times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes), with a relative error of 1.2e-7, since
    the compiler has no vectorised exponential. Results below e^-87 become e^-87.
    """
    if x.itemsize == 8:
        for i in range(n):
            x[i] = np.exp(x[i])
        return
    f = np.float32
    for i in range(n):
        v = x[i]
        v = f(-87.0) if v < f(-87.0) else v  # NaN stays
        k = np.rint(v * f(1.4426950408889634))
        r = v - k * f(0.693359375) + k * f(2.12194440e-4)
        p = f(1.9875691500e-4) * r + f(1.3981999507e-3)
        p = (p * r + f(8.3334519073e-3)) * r + f(4.1665795894e-2)
        p = (p * r + f(1.6666665459e-1)) * r + f(5.0000001201e-1)
        x[i] = p * r * r + r + f(1)
        bits[i] = (np.int32(k) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(n):
        x[i] *= powers[i]


@part
def _project(x: Any, K: Any, S: int, P: Any, half: Any) -> None:
    """P = X K, (S, D)."""
    D = 2 * len(half)
    for s in range(S):
        row = P[s * D : (s + 1) * D]
        row[:] = half[0]
        for k in range(D):
            for i in range(D):
                row[i] += x[s * D + k] * K[k * D + i]


@part
def _scores(P: Any, xt: Any, S: int, E: Any, half: Any) -> None:
    """Fill E [S][LANES] with the scores x_s^T K x_l of one block of attending tokens xt [D][LANES]."""
    H, D, zero = len(half), 2 * len(half), half[0]
    for s in range(S):
        p, q, e = _row(P, s * D, half), _row(P, s * D + H, half), E[s * LANES : (s + 1) * LANES]
        for l in range(LANES):
            score = zero
            for k in range(H):
                score += p[k] * xt[k * LANES + l] + q[k] * xt[(H + k) * LANES + l]
            e[l] = score


@part
def _softmax(S: int, E: Any, scale: Any, bits: Any, zero: Any) -> None:
    """Turn the scores in E into e^(score - largest), and fill scale with 1 / their sums."""
    for l in range(LANES):  # numba takes 2 seconds to compile `scale[:] = E[:LANES]`, for its error message
        scale[l] = E[l]
    for s in range(1, S):
        e = E[s * LANES : (s + 1) * LANES]
        for l in range(LANES):
            scale[l] = e[l] if e[l] > scale[l] else scale[l]
    for s in range(S):
        e = E[s * LANES : (s + 1) * LANES]
        for l in range(LANES):
            e[l] -= scale[l]
    _exp(E, bits, S * LANES)
    scale[:] = zero
    for s in range(S):
        e = E[s * LANES : (s + 1) * LANES]
        for l in range(LANES):
            scale[l] += e[l]
    for l in range(LANES):
        scale[l] = (zero + 1) / scale[l]


@part
def _values(x: Any, E: Any, z: Any, half: Any) -> None:
    """z [D][LANES] = X^T E for one block, four tokens at a time."""
    zeros, D = half + half, 2 * len(half)
    z[:] = half[0]
    for s in range(0, E.size // LANES, 4):
        x0, x1 = _row(x, s * D, zeros), _row(x, (s + 1) * D, zeros)
        x2, x3 = _row(x, (s + 2) * D, zeros), _row(x, (s + 3) * D, zeros)
        e = E[s * LANES : (s + 4) * LANES]
        for l in range(LANES):
            e0, e1, e2, e3 = e[l], e[LANES + l], e[2 * LANES + l], e[3 * LANES + l]
            for k in range(D):
                z[k * LANES + l] += x0[k] * e0 + x1[k] * e1 + x2[k] * e2 + x3[k] * e3


@part
def _attend(x: Any, S: int, K: Any, w: Work, half: Any) -> None:
    """From tokens x [rows][D], S of them not padding, fill w.Z with z_l, w.E and w.scale with the attention."""
    D, zero = 2 * len(half), half[0]
    rows = x.size // D
    _project(x, K, S, w.P, half)
    for first in range(0, S, LANES):
        xt = w.XT[first * D : (first + LANES) * D]
        for l in range(LANES):
            for k in range(D):
                xt[k * LANES + l] = x[(first + l) * D + k] if first + l < S else zero
        E, scale = w.E[first * rows : (first + LANES) * rows], w.scale[first : first + LANES]
        _scores(w.P, xt, S, E, half)
        _softmax(S, E, scale, w.bits, zero)
        _values(x, E, w.small[: D * LANES], half)
        for l in range(LANES):
            for k in range(D):
                w.Z[(first + l) * D + k] = w.small[k * LANES + l] * scale[l] if first + l < S else zero


@part
def _read_out(places: Any, a: Any, w: Work, half: Any) -> Any:
    """Return S * F, and leave v [tile][rows][TILE] in w.v; `places` are the tokens' positions."""
    H, D, zero = len(half), 2 * len(half), half[0]
    rows, tiles = len(places), w.C.size // (D * TILE)
    L = a.size // (tiles * TILE)
    total = zero
    for t in range(tiles):
        C = w.C[t * D * TILE : (t + 1) * D * TILE]
        for l in range(0, rows, 2):
            y0, z0 = _row(w.Z, l * D, half), _row(w.Z, l * D + H, half)
            y1, z1 = _row(w.Z, (l + 1) * D, half), _row(w.Z, (l + 1) * D + H, half)
            p0, p1 = (t * L + places[l]) * TILE, (t * L + places[l + 1]) * TILE
            a0, a1 = a[p0 : p0 + TILE], a[p1 : p1 + TILE]
            v = w.v[(t * rows + l) * TILE : (t * rows + l + 2) * TILE]
            for j in range(TILE):
                h0, h1 = zero, zero
                for k in range(H):
                    b, c = C[k * TILE + j], C[(H + k) * TILE + j]
                    h0 += y0[k] * b + z0[k] * c
                    h1 += y1[k] * b + z1[k] * c
                v0 = a0[j] if h0 > 0 else zero
                v1 = a1[j] if h1 > 0 else zero
                v[j] = v0
                v[TILE + j] = v1
                total += v0 * h0 + v1 * h1
    return total


@part
def _back_to_neurons(c: Any, rows: int, w: Work, half: Any) -> None:
    """w.dC += c sum_l v_l z_l^T."""
    zeros, D = half + half, 2 * len(half)
    for i in range(rows * D):
        w.G[i] = c * w.Z[i]
    for t in range(w.C.size // (D * TILE)):
        dC = w.dC[t * D * TILE : (t + 1) * D * TILE]
        for l in range(0, rows, 4):
            z0, z1 = _row(w.G, l * D, zeros), _row(w.G, (l + 1) * D, zeros)
            z2, z3 = _row(w.G, (l + 2) * D, zeros), _row(w.G, (l + 3) * D, zeros)
            v = w.v[(t * rows + l) * TILE : (t * rows + l + 4) * TILE]
            for j in range(TILE):
                v0, v1, v2, v3 = v[j], v[TILE + j], v[2 * TILE + j], v[3 * TILE + j]
                for k in range(D):
                    dC[k * TILE + j] += z0[k] * v0 + z1[k] * v1 + z2[k] * v2 + z3[k] * v3


@part
def _back_to_values(rows: int, w: Work, half: Any) -> None:
    """w.G = C^T v, [rows][D]: four tokens and two columns at a time."""
    D, zero, G = 2 * len(half), half[0], w.G
    G[:] = zero
    for t in range(w.C.size // (D * TILE)):
        for l in range(0, rows, 4):
            v = w.v[(t * rows + l) * TILE : (t * rows + l + 4) * TILE]
            for k in range(0, D, 2):
                C = w.C[(t * D + k) * TILE : (t * D + k + 2) * TILE]
                g00 = g01 = g10 = g11 = g20 = g21 = g30 = g31 = zero
                for j in range(TILE):
                    c0, c1 = C[j], C[TILE + j]
                    v0, v1, v2, v3 = v[j], v[TILE + j], v[2 * TILE + j], v[3 * TILE + j]
                    g00 += c0 * v0
                    g01 += c1 * v0
                    g10 += c0 * v1
                    g11 += c1 * v1
                    g20 += c0 * v2
                    g21 += c1 * v2
                    g30 += c0 * v3
                    g31 += c1 * v3
                at = l * D + k
                G[at] += g00
                G[at + 1] += g01
                G[at + D] += g10
                G[at + D + 1] += g11
                G[at + 2 * D] += g20
                G[at + 2 * D + 1] += g21
                G[at + 3 * D] += g30
                G[at + 3 * D + 1] += g31


@part
def _back_to_attention(c: Any, x: Any, S: int, w: Work, half: Any) -> None:
    """w.dK += sum_sl dS_sl x_s x_l^T, one block of attending tokens after the other; w.E becomes dS."""
    H, D, zero = len(half), 2 * len(half), half[0]
    rows = x.size // D
    g, r = w.small[: D * LANES], w.small[D * LANES :]
    for first in range(0, S, LANES):
        E, scale = w.E[first * rows : (first + LANES) * rows], w.scale[first : first + LANES]
        r[:] = zero
        for l in range(LANES):
            for k in range(D):
                at = (first + l) * D + k
                g[k * LANES + l] = c * scale[l] * w.G[at]
                r[l] -= g[k * LANES + l] * w.Z[at]
        for s in range(S):
            p, q, e = _row(x, s * D, half), _row(x, s * D + H, half), E[s * LANES : (s + 1) * LANES]
            for l in range(LANES):
                change = r[l]
                for k in range(H):
                    change += p[k] * g[k * LANES + l] + q[k] * g[(H + k) * LANES + l]
                e[l] *= change
        _values(x, E, g, half)
        for l in range(min(LANES, S - first)):
            for i in range(D):
                for k in range(D):
                    w.dK[i * D + k] += g[i * LANES + l] * x[(first + l) * D + k]


@part
def _products(weights: Weights, K: Any, w: Work, half: Any) -> None:
    """K = W_K^T W_Q and w.C = W_O W_V."""
    D, zero = 2 * len(half), half[0]
    for i in range(D):
        for k in range(D):
            total = zero
            for q in range(D):
                total += weights.K[q, i] * weights.Q[q, k]
            K[i * D + k] = total
    w.C[:] = zero
    for t in range(w.C.size // (D * TILE)):
        for k in range(D):
            C = w.C[(t * D + k) * TILE : (t * D + k + 1) * TILE]
            for q in range(D):
                O, value = weights.O[(t * D + q) * TILE : (t * D + q + 1) * TILE], weights.V[q, k]
                for j in range(TILE):
                    C[j] += value * O[j]


@part
def _descend_values(weights: Weights, lr: Any, w: Work, half: Any) -> None:
    """W_O -= lr dC W_V^T and W_V -= lr W_O^T dC, both from the old ones."""
    D = 2 * len(half)
    w.dV[:] = half[0]
    for t in range(w.C.size // (D * TILE)):
        for q in range(D):
            O = weights.O[(t * D + q) * TILE : (t * D + q + 1) * TILE]
            for k in range(D):
                dC, total = w.dC[(t * D + k) * TILE : (t * D + k + 1) * TILE], half[0]
                for j in range(TILE):
                    total += O[j] * dC[j]
                w.dV[q * D + k] += total
            for k in range(D):
                dC, value = w.dC[(t * D + k) * TILE : (t * D + k + 1) * TILE], lr * weights.V[q, k]
                for j in range(TILE):
                    O[j] -= value * dC[j]
    for q in range(D):
        for k in range(D):
            weights.V[q, k] -= lr * w.dV[q * D + k]


@part
def _descend_attention(weights: Weights, lr: Any, w: Work, half: Any) -> None:
    """W_Q -= lr W_K dK and W_K -= lr W_Q dK^T, both from the old ones."""
    D = 2 * len(half)
    dQ, dK = np.zeros_like(w.dK), np.zeros_like(w.dK)
    for q in range(D):
        for k in range(D):
            for i in range(D):
                dQ[q * D + k] += weights.K[q, i] * w.dK[i * D + k]
                dK[q * D + k] += weights.Q[q, i] * w.dK[k * D + i]
    for q in range(D):
        for k in range(D):
            weights.Q[q, k] -= lr * dQ[q * D + k]
            weights.K[q, k] -= lr * dK[q * D + k]


@compile_kernel
def outputs(X: Any, places: Any, S: int, weights: Weights, w: Work, half: Any, F: Any) -> None:
    """Fill F (n,) with the outputs for tokens X (n, rows * D) at places (n, rows); S rows are not padding."""
    K = np.empty((2 * len(half)) ** 2, X.dtype)
    _products(weights, K, w, half)
    for n in range(len(X)):
        _attend(X[n], S, K, w, half)
        F[n] = _read_out(places[n], weights.a, w, half) / S


@compile_kernel
def step(
    X: Any, places: Any, signs: Any, rows: Any, S: int, weights: Weights, lr: Any, frozen: bool, w: Work, half: Any
) -> float:
    """Take one step of SGD on the mean hinge loss of the samples `rows`, in place; return the sum of their losses.

    A sample with zero loss has zero gradient, so its backward pass is skipped.
    """
    K = np.empty((2 * len(half)) ** 2, X.dtype)
    _products(weights, K, w, half)
    w.dC[:] = half[0]
    w.dK[:] = half[0]
    summed, moved, c = 0.0, False, half[0]
    for n in rows:
        _attend(X[n], S, K, w, half)
        F = _read_out(places[n], weights.a, w, half) / S
        loss = 1 - signs[n] * F
        if -np.inf < loss <= 0:  # false for NaN
            continue
        summed, moved = summed + loss, True
        c = X.dtype.type(-signs[n] / (len(rows) * S))
        _back_to_neurons(c, len(places[n]), w, half)
        if not frozen:
            _back_to_values(len(places[n]), w, half)
            _back_to_attention(c, X[n], S, w, half)
    if moved:
        _descend_values(weights, X.dtype.type(lr), w, half)
        if not frozen:
            _descend_attention(weights, X.dtype.type(lr), w, half)
    return summed
