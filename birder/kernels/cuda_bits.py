"""What the Triton kernels are made of: random numbers, bits of bytes and back. A tile is [rows of 8 elements, 8]."""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from birder.kernels.philox import MUL_0, MUL_1, WEYL_0, WEYL_1
from birder.kernels.philox import ROUNDS as PHILOX_ROUNDS

BYTES = 256
"""Bytes of bits, of 8 elements each, that one program works on. With 4 warps a thread has 2 bytes, and registers enough."""

M0, M1 = tl.constexpr(MUL_0), tl.constexpr(MUL_1)
W0, W1 = tl.constexpr(WEYL_0), tl.constexpr(WEYL_1)
ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def first_byte(BYTES: constexpr):
    """int64[BYTES]: numbers of this program's bytes. Not int32: there may be more than 2^31 elements."""
    return tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)


@triton.jit
def elements(byte):
    """int64[c] -> int64[c, 8]: numbers of the elements of these bytes."""
    return byte[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def philox(number, k0, k1, step, stream):
    """The four words of Philox blocks: int64[...] -> uint32[...] each. Key and counter come as int32, for their bits."""
    c0, c1 = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + step.to(tl.uint32), tl.zeros_like(c0) + stream.to(tl.uint32)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high0, high1 = tl.umulhi(c0, M0), tl.umulhi(c2, M1)
        low0, low1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += W0
        k1 += W1
    return c0, c1, c2, c3


@triton.jit
def draw(number, k0, k1, step, stream):
    """The draws of Philox blocks: int64[c] -> int32[c, 8] in [0, 2^16)."""
    c0, c1, c2, c3 = philox(number, k0, k1, step, stream)
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (c0.shape[0], 4))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (c0.shape[0], 8)).to(tl.int32)


@triton.jit
def threshold(u):
    """Of u in [-1, 1], fp32: int32. A draw below it makes +1."""
    return (u * 32768.0 + 32768.5).to(tl.int32)


@triton.jit
def pack(flags):
    """bool[c, 8] -> uint8[c]."""
    return tl.sum(flags.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def unpack(byte):
    """uint8[c] -> int32[c, 8] of zeros and ones."""
    return (byte.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


def word(value: int) -> int:
    """The lowest 32 bits as an int32, so that a kernel is compiled once for all values."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def launch(kernel: Any, programs: int | tuple[int, int], *args: Any, **constants: Any) -> None:
    """Starts that many programs on the device of the first argument. Products and sums stay apart: see `reference`."""
    grid = programs if isinstance(programs, tuple) else (programs,)
    if 0 in grid:
        return
    first: Tensor = args[0]
    with torch.cuda.device(first.device if first.is_cuda else -1):  # -1: unchanged, for Triton's interpreter
        kernel[grid](*args, **constants, enable_fp_fusion=False)
