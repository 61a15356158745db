"""The kernels fused for CPU with numba: each one a single pass over its memory, on the calling thread, without the GIL.

Same results as `birder.kernels.reference`, bit for bit: numba contracts no multiply-add unless asked to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from birder.kernels import reference
from birder.kernels.cpu_bits import MASK, S32, TILE, below, count_rows, draw, expand, pack, philox
from birder.kernels.cpu_feedback import (
    NO_MASK,
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
from birder.kernels.cpu_sigma import modulate, modulate_adam, serve_sigma
from birder.kernels.jit import njit
from birder.kernels.philox import LANES, OWNER_STREAM, SELECT_STREAM, SERVER_STREAM
from birder.kernels.reference import binarize, chosen_blocks, random_mask  # rarely needed on CPU
from birder.kernels.reference_many import take  # one pass for each gradient as it is

BYTES = 4096
"""Bytes of bits that `_copied` works on at a time: drawing and copying take turns."""


@njit(nogil=True, cache=True, error_model="numpy")
def _moments(g, m, b, threshold, beta, rest, beta2, rest2, scale, eps, hold):
    one = np.float32(1)
    zero, half, bias, inf = np.float32(0), np.float32(32768.0), np.float32(32768.5), np.float32(np.inf)
    for e in range(g.size):
        x = g[e]
        x = x if abs(x) < inf else zero  # false for NaN too
        old = b[e]
        new_m = m[e] * beta + x * rest
        new_b = old * beta2 + abs(x) * rest2
        if hold:
            new_b = old if x == zero else new_b
        m[e] = new_m
        b[e] = new_b
        u = new_m * scale / (new_b + eps)
        u = u if new_b > zero else zero
        u = u if u < one else one
        u = u if u > -one else -one
        threshold[e] = np.int32(u * half + bias)


@njit(nogil=True, cache=True)
def _widen_bf16(half, wide):
    for e in range(half.size):
        wide[e] = np.uint32(half[e]) << np.uint32(16)


@njit(nogil=True, cache=True)
def _widen_fp16(half, wide):
    # The exponent's bias differs by 112. What is not finite becomes infinite.
    value = wide.view(np.float32)
    for e in range(half.size):
        wide[e] = np.uint32(half[e] & np.uint16(0x7FFF)) << np.uint32(13)
    for e in range(half.size):
        size = value[e] * np.float32(2.0**112)
        size = np.float32(np.inf) if size >= np.float32(65536.0) else size
        value[e] = -size if half[e] & np.uint16(0x8000) else size


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(g, m, b, out, beta, rest, beta2, rest2, scale, eps, hold, shift, k0, k1, step, stream, block):
    words = np.empty(TILE // 2, np.uint32)
    draws = words.view(np.uint16)
    threshold = np.empty(TILE, np.int32)
    flags = np.empty(TILE, np.uint8)
    for low in range(0, g.size, TILE):
        count = min(TILE, g.size - low)
        part = slice(low, low + count)
        draw(words, count // LANES, k0, k1, step, stream, block + np.uint64(low // LANES))
        _moments(g[part], m[part], b[part], threshold, beta, rest, beta2, rest2, scale, eps, hold)
        below(draws, shift, threshold, flags, out[low // LANES : (low + count) // LANES])


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_half(g, brain, m, b, out, beta, rest, beta2, rest2, scale, eps, hold, shift, k0, k1, step, stream, block):
    wide = np.empty(TILE, np.uint32)
    for low in range(0, g.size, TILE):
        count = min(TILE, g.size - low)
        part, bits = slice(low, low + count), slice(low // LANES, (low + count) // LANES)
        if brain:
            _widen_bf16(g[part], wide)
        else:
            _widen_fp16(g[part], wide)
        x = wide.view(np.float32)[:count]
        number = block + np.uint64(low // LANES)
        _encode(
            x, m[part], b[part], out[bits],
            beta, rest, beta2, rest2, scale, eps, hold, shift, k0, k1, step, stream, number,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _reduce(rows, out, shift, k0, k1, step, stream, block):
    words = np.empty(TILE // 2, np.uint32)
    draws = words.view(np.uint16)
    ones = np.empty(TILE, np.int32)
    flags = np.empty(TILE, np.uint8)
    lanes = np.empty(TILE // LANES, np.uint64)
    n = np.int32(rows.shape[0])
    half = n // np.int32(2)
    for low in range(0, out.size, TILE // LANES):
        count = min(TILE // LANES, out.size - low)
        draw(words, count, k0, k1, step, stream, block + np.uint64(low))
        count_rows(rows, low, lanes[:count], ones[: count * LANES])
        for e in range(count * LANES):  # draw < (65536 ones + n//2) // n, without the division
            drawn = np.int32(np.uint16(draws[e] + shift))
            flags[e] = (drawn + np.int32(1)) * n <= (ones[e] << 16) + half
        pack(flags, out[low : low + count])


@njit(nogil=True, cache=True)
def _choose(even, odd, chosen, out):
    for j in range(out.size):
        out[j] = even[j] ^ (chosen[j] & (even[j] ^ odd[j]))


@njit(nogil=True, cache=True)
def _copied(rows, out, k0, k1, step, stream, first):
    n, levels = rows.shape[0], 0
    while 1 << levels < n:
        levels += 1
    blocks = BYTES // 16 + 1  # the bytes may begin in the middle of one
    words = np.empty(4 * blocks, np.uint32)
    kept = np.empty((n // 2, BYTES), np.uint8)
    for low in range(0, out.size, BYTES):
        count = min(BYTES, out.size - low)
        begin = first + low
        skip = begin % 16
        for level in range(levels):
            number = np.uint64(begin // 16)
            draw(words, (skip + count + 15) // 16, k0, k1, step, stream + np.uint64(level), number)
            chosen = words.view(np.uint8)[skip : skip + count]
            for i in range(n >> (level + 1)):
                target = out[low : low + count] if n >> (level + 1) == 1 else kept[i, :count]
                if level == 0:
                    _choose(rows[2 * i, low : low + count], rows[2 * i + 1, low : low + count], chosen, target)
                else:
                    _choose(kept[2 * i, :count], kept[2 * i + 1, :count], chosen, target)


@njit(nogil=True, cache=True)
def _shift(number, n, k0, k1, step):
    """`philox.shifts` for the group whose first word has this number."""
    word, _, _, _ = philox(number & MASK, number >> S32, step, np.uint64(OWNER_STREAM), k0, k1)
    return np.int64((word * np.uint64(n)) >> S32)


@njit(nogil=True, cache=True)
def _owned(groups, worker, out, k0, k1, step, first):
    n = groups.shape[1]
    for i in range(out.size):
        out[i] = groups[i, (worker + n - _shift(first + np.uint64(i * n), n, k0, k1, step)) % n]


@njit(nogil=True, cache=True)
def _assemble(rows, turn, out, k0, k1, step, first):
    n = rows.shape[0]
    for i in range(out.shape[0]):
        row = (_shift(first + np.uint64(i * n), n, k0, k1, step) + turn) % n
        for j in range(n):
            out[i, j] = rows[row, i]
            row = row + 1 if row + 1 < n else 0


@njit(nogil=True, cache=True)
def _apply(p, bits, step_up, keep, decays, active):
    # `bits` may end in the middle of a byte. Times +-1 is exact.
    signs = np.empty(TILE, np.float32)
    for low in range(0, p.size, TILE):
        part = p[low : low + TILE]
        expand(bits[low // LANES : (low + part.size + LANES - 1) // LANES], signs)
        if decays:
            for e in range(part.size):
                part[e] *= keep
        if active.size:
            moves = active[low : low + TILE]
            for e in range(part.size):
                part[e] = part[e] - signs[e] * step_up if moves[e] else part[e]
        else:
            for e in range(part.size):
                part[e] -= signs[e] * step_up


@njit(nogil=True, cache=True)
def _unseen_blocks(b, active, block, out):
    for i in range(out.size):
        seen, known = b[i * block : (i + 1) * block], active[i * block : (i + 1) * block]
        hits = np.int32(0)
        for e in range(seen.size):
            hits |= np.int32(abs(seen[e]) > np.float32(0)) & np.int32(known[e] == 0)
        out[i] = hits > 0


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
    beta2: float | None = None,
    scale: float = 1.0,
    shift: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.encode`."""
    beta2 = beta if beta2 is None else beta2
    out = torch.empty(g.numel() // LANES, dtype=torch.uint8) if out is None else out
    k0, k1 = _keys(seed)
    state = m.numpy(), b.numpy(), out.numpy()
    first, second = (np.float32(beta), np.float32(1.0 - beta)), (np.float32(beta2), np.float32(1.0 - beta2))
    law = *first, *second, np.float32(scale), np.float32(eps), hold, np.uint16(shift)
    counter = k0, k1, np.uint64(step & 0xFFFFFFFF), np.uint64(worker), np.uint64(start // LANES)
    if g.dtype == torch.float32:
        _encode(g.numpy(), *state, *law, *counter)
    else:
        bits = g.view(torch.int16).numpy().view(np.uint16)
        _encode_half(bits, g.dtype == torch.bfloat16, *state, *law, *counter)
    return out


def reduce_bits(
    rows: Tensor, *, seed: int, step: int, start: int, shift: int | None = None, out: Tensor | None = None
) -> Tensor:
    """See `reference.reduce_bits`."""
    out = torch.empty(rows.shape[1], dtype=torch.uint8) if out is None else out
    key, step_word, n = _keys(seed), np.uint64(step & 0xFFFFFFFF), len(rows)
    if n == 1:
        return out.copy_(rows[0])
    if n & (n - 1) == 0 and shift is None:
        _copied(rows.numpy(), out.numpy(), *key, step_word, np.uint64(SELECT_STREAM), start // LANES)
    else:
        counter = *key, step_word, np.uint64(SERVER_STREAM), np.uint64(start // LANES)
        _reduce(rows.numpy(), out.numpy(), np.uint16(shift or 0), *counter)
    return out


def owned(
    bits: Tensor, *, n: int, worker: int, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None
) -> Tensor:
    """See `one_phase.owned`."""
    out = torch.empty(bits.numel() // n, dtype=torch.uint8) if out is None else out
    groups, words = bits.numpy().view(np.int32).reshape(-1, n), out.numpy().view(np.int32)
    _owned(groups, (worker - turn) % n, words, *_keys(seed), np.uint64(step & 0xFFFFFFFF), np.uint64(start // 32))
    return out


def assemble(rows: Tensor, *, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None) -> Tensor:
    """See `one_phase.assemble`."""
    out = torch.empty(rows.numel(), dtype=torch.uint8) if out is None else out
    groups, turn = out.numpy().view(np.int32).reshape(-1, len(rows)), turn % len(rows)
    counter = *_keys(seed), np.uint64(step & 0xFFFFFFFF), np.uint64(start // 32)
    _assemble(rows.numpy().view(np.int32), turn, groups, *counter)
    return out


def apply_bits(
    params: Sequence[Tensor], offsets: Sequence[int], bits: Tensor, *, lr: float, decay: float, active: Tensor | None
) -> None:
    """See `reference_many.apply_bits`; parameters that are not fp32 and contiguous take it."""
    packed, moves = bits.numpy(), NO_MASK if active is None else active.view(torch.uint8).numpy()
    for p, offset in zip(params, offsets, strict=True):
        if p.dtype != torch.float32 or not p.is_contiguous():
            reference.apply_bits([p], [offset], bits, lr=lr, decay=decay, active=active)
            continue
        flat, mine = p.detach().view(-1).numpy(), packed[offset // LANES : (offset + p.numel() + LANES - 1) // LANES]
        where = moves[offset : offset + p.numel()]
        _apply(flat, mine, np.float32(lr), np.float32(1.0 - decay), bool(decay), where)


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """See `reference.unseen_blocks`."""
    out = torch.empty(-(-b.numel() // block), dtype=torch.bool)
    _unseen_blocks(b.numpy(), active.view(torch.uint8).numpy(), block, out.numpy())
    return out
