"""The kernels fused for CPU with numba: each one a single pass over its memory, on the calling thread, without the GIL.

Same results as `birder.kernels.reference`, bit for bit: numba contracts no multiply-add unless asked to.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from birder.kernels import reference
from birder.kernels.philox import LANES, MUL_0, MUL_1, ROUNDS, SERVER_STREAM, WEYL_0, WEYL_1

_M0, _M1 = np.uint64(MUL_0), np.uint64(MUL_1)
_W0, _W1 = np.uint64(WEYL_0), np.uint64(WEYL_1)
_MASK = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)

TILE = 128
"""Philox blocks, of 8 elements each, that are worked on at a time."""


@njit(nogil=True, cache=True, inline="always")
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(ROUNDS):
        p0 = c0 * _M0
        p1 = c2 * _M1
        n0 = (p1 >> _S32) ^ c1 ^ k0
        n2 = (p0 >> _S32) ^ c3 ^ k1
        c1 = p1 & _MASK
        c3 = p0 & _MASK
        c0 = n0
        c2 = n2
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@njit(nogil=True, cache=True, error_model="numpy")
def _draw(words, count, k0, k1, step, stream, block):
    for i in range(count):
        number = block + np.uint64(i)
        w0, w1, w2, w3 = _philox(number & _MASK, number >> _S32, step, stream, k0, k1)
        words[0, i] = w0
        words[1, i] = w1
        words[2, i] = w2
        words[3, i] = w3


@njit(nogil=True, cache=True, error_model="numpy")
def _moments(g, m, b, threshold, beta, rest, eps, hold):
    zero, half, bias, inf = np.float32(0), np.float32(32768.0), np.float32(32768.5), np.float32(np.inf)
    for e in range(g.size):
        x = g[e]
        x = x if abs(x) < inf else zero  # false for NaN too
        scaled = x * rest
        old = b[e]
        new_m = m[e] * beta + scaled
        new_b = old * beta + abs(scaled)
        if hold:
            new_b = old if x == zero else new_b
        m[e] = new_m
        b[e] = new_b
        u = new_m / (new_b + eps)
        u = u if new_b > zero else zero
        threshold[e] = np.int32(u * half + bias)


@njit(nogil=True, cache=True, error_model="numpy")
def _compare(words, threshold, out):
    low, high = np.uint32(0xFFFF), np.uint32(16)
    for i in range(out.size):
        t = threshold[i * 8 : i * 8 + 8]
        byte = np.uint8(np.int32(words[0, i] & low) < t[0])
        byte |= np.uint8(np.int32(words[0, i] >> high) < t[1]) << 1
        byte |= np.uint8(np.int32(words[1, i] & low) < t[2]) << 2
        byte |= np.uint8(np.int32(words[1, i] >> high) < t[3]) << 3
        byte |= np.uint8(np.int32(words[2, i] & low) < t[4]) << 4
        byte |= np.uint8(np.int32(words[2, i] >> high) < t[5]) << 5
        byte |= np.uint8(np.int32(words[3, i] & low) < t[6]) << 6
        byte |= np.uint8(np.int32(words[3, i] >> high) < t[7]) << 7
        out[i] = byte


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(g, m, b, out, beta, rest, eps, hold, k0, k1, step, stream, block):
    # Tiles that stay in the first-level cache: each of the three loops vectorises, memory is still read once.
    words = np.empty((4, TILE), np.uint32)
    threshold = np.empty(TILE * LANES, np.int32)
    for low in range(0, out.size, TILE):
        count = min(TILE, out.size - low)
        part = slice(low * LANES, (low + count) * LANES)
        _draw(words, count, k0, k1, step, stream, block + np.uint64(low))
        _moments(g[part], m[part], b[part], threshold, beta, rest, eps, hold)
        _compare(words, threshold, out[low : low + count])


@njit(nogil=True, cache=True, error_model="numpy")
def _count(rows, table, threshold):
    n = rows.shape[0]
    for i in range(rows.shape[1]):
        for j in range(LANES):
            ones = np.int32(0)
            for r in range(n):
                ones += np.int32((rows[r, i] >> np.uint8(j)) & np.uint8(1))
            threshold[i * LANES + j] = table[ones]


@njit(nogil=True, cache=True, error_model="numpy")
def _reduce(rows, out, k0, k1, step, stream, block):
    words = np.empty((4, TILE), np.uint32)
    threshold = np.empty(TILE * LANES, np.int32)
    n = rows.shape[0]
    table = np.empty(n + 1, np.int32)  # a division for every element would cost more than all the rest
    for ones in range(n + 1):
        table[ones] = (ones * 65536 + n // 2) // n
    for low in range(0, out.size, TILE):
        count = min(TILE, out.size - low)
        _draw(words, count, k0, k1, step, stream, block + np.uint64(low))
        _count(rows[:, low : low + count], table, threshold)
        _compare(words, threshold, out[low : low + count])


@njit(nogil=True, cache=True)
def _apply(p, bits, step_up, keep, decays):
    # Whole bytes first, then the rest: an inner loop of fixed length vectorises. Times +-1 is exact.
    full = p.size // 8
    for i in range(full):
        byte = np.int32(bits[i])
        part = p[i * 8 : i * 8 + 8]
        for j in range(8):
            x = part[j]
            if decays:
                x = x * keep
            part[j] = x + np.float32(1 - 2 * ((byte >> j) & 1)) * step_up
    for e in range(full * 8, p.size):
        x = p[e]
        if decays:
            x = x * keep
        p[e] = x - step_up if (bits[e >> 3] >> (e & 7)) & 1 else x + step_up


@njit(nogil=True, cache=True)
def _apply_active(p, bits, step_up, keep, decays, active):
    full = p.size // 8
    for i in range(full):
        byte = np.int32(bits[i])
        part, moves = p[i * 8 : i * 8 + 8], active[i * 8 : i * 8 + 8]
        for j in range(8):
            x = part[j]
            if decays:
                x = x * keep
            moved = x + np.float32(1 - 2 * ((byte >> j) & 1)) * step_up
            part[j] = moved if moves[j] else x
    for e in range(full * 8, p.size):
        x = p[e]
        if decays:
            x = x * keep
        if active[e]:
            x = x - step_up if (bits[e >> 3] >> (e & 7)) & 1 else x + step_up
        p[e] = x


@njit(nogil=True, cache=True)
def _unseen_blocks(b, active, block, out):
    for i in range(out.size):
        hits = np.int32(0)
        for e in range(i * block, min((i + 1) * block, b.size)):
            hits += np.int32(b[e] > np.float32(0)) & np.int32(active[e] == 0)
        out[i] = hits > 0


@njit(nogil=True, cache=True)
def _pack_signs(z, out):
    for i in range(out.size):
        byte = 0
        for j in range(8):
            if z[i * 8 + j] >= 0:
                byte |= 1 << j
        out[i] = byte


@njit(nogil=True, cache=True)
def _add_signs(row, weight, out):
    for i in range(row.size):
        byte = np.int32(row[i])
        part = out[i * 8 : i * 8 + 8]
        for j in range(8):
            part[j] += np.float32(((byte >> j) & 1) * 2 - 1) * weight  # times +-1: exact


def _keys(seed: int) -> tuple[np.uint64, np.uint64]:
    return np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)


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
) -> Tensor:
    """See `reference.encode`."""
    out = torch.empty(g.numel() // LANES, dtype=torch.uint8)
    k0, k1 = _keys(seed)
    _encode(
        g.numpy(),
        m.numpy(),
        b.numpy(),
        out.numpy(),
        np.float32(beta),
        np.float32(1.0 - beta),
        np.float32(eps),
        hold,
        k0,
        k1,
        np.uint64(step & 0xFFFFFFFF),
        np.uint64(worker),
        np.uint64(start // LANES),
    )
    return out


def reduce_bits(rows: Tensor, *, seed: int, step: int, start: int) -> Tensor:
    """See `reference.reduce_bits`."""
    out = torch.empty(rows.shape[1], dtype=torch.uint8)
    k0, k1 = _keys(seed)
    step_word, stream, block = np.uint64(step & 0xFFFFFFFF), np.uint64(SERVER_STREAM), np.uint64(start // LANES)
    _reduce(rows.numpy(), out.numpy(), k0, k1, step_word, stream, block)
    return out


def apply_bits(p: Tensor, bits: Tensor, *, lr: float, decay: float, active: Tensor | None) -> None:
    """See `reference.apply_bits`; parameters that are not fp32 and contiguous take the reference."""
    if p.dtype != torch.float32 or not p.is_contiguous():
        reference.apply_bits(p, bits, lr=lr, decay=decay, active=active)
        return
    flat = p.detach().view(-1).numpy()
    args = flat, bits.numpy(), np.float32(lr), np.float32(1.0 - decay), bool(decay)
    if active is None:
        _apply(*args)
    else:
        _apply_active(*args, active.numpy())


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """See `reference.unseen_blocks`."""
    out = torch.empty(-(-b.numel() // block), dtype=torch.bool)
    _unseen_blocks(b.numpy(), active.view(torch.uint8).numpy(), block, out.numpy())
    return out


def pack_signs(z: Tensor) -> Tensor:
    """See `reference.pack_signs`."""
    out = torch.empty(z.numel() // 8, dtype=torch.uint8)
    _pack_signs(z.numpy(), out.numpy())
    return out


def average_signs(rows: Tensor, scales: Tensor) -> Tensor:
    """See `reference.average_signs`."""
    out = torch.zeros(rows.shape[1] * 8, dtype=torch.float32)
    for row, weight in zip(rows.numpy(), (scales / rows.shape[0]).numpy(), strict=True):
        _add_signs(row, weight, out.numpy())
    return out
