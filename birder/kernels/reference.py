"""The kernels in plain torch: any device, and the definition that the fused ones must equal bit for bit.

All tensors are flat and contiguous; states are fp32. Bits are packed 8 to a byte (birder/kernels/bits.py).
Products and sums are written as separate operations, because a fused multiply-add would round differently.
Where `out` is given, the result is copied there: torch's operations in between make tensors of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder.kernels.bits import into, pack, unpack
from birder.kernels.draw import chosen_blocks, random_mask
from birder.kernels.one_phase import assemble, owned
from birder.kernels.philox import SELECT_STREAM, SERVER_STREAM, random_bytes, uniform16
from birder.kernels.reference_feedback import (
    add_average,
    add_message,
    add_momentum,
    average_signs,
    move_adam,
    pack_signs,
    split_signs,
    sum_squares,
    write_signs,
)
from birder.kernels.reference_many import apply_bits, take
from birder.kernels.reference_sigma import adam_moments, modulate, modulate_adam, serve_sigma, settle

HALF_RANGE = 32768.0  # 2^15: maps u in [-1, 1] to a threshold in [0, 2^16], exact to 2^-17 in probability


def ratio(
    g: Tensor,
    m: Tensor,
    b: Tensor,
    *,
    beta: float,
    eps: float,
    hold: bool,
    beta2: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Birder's moments, updated in place, and their ratio u in [-1, 1]: fp32[d] each; g may be bf16 or fp16 too.

    m = beta m + (1-beta) g;  b = beta2 b + (1-beta2)|g|;  u = scale m/(b+eps), clipped to [-1, 1], 0 where b = 0.
    beta2: None is beta. With one beta and scale 1 there is nothing to clip, since |m| <= b.
    A gradient that is not finite counts as 0. `hold`: b stays as it is where g = 0.
    """
    beta2 = beta if beta2 is None else beta2
    g = torch.where(torch.isfinite(g), g, 0.0).float()
    b_next = b * beta2 + g.abs() * (1.0 - beta2)
    if hold:
        b_next = torch.where(g == 0, b, b_next)
    m.mul_(beta).add_(g * (1.0 - beta))
    b.copy_(b_next)
    return torch.where(b > 0, m * scale / (b + eps), 0.0).clamp_(-1.0, 1.0)


def binarize(
    u: Tensor, *, seed: int, step: int, worker: int, start: int, shift: int = 0, out: Tensor | None = None
) -> Tensor:
    """Stochastic sign: +1 with probability (1+u)/2. fp32[8c] in [-1, 1] -> uint8[c]. +1 and -1 never flip.

    shift: added to the draws, modulo 2^16 (birder/kernels/weyl.py).
    """
    threshold = torch.floor(u * HALF_RANGE + (HALF_RANGE + 0.5)).to(torch.int64)
    draw = uniform16(u.numel(), seed=seed, step=step, stream=worker, start=start, device=u.device)
    return into(out, pack((draw + shift & 0xFFFF) < threshold))


def encode(
    g: Tensor,
    m: Tensor,
    b: Tensor,
    *,
    beta: float,
    eps: float,
    hold: bool,
    seed: int,
    step: int,
    worker: int,
    start: int,
    beta2: float | None = None,
    scale: float = 1.0,
    shift: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Birder's worker side, `ratio` and `binarize` in one: returns the packed bits uint8[numel/8]."""
    u = ratio(g, m, b, beta=beta, eps=eps, hold=hold, beta2=beta2, scale=scale)
    return into(out, binarize(u, seed=seed, step=step, worker=worker, start=start, shift=shift))


def reduce_bits(
    rows: Tensor, *, seed: int, step: int, start: int, shift: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Birder's server side: the average of n workers' bits, binarised again. uint8[n, c] -> uint8[c], n < 32768.

    With k of n bits set the average is a = 2k/n - 1 and +1 is drawn with probability (1+a)/2 = k/n. That is as often as the
    bit of one worker drawn at random is set. Where n is a power of two that bit is copied: log2(n) random bits draw the
    worker, and nothing is unpacked or added. For other n a threshold is compared with 16 random bits.

    shift: added to these 16 bits, modulo 2^16, which are then drawn for every n (birder/kernels/weyl.py).
    """
    n, c = rows.shape
    if n & (n - 1) == 0 and shift is None:
        return into(out, _copied(rows, seed=seed, step=step, first=start // 8))
    ones = unpack(rows).sum(0, dtype=torch.int64)
    threshold = (ones * 65536 + n // 2) // n
    draw = uniform16(8 * c, seed=seed, step=step, stream=SERVER_STREAM, start=start, device=rows.device)
    return into(out, pack((draw + (shift or 0) & 0xFFFF) < threshold))


def _copied(rows: Tensor, *, seed: int, step: int, first: int) -> Tensor:
    """Every bit from the worker whose number the random bits of its place make up. first: number of the first byte."""
    n, c = rows.shape
    for level in range(n.bit_length() - 1):
        stream = SELECT_STREAM + level
        chosen = random_bytes(c, seed=seed, step=step, stream=stream, first=first, device=rows.device)
        even, odd = rows[0::2], rows[1::2]
        rows = even ^ (chosen & (even ^ odd))
    return rows[0].clone()


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """Of every `block` elements, whether |b| > 0 in one where `active` is False: fp32[d], bool[d] -> bool[ceil(d/block)]."""
    news = (b.abs() > 0) & ~active
    return torch.nn.functional.pad(news, (0, -news.numel() % block)).view(-1, block).any(1)
