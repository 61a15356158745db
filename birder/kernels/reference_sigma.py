"""Sigma-delta modulation in plain torch: the definition that the fused kernels equal bit for bit.

With u in [-1, 1] the number to be sent, e what earlier bits have left over, and sgn(0) = +1:

    two phases   z = u + e;           q = sgn(z);   e = clip(z - q, -1, 1)
    one phase    z = e + weight u;    q = sgn(z);   e = clip(z, -2, 2)          its owner then subtracts q (`settle`)
    server       a = gamma/n sum_i q_i + s;   q = sgn(a);   s = clip(a - q, -1, 1)

`limit` is the 1 or the 2. An error is fp32, or int8: then it counts steps of 1/UNITS[limit], and what lies between two steps
is rounded down after `dither`, a number in [0, 1), has been added. With `dither` spread evenly over the training's steps,
rounding has no bias, and no u is too small to count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder.kernels.bits import into, pack, unpack
from birder.kernels.one_phase import owned_words

UNITS = {1: 127, 2: 63}
"""Of the error's int8 form: steps in 1.0, by `limit`."""


def adam_ratio(
    g: Tensor | None,
    m: Tensor,
    v: Tensor,
    shared: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    scale: float,
    eps: float,
    hold: bool,
) -> Tensor:
    """Adam's moments, updated in place, and u = clip(scale m / (sqrt(V) + eps), -1, 1); 0 where the divisor is 0.

    g: fp32[d], bf16 or fp16; None: the moments are those of this step already. What is not finite counts as 0.
    m, v: fp32[d]. shared: V, fp32[d]; None: v. hold: v stays where g = 0.
    """
    if g is not None:
        adam_moments(g, m, v, beta1=beta1, beta2=beta2, hold=hold)
    square = v if shared is None else shared
    below = (square.sqrt() if square.is_cuda else square.double().sqrt_().float()).add_(eps)  # rounded to nearest
    u = torch.where(below > 0, m * scale / torch.where(below > 0, below, 1.0), 0.0)
    return u.clamp_(-1.0, 1.0)


def adam_moments(g: Tensor, m: Tensor, v: Tensor, *, beta1: float, beta2: float, hold: bool) -> None:
    """m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2, in place, as `adam_ratio` does."""
    g = torch.where(torch.isfinite(g), g, 0.0).float()
    v_next = v * beta2 + (g * g) * (1.0 - beta2)
    m.mul_(beta1).add_(g * (1.0 - beta1))
    v.copy_(torch.where(g == 0, v, v_next) if hold else v_next)


def modulate(
    u: Tensor,
    error: Tensor,
    *,
    weight: float = 1.0,
    limit: int = 1,
    dither: float = 0.5,
    out: Tensor | None = None,
) -> Tensor:
    """The worker's bits, and what they leave in `error`: fp32[d], and fp32 or int8[d] -> uint8[d/8]. d: a multiple of 8."""
    z = u * weight + widened(error, limit)
    plus = z >= 0
    bits = into(out, pack(plus))
    if limit == 1:
        z = z - torch.where(plus, 1.0, -1.0)
    keep(z, error, limit, dither)
    return bits


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
    """`adam_ratio` and `modulate` in one."""
    u = adam_ratio(g, m, v, shared, beta1=beta1, beta2=beta2, scale=scale, eps=eps, hold=hold)
    return modulate(u, error, weight=weight, limit=limit, dither=dither, out=out)


def serve_sigma(rows: Tensor, error: Tensor, *, gamma: float, dither: float = 0.5, out: Tensor | None = None) -> Tensor:
    """The server's bits, and what they leave in `error`: uint8[n, c], and fp32 or int8[8c] -> uint8[c]."""
    n = rows.shape[0]
    ones = unpack(rows).sum(0, dtype=torch.int64)
    a = (2 * ones - n).float() * (gamma / n) + widened(error, 1)
    plus = a >= 0
    bits = into(out, pack(plus))
    keep(a - torch.where(plus, 1.0, -1.0), error, 1, dither)
    return bits


def settle(
    error: Tensor, bits: Tensor, *, n: int, worker: int, seed: int, step: int, start: int, turn: int = 0
) -> None:
    """e = e - q for the 32-bit words that this worker sends (`one_phase.owned`, whose options these are), in place.

    error: fp32 or int8[d]; bits: of all elements, uint8[d/8]. Touches d/n elements.
    """
    where = owned_words(len(bits) // 4, n=n, worker=worker, seed=seed, step=step, start=start, turn=turn, like=bits)
    sent = unpack(bits.view(-1, 4)[where])
    one = UNITS[2] if error.dtype == torch.int8 else 1
    error.view(-1, 32)[where] -= (sent.to(error.dtype) * 2 - 1) * one


def widened(error: Tensor, limit: int) -> Tensor:
    """The error as fp32."""
    return error if error.dtype == torch.float32 else error.float() * (1.0 / UNITS[limit])


def keep(z: Tensor, error: Tensor, limit: int, dither: float) -> None:
    """error = clip(z, -limit, limit), in the error's own type."""
    if error.dtype == torch.float32:
        error.copy_(z.clamp(-float(limit), float(limit)))
    else:
        most = float(limit * UNITS[limit])
        error.copy_((z * float(UNITS[limit]) + dither).floor_().clamp_(-most, most))
