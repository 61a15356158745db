"""The kernels fused for CPU with numba: each one a single pass over its memory, on the calling thread, without the GIL.

Same results as `birder.kernels.reference`, bit for bit: numba contracts no multiply-add unless asked to. Work goes by
tiles, and what follows from a tile in loops of one kind each, so that all of them vectorise.

Error feedback: the scale needs the whole sum of squares, so two passes over the error are the least. One makes the message
and sums, one splits it into bits and error. Both work in place; nothing of the size of the message is allocated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from birder.kernels import reference
from birder.kernels.bits import new_messages, room, scales_of
from birder.kernels.cpu_bits import MASK, S32, TILE, below, count_rows, draw, expand, njit, pack, philox
from birder.kernels.implements import implements
from birder.kernels.philox import LANES, OWNER_STREAM, SELECT_STREAM, SERVER_STREAM
from birder.kernels.reference import (
    BLOCK,
    binarize,  # as the two other draws rarely needed on CPU
    chosen_blocks,
    partial_sums,
    random_mask,
    take,  # one pass for each gradient already
)

assert TILE == BLOCK  # a tile's sum is a block's sum
NONE, NO_MASK = np.empty(0, np.float32), np.empty(0, np.uint8)
BYTES = 4096
"""Bytes of bits that `_copied` works on at a time: drawing and copying take turns."""


# ---- Birder -----------------------------------------------------------------------------------------------------------


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
def _shift(number, n, k0, k1, step, stream):
    """`philox.shifts` for the group whose first word has this number."""
    word, _, _, _ = philox(number & MASK, number >> S32, step, stream, k0, k1)
    return np.int64((word * np.uint64(n)) >> S32)


@njit(nogil=True, cache=True)
def _owned(groups, worker, out, k0, k1, step, stream, first):
    n = groups.shape[1]
    for i in range(out.size):
        out[i] = groups[i, (worker + n - _shift(first + np.uint64(i * n), n, k0, k1, step, stream)) % n]


@njit(nogil=True, cache=True)
def _assemble(rows, turn, out, k0, k1, step, stream, first):
    n = rows.shape[0]
    for i in range(out.shape[0]):
        row = (_shift(first + np.uint64(i * n), n, k0, k1, step, stream) + turn) % n
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


def _counter(o, stream, each=LANES):
    """Key, step, stream and the number of the first Philox block, which serves `each` elements."""
    seed, step = o.seed & 0xFFFFFFFFFFFFFFFF, np.uint64(o.step & 0xFFFFFFFF)
    return np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32), step, np.uint64(stream), np.uint64(o.start // each)


@implements(reference.encode)
def encode(g, m, b, o):
    out, beta2 = room(o.out, g.numel() // LANES, g), o.beta if o.beta2 is None else o.beta2
    law = *map(np.float32, (o.beta, 1.0 - o.beta, beta2, 1.0 - beta2, o.scale, o.eps)), o.hold, np.uint16(o.shift)
    tensors = g.float(), m, b, out  # no copy of what is fp32
    _encode(*(t.numpy() for t in tensors), *law, *_counter(o, o.worker))
    return out


@implements(reference.reduce_bits)
def reduce_bits(rows, o):
    out, n = room(o.out, rows.shape[1], rows), len(rows)
    if n == 1:
        return out.copy_(rows[0])
    if n & (n - 1) == 0 and o.shift is None:
        _copied(rows.numpy(), out.numpy(), *_counter(o, SELECT_STREAM)[:4], o.start // LANES)
    else:
        _reduce(rows.numpy(), out.numpy(), np.uint16(o.shift or 0), *_counter(o, SERVER_STREAM))
    return out


@implements(reference.owned)
def owned(bits, o):
    out = room(o.out, bits.numel() // o.n, bits)
    groups, words = bits.numpy().view(np.int32).reshape(-1, o.n), out.numpy().view(np.int32)
    _owned(groups, (o.worker - o.turn) % o.n, words, *_counter(o, OWNER_STREAM, 32))
    return out


@implements(reference.assemble)
def assemble(rows, o):
    out = room(o.out, rows.numel(), rows)
    groups = out.numpy().view(np.int32).reshape(-1, len(rows))
    _assemble(rows.numpy().view(np.int32), o.turn % len(rows), groups, *_counter(o, OWNER_STREAM, 32))
    return out


@implements(reference.apply_bits)
def apply_bits(params, offsets, bits, o):
    packed, moves = bits.numpy(), _array(o.active)
    for p, offset in zip(params, offsets, strict=True):
        if p.dtype != torch.float32 or not p.is_contiguous():
            reference.apply_bits([p], [offset], bits, **vars(o))
            continue
        flat, mine = p.detach().view(-1).numpy(), packed[offset // LANES : (offset + p.numel() + LANES - 1) // LANES]
        where = moves[offset : offset + p.numel()]
        _apply(flat, mine, np.float32(o.lr), np.float32(1.0 - o.decay), bool(o.decay), where)


@implements(reference.unseen_blocks)
def unseen_blocks(b, active, block):
    out = torch.empty(-(-b.numel() // block), dtype=torch.bool, device="cpu")
    _unseen_blocks(b.numpy(), _array(active), block, out.numpy())
    return out


# ---- error feedback ---------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _halve(x):
    """Adds up fp64[BLOCK], which is overwritten."""
    width = BLOCK // 2
    while width:
        for j in range(width):
            x[j] += x[width + j]
        width //= 2
    return x[0]


@njit(nogil=True, cache=True)
def _total(sums):
    """`reference.tree_sum` of the blocks' sums, fp64[k], which are overwritten."""
    count, scratch = sums.size, np.empty(BLOCK)
    while count > 1:
        blocks = -(-count // BLOCK)
        for i in range(blocks):
            size = min(BLOCK, count - i * BLOCK)
            for j in range(size):
                scratch[j] = sums[i * BLOCK + j]
            scratch[size:] = 0.0
            sums[i] = _halve(scratch)
        count = blocks
    return sums[0] if count else 0.0


@njit(nogil=True, cache=True)
def _inside(z, mask):
    """z becomes 0 outside of the mask, if there is one."""
    if mask.size:
        for e in range(z.size):
            z[e] = z[e] if mask[e] else np.float32(0)


@njit(nogil=True, cache=True)
def _finish(z, mask, scratch):
    """Applies the mask to a tile and returns its sum of squares."""
    _inside(z, mask)
    for e in range(z.size):
        x = np.float64(z[e])
        scratch[e] = x * x
    scratch[z.size :] = 0.0
    return _halve(scratch)


@njit(nogil=True, cache=True)
def _add_message(error, z, mask, sums):
    scratch = np.empty(TILE)
    for i in range(sums.size):
        part = slice(i * TILE, (i + 1) * TILE)
        e, x = error[part], z[part]
        for j in range(e.size):
            e[j] += x[j]
        sums[i] = _finish(e, mask[part], scratch)
    return _total(sums)


@njit(nogil=True, cache=True)
def _add_momentum(error, g, m, beta, rest, mask, sums):
    scratch = np.empty(TILE)
    for i in range(sums.size):
        part = slice(i * TILE, (i + 1) * TILE)
        e, x, y = error[part], g[part], m[part]
        for j in range(e.size):
            e[j] = (x[j] * rest + y[j] * beta) + e[j]
        sums[i] = _finish(e, mask[part], scratch)
    return _total(sums)


@njit(nogil=True, cache=True)
def _average(rows, weights, low, signs, out):
    """The weighted sum of the workers' signs for a tile whose bytes begin at `low`."""
    out[:] = np.float32(0)
    for r in range(rows.shape[0]):
        weight = weights[r]
        expand(rows[r, low : low + out.size // LANES], signs)
        for e in range(out.size):
            out[e] += signs[e] * weight  # times +-1: exact


@njit(nogil=True, cache=True)
def _average_signs(rows, weights, out):
    signs = np.empty(TILE, np.float32)
    for low in range(0, out.size, TILE):
        _average(rows, weights, low // LANES, signs, out[low : low + TILE])


@njit(nogil=True, cache=True)
def _add_average(error, rows, weights, mask, sums):
    scratch = np.empty(TILE)
    signs, mean = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for i in range(sums.size):
        part = slice(i * TILE, (i + 1) * TILE)
        e = error[part]
        _average(rows, weights, i * TILE // LANES, signs, mean[: e.size])
        for j in range(e.size):
            e[j] += mean[j]
        sums[i] = _finish(e, mask[part], scratch)
    return _total(sums)


@njit(nogil=True, cache=True)
def _pack_signs(z, out):
    flags = np.empty(TILE, np.uint8)
    for low in range(0, z.size, TILE):
        part = z[low : low + TILE]
        for e in range(part.size):
            flags[e] = np.uint8(part[e] >= 0)
        pack(flags, out[low // LANES : (low + part.size) // LANES])


@njit(nogil=True, cache=True)
def _split_signs(error, scale, mask, messages):
    flags, size = np.empty(TILE, np.uint8), error.size // messages.shape[0]
    for k in range(messages.shape[0]):
        bits, first = messages[k], k * size
        for low in range(first, first + size, TILE):
            part = error[low : min(low + TILE, first + size)]
            for e in range(part.size):
                x = part[e]
                plus = x >= 0
                flags[e] = np.uint8(plus)
                part[e] = x - scale if plus else x + scale
            pack(flags, bits[(low - first) // LANES : (low - first + part.size) // LANES])
            _inside(part, mask[low : low + part.size])


@njit(nogil=True, cache=True)
def _write_signs(out, messages, scales, mask):
    signs, size = np.empty(TILE, np.float32), out.size // messages.shape[0]
    for k in range(messages.shape[0]):
        bits, first, scale = messages[k], k * size, scales[k]
        for low in range(first, first + size, TILE):
            part = out[low : min(low + TILE, first + size)]
            expand(bits[(low - first) // LANES : (low - first + part.size) // LANES], signs)
            for e in range(part.size):
                part[e] = signs[e] * scale
            _inside(part, mask[low : low + part.size])


@njit(nogil=True, cache=True, error_model="numpy")
def _move_adam(p, m, v, rate_down, correction, eps, keep):
    for e in range(p.size):
        p[e] = p[e] * keep + m[e] * rate_down / (np.sqrt(v[e]) / correction + eps)


def _array(mask: Tensor | None) -> np.ndarray:
    return NO_MASK if mask is None else mask.view(torch.uint8).numpy()


def _summed(kernel, error, o, *args):
    """Performs `kernel`, which adds to `error`, and returns the sum of squares."""
    sums = partial_sums(error.numel()) if o.sums is None else o.sums
    total = kernel(error.numpy(), *args, sums[: -(-error.numel() // TILE)].numpy())
    return torch.tensor(total, dtype=torch.float64, device="cpu")


@implements(reference.add_message)
def add_message(error, z, mask, o):
    return _summed(_add_message, error, o, z.numpy(), _array(mask))


@implements(reference.add_momentum)
def add_momentum(error, g, m, o):
    law = np.float32(o.beta), np.float32(1.0 - o.beta)
    return _summed(_add_momentum, error, o, g.numpy(), m.numpy(), *law, _array(o.mask))


@implements(reference.add_average)
def add_average(error, messages, mask, o):
    weights = (scales_of(messages) / len(messages)).numpy()  # of the rows, the bits come first: all that is read
    return _summed(_add_average, error, o, messages.numpy(), weights, _array(mask))


@implements(reference.split_signs)
def split_signs(error, scale, mask, o):
    size = error.numel() // o.parts
    messages = new_messages(o.parts, size, error.device) if o.out is None else o.out.view(o.parts, -1)
    scales_of(messages).copy_(scale)
    _split_signs(error.numpy(), np.float32(scale.item()), _array(mask), messages.numpy())
    return messages


@implements(reference.write_signs)
def write_signs(out, messages, mask):
    _write_signs(out.numpy(), messages.numpy(), scales_of(messages).contiguous().numpy(), _array(mask))


@implements(reference.average_signs)
def average_signs(rows, scales):
    out = torch.empty(rows.shape[1] * LANES, dtype=torch.float32, device="cpu")
    _average_signs(rows.numpy(), (scales / rows.shape[0]).numpy(), out.numpy())
    return out


@implements(reference.pack_signs)
def pack_signs(z):
    out = room(None, z.numel() // LANES, z)
    _pack_signs(z.numpy(), out.numpy())
    return out


@implements(reference.move_adam)
def move_adam(params, m, v, o):
    law = np.float32(-o.rate), np.float32(o.correction), np.float32(o.eps), np.float32(o.keep)
    for moved, mean, square in zip(params, m, v, strict=True):
        if moved.dtype != torch.float32 or not moved.is_contiguous():
            reference.move_adam([moved], [mean], [square], **vars(o))
        else:
            _move_adam(*(t.detach().view(-1).numpy() for t in (moved, mean, square)), *law)


# ---- sigma-delta ------------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, error_model="numpy")
def _adam_moments(g, m, v, beta1, rest1, beta2, rest2, hold):
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
def _adam_ratio(m, square, scale, eps, u):
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
            _adam_moments(g[part], m[part], v[part], law[0], law[1], law[2], law[3], hold)
        _adam_ratio(m[part], shared[part] if shared.size else v[part], law[4], law[5], u)
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


def _form(error: Tensor, limit: int, dither: float) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, reference.error_form(error, limit, dither)))


@implements(reference.modulate)
def modulate(u, error, o):
    out, form = room(o.out, u.numel() // LANES, u), _form(error, o.limit, o.dither)
    _modulate(u.numpy(), error.numpy(), np.float32(o.weight), *form, o.limit == 1, out.numpy())
    return out


@implements(reference.modulate_adam)
def modulate_adam(g, m, v, error, shared, o):
    out, form = room(o.out, m.numel() // LANES, m), (np.float32(o.weight), *_form(error, o.limit, o.dither))
    law = np.array([o.beta1, 1.0 - o.beta1, o.beta2, 1.0 - o.beta2, o.scale, o.eps], np.float32)
    wide, common = (NONE if t is None else t.float().numpy() for t in (g, shared))  # no copy of what is fp32
    _modulate_adam(wide, m.numpy(), v.numpy(), common, error.numpy(), law, o.hold, *form, o.limit == 1, out.numpy())
    return out


@implements(reference.serve_sigma)
def serve_sigma(rows, error, o):
    out, gain = room(o.out, rows.shape[1], rows), np.float32(o.gamma / len(rows))
    _serve(rows.numpy(), error.numpy(), gain, *_form(error, 1, o.dither), out.numpy())
    return out
