"""Sigma-delta modulation, fused for CPU with numba: see birder/kernels/reference_sigma.py. One pass over memory each.

A tile's bits are made in loops of their own, so that each of them vectorises.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from birder.kernels.cpu_bits import TILE, count_rows, pack
from birder.kernels.jit import njit
from birder.kernels.philox import LANES
from birder.kernels.reference_sigma import UNITS

NONE = np.empty(0, np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _moments(g, m, v, beta1, rest1, beta2, rest2, hold):
    zero, inf = np.float32(0), np.float32(np.inf)
    for e in range(g.size):
        x = g[e]
        x = x if abs(x) < inf else zero  # false for NaN too
        old = v[e]
        new = old * beta2 + (x * x) * rest2
        if hold:
            new = old if x == zero else new
        m[e] = m[e] * beta1 + x * rest1
        v[e] = new


@njit(nogil=True, cache=True, error_model="numpy")
def _ratio(m, square, scale, eps, u):
    zero, one = np.float32(0), np.float32(1)
    for e in range(m.size):
        below = np.sqrt(square[e]) + eps
        x = m[e] * scale / below
        x = x if below > zero else zero
        x = x if x < one else one
        u[e] = x if x > -one else -one


@njit(nogil=True, cache=True)
def _clipped(z, most):
    z = z if z < most else most
    return z if z > -most else -most


@njit(nogil=True, cache=True)
def _leave(z, error, most, units, dither, feedback, flags, bits):
    """The bits of z, and in `error` what they leave. units: numbers of an int8 error in 1.0; 0: the error is fp32."""
    one = np.float32(1)
    for e in range(z.size):
        flags[e] = np.uint8(z[e] >= 0)
    pack(flags, bits)
    if feedback:
        for e in range(z.size):
            z[e] -= one if z[e] >= 0 else -one
    if units == np.float32(0):
        for e in range(z.size):
            error[e] = _clipped(z[e], most)
    else:
        for e in range(z.size):
            error[e] = _clipped(np.floor(z[e] * units + dither), most)


@njit(nogil=True, cache=True)
def _modulate(u, error, weight, step, most, units, dither, feedback, out):
    """`step` is what a number in `error` stands for: 1 where it is fp32."""
    z, flags = np.empty(TILE, np.float32), np.empty(TILE, np.uint8)
    for low in range(0, u.size, TILE):
        count = min(TILE, u.size - low)
        part, bits = slice(low, low + count), slice(low // LANES, (low + count) // LANES)
        x, old = u[part], error[part]
        for e in range(count):
            z[e] = x[e] * weight + np.float32(old[e]) * step
        _leave(z[:count], old, most, units, dither, feedback, flags, out[bits])


@njit(nogil=True, cache=True, error_model="numpy")
def _modulate_adam(g, m, v, shared, error, law, hold, weight, step, most, units, dither, feedback, out):
    """law: beta1, 1 - beta1, beta2, 1 - beta2, scale, eps."""
    u = np.empty(TILE, np.float32)
    for low in range(0, m.size, TILE):
        count = min(TILE, m.size - low)
        part, bits = slice(low, low + count), slice(low // LANES, (low + count) // LANES)
        if g.size:
            _moments(g[part], m[part], v[part], law[0], law[1], law[2], law[3], hold)
        _ratio(m[part], shared[part] if shared.size else v[part], law[4], law[5], u)
        _modulate(u[:count], error[part], weight, step, most, units, dither, feedback, out[bits])


@njit(nogil=True, cache=True)
def _serve(rows, error, weight, step, most, units, dither, out):
    z, flags = np.empty(TILE, np.float32), np.empty(TILE, np.uint8)
    ones, lanes, n = np.empty(TILE, np.int32), np.empty(TILE // LANES, np.uint64), np.int32(rows.shape[0])
    for low in range(0, out.size, TILE // LANES):
        count = min(TILE // LANES, out.size - low)
        count_rows(rows, low, lanes[:count], ones[: count * LANES])
        old = error[low * LANES : (low + count) * LANES]
        for e in range(count * LANES):
            z[e] = np.float32(np.int32(2) * ones[e] - n) * weight + np.float32(old[e]) * step
        _leave(z[: count * LANES], old, most, units, dither, True, flags, out[low : low + count])


def _form(error: Tensor, limit: int, dither: float) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Of an error: what a number stands for, the largest number, numbers in 1.0 (0: fp32), the dither."""
    if error.dtype == torch.float32:
        return np.float32(1), np.float32(limit), np.float32(0), np.float32(0)
    units = UNITS[limit]
    return np.float32(1.0 / units), np.float32(limit * units), np.float32(units), np.float32(dither)


def modulate(
    u: Tensor, error: Tensor, *, weight: float = 1.0, limit: int = 1, dither: float = 0.5, out: Tensor | None = None
) -> Tensor:
    """See `reference_sigma.modulate`."""
    out = torch.empty(u.numel() // LANES, dtype=torch.uint8) if out is None else out
    _modulate(u.numpy(), error.numpy(), np.float32(weight), *_form(error, limit, dither), limit == 1, out.numpy())
    return out


def modulate_adam(
    g: Tensor | None,
    m: Tensor,
    v: Tensor,
    error: Tensor,
    shared: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    scale: float,
    eps: float,
    hold: bool,
    weight: float = 1.0,
    limit: int = 1,
    dither: float = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference_sigma.modulate_adam`; gradients that are not fp32 are widened first."""
    out = torch.empty(m.numel() // LANES, dtype=torch.uint8) if out is None else out
    law = np.array([beta1, 1.0 - beta1, beta2, 1.0 - beta2, scale, eps], np.float32)
    arrays = NONE if g is None else g.float().numpy(), m.numpy(), v.numpy()
    common = NONE if shared is None else shared.numpy()
    form = np.float32(weight), *_form(error, limit, dither)
    _modulate_adam(*arrays, common, error.numpy(), law, hold, *form, limit == 1, out.numpy())
    return out


def serve_sigma(rows: Tensor, error: Tensor, *, gamma: float, dither: float = 0.5, out: Tensor | None = None) -> Tensor:
    """See `reference_sigma.serve_sigma`."""
    out = torch.empty(rows.shape[1], dtype=torch.uint8) if out is None else out
    _serve(rows.numpy(), error.numpy(), np.float32(gamma / len(rows)), *_form(error, 1, dither), out.numpy())
    return out
