"""What the fused CPU kernels are made of: random numbers, packing and unpacking, in tiles that stay in first-level cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from birder.kernels.philox import LANES, MUL_0, MUL_1, ROUNDS, WEYL_0, WEYL_1

_M0, _M1 = np.uint64(MUL_0), np.uint64(MUL_1)
_W0, _W1 = np.uint64(WEYL_0), np.uint64(WEYL_1)
MASK = np.uint64(0xFFFFFFFF)
S32 = np.uint64(32)

TILE = 1024
"""Elements that are worked on at a time. Each of a tile's loops vectorises, memory is still read once."""

SIGNS = ((np.arange(256)[:, None] >> np.arange(LANES)) & 1).astype(np.float32) * 2 - 1
"""fp32[256, 8]: the signs that a byte holds."""

SPREAD = ((np.arange(256, dtype=np.uint8)[:, None] >> np.arange(LANES, dtype=np.uint8)) & 1).view("<u8").reshape(-1)
"""uint64[256]: the bits of a byte as 8 bytes of 0 or 1."""

# Times this, 8 bytes of 0 or 1 have their bits side by side in the highest byte; no two of them meet in any place.
_GATHER = np.uint64(0x0102040810204080)
_TOP = np.uint64(56)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit(**options)`. With cache=True numba raises RuntimeError where neither the package's folder nor the user's
    can be written (a read-only image, no HOME): such a process compiles for itself.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(**options)(function)
        except RuntimeError:
            return numba.njit(**options | {"cache": False})(function)

    return compiled


@njit(nogil=True, cache=True, inline="always")
def philox(c0, c1, c2, c3, k0, k1):
    """One Philox block: four words in, four out, each in a uint64."""
    for _ in range(ROUNDS):
        p0 = c0 * _M0
        p1 = c2 * _M1
        n0 = (p1 >> S32) ^ c1 ^ k0
        n2 = (p0 >> S32) ^ c3 ^ k1
        c1 = p1 & MASK
        c3 = p0 & MASK
        c0 = n0
        c2 = n2
        k0 = (k0 + _W0) & MASK
        k1 = (k1 + _W1) & MASK
    return c0, c1, c2, c3


@njit(nogil=True, cache=True, error_model="numpy")
def draw(words, count, k0, k1, step, stream, block):
    """The words of `count` Philox blocks, uint32[4 count]; as uint16 (on a little-endian machine) one draw per element."""
    for i in range(count):
        number = block + np.uint64(i)
        w0, w1, w2, w3 = philox(number & MASK, number >> S32, step, stream, k0, k1)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


@njit(nogil=True, cache=True)
def pack(flags, out):
    """uint8[8c] of zeros and ones -> uint8[c]."""
    groups = flags.view(np.uint64)
    for i in range(out.size):
        out[i] = np.uint8((groups[i] * _GATHER) >> _TOP)


@njit(nogil=True, cache=True)
def expand(bits, out):
    """The signs as numbers: uint8[c] -> fp32[8c]. Written apart from what uses them, both loops vectorise."""
    for i in range(bits.size):
        signs, part = SIGNS[bits[i]], out[i * LANES : (i + 1) * LANES]
        for j in range(LANES):
            part[j] = signs[j]


@njit(nogil=True, cache=True)
def below(draws, shift, threshold, flags, out):
    """The packed bits of (draw + shift) mod 2^16 < threshold: uint16[8c], uint16, int32[8c] -> uint8[c]."""
    for e in range(out.size * LANES):
        drawn = np.int32(np.uint16(draws[e] + shift))
        flags[e] = np.uint8(drawn < threshold[e])
    pack(flags, out)


@njit(nogil=True, cache=True)
def count_ones(rows, low, lanes):
    """How many of n rows have each bit set, 8 counts to a number: uint8[n, ...] from column `low` on -> uint64[c]."""
    for i in range(lanes.size):
        lanes[i] = np.uint64(0)
    for r in range(rows.shape[0]):
        row = rows[r, low : low + lanes.size]
        for i in range(lanes.size):
            lanes[i] += SPREAD[row[i]]


@njit(nogil=True, cache=True)
def count_rows(rows, low, lanes, ones):
    """The same for any n, as int32[8c]. lanes: uint64[c], for intermediate counts."""
    counts, n = lanes.view(np.uint8), rows.shape[0]
    ones[:] = 0
    for first in range(0, n, 255):  # so many fit into the 8 bits of a count
        count_ones(rows[first : first + 255], low, lanes)
        for e in range(ones.size):
            ones[e] += np.int32(counts[e])
