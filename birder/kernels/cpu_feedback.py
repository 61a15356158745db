"""The 1-bit all-reduce with error feedback, fused for CPU with numba: see birder/kernels/reference_feedback.py.

The scale needs the whole sum of squares, so two passes over the error are the least: one makes the message and sums, one
splits it into bits and error. Both work in place; nothing of the size of the message is allocated.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from birder.kernels import reference_feedback
from birder.kernels.cpu_bits import TILE, expand, pack
from birder.kernels.jit import njit
from birder.kernels.message import new_messages, scales_of
from birder.kernels.philox import LANES
from birder.kernels.reference_feedback import BLOCK, partial_sums

assert TILE == BLOCK  # a tile's sum is a block's sum

NO_MASK = np.empty(0, np.uint8)


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
    """`reference_feedback.tree_sum` of the blocks' sums, fp64[k], which are overwritten."""
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
def _finish(z, mask, scratch):
    """Applies the mask to a tile and returns its sum of squares."""
    if mask.size:
        for e in range(z.size):
            z[e] = z[e] if mask[e] else np.float32(0)
    for e in range(z.size):
        x = np.float64(z[e])
        scratch[e] = x * x
    scratch[z.size :] = 0.0
    return _halve(scratch)


@njit(nogil=True, cache=True)
def _sum_squares(z, mask, sums):
    scratch = np.empty(TILE)
    for i in range(sums.size):
        part = slice(i * TILE, (i + 1) * TILE)
        sums[i] = _finish(z[part], mask[part], scratch)
    return _total(sums)


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
            if mask.size:
                inside = mask[low : low + part.size]
                for e in range(part.size):
                    part[e] = part[e] if inside[e] else np.float32(0)


@njit(nogil=True, cache=True)
def _write_signs(out, messages, scales, mask):
    signs, size = np.empty(TILE, np.float32), out.size // messages.shape[0]
    for k in range(messages.shape[0]):
        bits, first, scale = messages[k], k * size, scales[k]
        for low in range(first, first + size, TILE):
            part = out[low : min(low + TILE, first + size)]
            expand(bits[(low - first) // LANES : (low - first + part.size) // LANES], signs)
            if mask.size:
                inside = mask[low : low + part.size]
                for e in range(part.size):
                    part[e] = signs[e] * scale if inside[e] else np.float32(0)
            else:
                for e in range(part.size):
                    part[e] = signs[e] * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _move_adam(p, m, v, rate_down, correction, eps, keep):
    for e in range(p.size):
        p[e] = p[e] * keep + m[e] * rate_down / (np.sqrt(v[e]) / correction + eps)


def _array(mask: Tensor | None) -> np.ndarray:
    return NO_MASK if mask is None else mask.view(torch.uint8).numpy()


def _sums(z: Tensor, sums: Tensor | None = None) -> np.ndarray:
    """Where the sums of the tiles of `z` go."""
    sums = partial_sums(z.numel()) if sums is None else sums
    return sums[: -(-z.numel() // TILE)].numpy()


def _scalar(total: float) -> Tensor:
    return torch.tensor(total, dtype=torch.float64)


def sum_squares(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """See `reference_feedback.sum_squares`."""
    return _scalar(_sum_squares(z.numpy(), _array(mask), _sums(z)))


def add_message(error: Tensor, z: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """See `reference_feedback.add_message`."""
    return _scalar(_add_message(error.numpy(), z.numpy(), _array(mask), _sums(z, sums)))


def add_momentum(
    error: Tensor, g: Tensor, m: Tensor, *, beta: float, mask: Tensor | None, sums: Tensor | None = None
) -> Tensor:
    """See `reference_feedback.add_momentum`."""
    law = np.float32(beta), np.float32(1.0 - beta)
    return _scalar(_add_momentum(error.numpy(), g.numpy(), m.numpy(), *law, _array(mask), _sums(g, sums)))


def add_average(error: Tensor, messages: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """See `reference_feedback.add_average`."""
    weights = (scales_of(messages) / len(messages)).numpy()  # of the rows, the bits come first: all that is read
    return _scalar(_add_average(error.numpy(), messages.numpy(), weights, _array(mask), _sums(error, sums)))


def split_signs(
    error: Tensor, scale: Tensor, mask: Tensor | None, *, parts: int = 1, out: Tensor | None = None
) -> Tensor:
    """See `reference_feedback.split_signs`."""
    messages = new_messages(parts, error.numel() // parts, error.device) if out is None else out.view(parts, -1)
    scales_of(messages).copy_(scale)
    _split_signs(error.numpy(), np.float32(scale.item()), _array(mask), messages.numpy())
    return messages


def write_signs(out: Tensor, messages: Tensor, mask: Tensor | None) -> None:
    """See `reference_feedback.write_signs`."""
    _write_signs(out.numpy(), messages.numpy(), scales_of(messages).contiguous().numpy(), _array(mask))


def average_signs(rows: Tensor, scales: Tensor) -> Tensor:
    """See `reference_feedback.average_signs`."""
    out = torch.empty(rows.shape[1] * LANES, dtype=torch.float32)
    _average_signs(rows.numpy(), (scales / rows.shape[0]).numpy(), out.numpy())
    return out


def pack_signs(z: Tensor) -> Tensor:
    """See `reference_feedback.pack_signs`."""
    out = torch.empty(z.numel() // LANES, dtype=torch.uint8)
    _pack_signs(z.numpy(), out.numpy())
    return out


def move_adam(
    params: list[Tensor], m: list[Tensor], v: list[Tensor], *, rate: float, correction: float, eps: float, keep: float
) -> None:
    """See `reference_feedback.move_adam`; parameters that are not fp32 and contiguous take the reference."""
    law = np.float32(-rate), np.float32(correction), np.float32(eps), np.float32(keep)
    for moved, mean, square in zip(params, m, v, strict=True):
        if moved.dtype != torch.float32 or not moved.is_contiguous():
            options = {"rate": rate, "correction": correction, "eps": eps, "keep": keep}
            reference_feedback.move_adam([moved], [mean], [square], **options)
        else:
            x, y, z = (t.detach().view(-1).numpy() for t in (moved, mean, square))
            _move_adam(x, y, z, *law)
