"""The kernels fused for GPUs with Triton: each one a single pass over its memory, on the current stream, nothing on the host.

Same results as `birder.kernels.reference`, bit for bit: Philox is written out, divisions round to nearest, multiply-adds are
not contracted. With TRITON_INTERPRET=1 in the environment before the import they run on CPU tensors, slowly, for tests.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from birder.kernels import reference
from birder.kernels.cuda_bits import BYTES, draw, elements, first_byte, launch, pack, philox, threshold, unpack, word
from birder.kernels.cuda_draw import assemble, binarize, chosen_blocks, owned, random_mask
from birder.kernels.cuda_feedback import (
    add_average,
    add_message,
    add_momentum,
    average_signs,
    pack_signs,
    split_signs,
    sum_squares,
    write_signs,
)
from birder.kernels.cuda_many import apply_bits, move_adam, take
from birder.kernels.cuda_sigma import modulate, modulate_adam, serve_sigma
from birder.kernels.philox import LANES, SELECT_STREAM, SERVER_STREAM


@triton.jit(do_not_specialize=["shift", "k0", "k1", "step", "stream", "block"])
def _encode(
    g,
    m,
    b,
    out,
    count,
    beta,
    rest,
    beta2,
    rest2,
    scale,
    eps,
    shift,
    k0,
    k1,
    step,
    stream,
    block,
    HOLD: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    x = tl.load(g + e, mask=live, other=0.0).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # false for NaN too
    old = tl.load(b + e, mask=live, other=0.0)
    new_m = tl.load(m + e, mask=live, other=0.0) * beta + x * rest
    new_b = old * beta2 + tl.abs(x) * rest2
    if HOLD:
        new_b = tl.where(x == 0.0, old, new_b)
    tl.store(m + e, new_m, mask=live)
    tl.store(b + e, new_b, mask=live)
    u = tl.div_rn(new_m * scale, tl.where(new_b > 0.0, new_b + eps, 1.0))
    u = tl.where(new_b > 0.0, u, 0.0)
    u = tl.where(u < 1.0, u, 1.0)
    u = tl.where(u > -1.0, u, -1.0)
    drawn = (draw(block.to(tl.int64) + byte, k0, k1, step, stream) + shift) & 0xFFFF
    plus = drawn < threshold(u)
    tl.store(out + byte, pack(plus), mask=byte < count)


WORDS = 256
"""32-bit words of bits that one program copies."""


@triton.jit(do_not_specialize=["n", "shift", "k0", "k1", "step", "stream", "block"])
def _reduce(rows, out, count, n, shift, k0, k1, step, stream, block, BYTES: tl.constexpr):
    byte = first_byte(BYTES)
    ones = tl.zeros((BYTES, 8), tl.int32)
    for r in range(n):
        ones += unpack(tl.load(rows + tl.cast(r, tl.int64) * count + byte, mask=byte < count, other=0))
    # draw < (65536 ones + n//2) // n, without the division
    drawn = (draw(block.to(tl.int64) + byte, k0, k1, step, stream) + shift) & 0xFFFF
    plus = (drawn + 1) * n <= ones * 65536 + n // 2
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit
def _both(a, b):
    return a & b


@triton.jit(do_not_specialize=["n", "k0", "k1", "step", "stream", "first"])
def _copied(rows, out, count, n, k0, k1, step, stream, first, LEVELS: tl.constexpr, WORDS: tl.constexpr):
    """32-bit words: each bit from the worker whose number the random bits of its place make up, LEVELS or fewer of them."""
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    live = i < count
    number = first.to(tl.int64) + i
    level = tl.arange(0, LEVELS)[:, None]
    c0, c1, c2, c3 = philox((number >> 2)[None, :] + tl.zeros_like(level), k0, k1, step, stream + level)
    lane = (number & 3).to(tl.int32)[None, :]
    chosen = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3)).to(tl.int32, bitcast=True)
    result = tl.zeros((WORDS,), tl.int32)
    for r in range(n):
        needed = ((r >> level) & 1) != 0
        mine = tl.where((1 << level) < n, tl.where(needed, chosen, ~chosen), -1)
        bits = tl.load(rows + tl.cast(r, tl.int64) * count + i, mask=live, other=0)
        result |= bits & tl.reduce(mine, 0, _both)
    tl.store(out + i, result, mask=live)


@triton.jit
def _unseen(b, active, out, numel, block, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    e = i * block + place
    live = (place < block) & (e < numel)
    new = (tl.abs(tl.load(b + e, mask=live, other=0.0)) > 0.0) & (tl.load(active + e, mask=live, other=1) == 0)
    tl.store(out + i, (tl.sum(new.to(tl.int32), axis=0) > 0).to(tl.uint8))


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
    out = torch.empty(g.numel() // LANES, dtype=torch.uint8, device=g.device) if out is None else out
    law = beta, 1.0 - beta, beta2, 1.0 - beta2, float(scale), eps
    counter = shift, word(seed), word(seed >> 32), word(step), worker, start // LANES
    programs = triton.cdiv(out.numel(), BYTES)
    launch(_encode, programs, g, m, b, out, out.numel(), *law, *counter, HOLD=hold, BYTES=BYTES)
    return out


def reduce_bits(
    rows: Tensor, *, seed: int, step: int, start: int, shift: int | None = None, out: Tensor | None = None
) -> Tensor:
    """See `reference.reduce_bits`."""
    n, count = rows.shape
    out = torch.empty(count, dtype=torch.uint8, device=rows.device) if out is None else out
    key = word(seed), word(seed >> 32), word(step)
    if n & (n - 1) == 0 and shift is None:
        if count == 0:
            return out
        if count % 4 or start % 32:  # a unit of an optimizer never is like that
            return out.copy_(reference.reduce_bits(rows, seed=seed, step=step, start=start))
        words, levels = count // 4, triton.next_power_of_2(max(n.bit_length() - 1, 1))
        views, constants = (rows.view(torch.int32), out.view(torch.int32)), {"LEVELS": levels, "WORDS": WORDS}
        launch(_copied, triton.cdiv(words, WORDS), *views, words, n, *key, SELECT_STREAM, start // 32, **constants)
        return out
    counter = shift or 0, *key, SERVER_STREAM, start // LANES
    launch(_reduce, triton.cdiv(count, BYTES), rows, out, count, n, *counter, BYTES=BYTES)
    return out


def unseen_blocks(b: Tensor, active: Tensor, block: int) -> Tensor:
    """See `reference.unseen_blocks`."""
    out = torch.empty(triton.cdiv(b.numel(), block), dtype=torch.bool, device=b.device)
    flags, width = (active.view(torch.uint8), out.view(torch.uint8)), triton.next_power_of_2(block)
    launch(_unseen, out.numel(), b, *flags, b.numel(), block, WIDTH=width)
    return out
