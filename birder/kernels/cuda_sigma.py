"""Sigma-delta modulation, fused for GPUs with Triton: see birder/kernels/reference_sigma.py. One pass over memory each."""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from birder.kernels.cuda_bits import BYTES, elements, first_byte, launch, pack, unpack
from birder.kernels.philox import LANES
from birder.kernels.reference_sigma import UNITS


@triton.jit
def _clipped(z, most):
    z = tl.where(z < most, z, most)
    return tl.where(z > -most, z, -most)


@triton.jit
def _floor(x):
    """Of small numbers. The instruction for it takes numbers below 1e-38 for 0."""
    whole = x.to(tl.int32).to(tl.float32)
    return tl.where(x < whole, whole - 1.0, whole)


@triton.jit
def _old(error, e, live, step, STEPS: tl.constexpr):
    """What the error says, as fp32."""
    old = tl.load(error + e, mask=live, other=0)
    return old.to(tl.float32) * step if STEPS else old


@triton.jit
def _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK: tl.constexpr, STEPS: tl.constexpr):
    """Writes the bits of z, and what they leave in `error`."""
    plus = z >= 0.0
    if FEEDBACK:
        z = z - tl.where(plus, 1.0, -1.0)
    if STEPS:
        tl.store(error + e, _clipped(_floor(z * units + dither), most).to(tl.int8), mask=live)
    else:
        tl.store(error + e, _clipped(z, most), mask=live)
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit
def _modulate(
    u,
    error,
    out,
    count,
    weight,
    step,
    most,
    units,
    dither,
    FEEDBACK: tl.constexpr,
    STEPS: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    z = tl.load(u + e, mask=live, other=0.0) * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK, STEPS)


@triton.jit
def _modulate_adam(
    g,
    m,
    v,
    shared,
    error,
    out,
    count,
    beta1,
    rest1,
    beta2,
    rest2,
    scale,
    eps,
    weight,
    step,
    most,
    units,
    dither,
    MOMENTS: tl.constexpr,
    HOLD: tl.constexpr,
    SHARED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STEPS: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    mean = tl.load(m + e, mask=live, other=0.0)
    if MOMENTS:
        x = tl.load(g + e, mask=live, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # false for NaN too
        old = tl.load(v + e, mask=live, other=0.0)
        square = old * beta2 + (x * x) * rest2
        if HOLD:
            square = tl.where(x == 0.0, old, square)
        mean = mean * beta1 + x * rest1
        tl.store(m + e, mean, mask=live)
        tl.store(v + e, square, mask=live)
        if SHARED:
            square = tl.load(shared + e, mask=live, other=0.0)
    elif SHARED:
        square = tl.load(shared + e, mask=live, other=0.0)
    else:
        square = tl.load(v + e, mask=live, other=0.0)
    below = tl.sqrt_rn(square) + eps
    ratio = tl.div_rn(mean * scale, tl.where(below > 0.0, below, 1.0))
    ratio = _clipped(tl.where(below > 0.0, ratio, 0.0), 1.0)
    z = ratio * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK, STEPS)


@triton.jit(do_not_specialize=["n"])
def _serve(rows, error, out, count, n, weight, step, most, units, dither, STEPS: tl.constexpr, BYTES: tl.constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    ones = tl.zeros((BYTES, 8), tl.int32)
    for r in range(n):
        ones += unpack(tl.load(rows + tl.cast(r, tl.int64) * count + byte, mask=byte < count, other=0))
    z = (2 * ones - n).to(tl.float32) * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, True, STEPS)


def _form(error: Tensor, limit: int, dither: float) -> tuple[float, float, float, float]:
    """What a number of the error stands for, the largest number, numbers in 1.0, the dither. For fp32 only the second."""
    if error.dtype == torch.float32:
        return 0.0, float(limit), 0.0, 0.0
    units = UNITS[limit]
    return 1.0 / units, float(limit * units), float(units), float(dither)


def _constants(error: Tensor, limit: int) -> dict[str, object]:
    return {"FEEDBACK": limit == 1, "STEPS": error.dtype != torch.float32, "BYTES": BYTES}


def modulate(
    u: Tensor, error: Tensor, *, weight: float = 1.0, limit: int = 1, dither: float = 0.5, out: Tensor | None = None
) -> Tensor:
    """See `reference_sigma.modulate`."""
    out = torch.empty(u.numel() // LANES, dtype=torch.uint8, device=u.device) if out is None else out
    programs, form = triton.cdiv(out.numel(), BYTES), _form(error, limit, dither)
    launch(_modulate, programs, u, error, out, out.numel(), float(weight), *form, **_constants(error, limit))
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
    """See `reference_sigma.modulate_adam`."""
    out = torch.empty(m.numel() // LANES, dtype=torch.uint8, device=m.device) if out is None else out
    tensors = m if g is None else g, m, v, v if shared is None else shared, error, out
    law = beta1, 1.0 - beta1, beta2, 1.0 - beta2, float(scale), float(eps)
    constants = {"MOMENTS": g is not None, "HOLD": hold, "SHARED": shared is not None, **_constants(error, limit)}
    form = float(weight), *_form(error, limit, dither)
    launch(_modulate_adam, triton.cdiv(out.numel(), BYTES), *tensors, out.numel(), *law, *form, **constants)
    return out


def serve_sigma(rows: Tensor, error: Tensor, *, gamma: float, dither: float = 0.5, out: Tensor | None = None) -> Tensor:
    """See `reference_sigma.serve_sigma`."""
    n, count = rows.shape
    out = torch.empty(count, dtype=torch.uint8, device=rows.device) if out is None else out
    args, programs = (gamma / n, *_form(error, 1, dither)), triton.cdiv(count, BYTES)
    launch(_serve, programs, rows, error, out, count, n, *args, STEPS=error.dtype != torch.float32, BYTES=BYTES)
    return out
