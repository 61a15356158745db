"""The 1-bit all-reduce with error feedback, fused for GPUs with Triton: see birder/kernels/reference_feedback.py.

The scale stays on the device: nothing waits on the host between the pass that sums and the pass that splits.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from birder.kernels.cuda_bits import BYTES, elements, first_byte, launch, pack, unpack
from birder.kernels.message import new_messages
from birder.kernels.philox import LANES
from birder.kernels.reference_feedback import BLOCK as TREE_BLOCK
from birder.kernels.reference_feedback import partial_sums

BLOCK = tl.constexpr(TREE_BLOCK)
WARPS = 1
"""Warps to a block that is added up. A single one adds within its threads and by shuffles, with no barrier."""

LEVELS = tl.constexpr(TREE_BLOCK.bit_length() - 1)


@triton.jit
def _places():
    """int64[BLOCK]: numbers of this program's elements."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _halve(x, sums):
    """Adds up fp64[BLOCK] in the order of `tree_sum`: a sum of two has only one order."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), x)


@triton.jit
def _finish(error, e, x, live, mask, sums, MASKED: tl.constexpr):
    if MASKED:
        x = tl.where(tl.load(mask + e, mask=live, other=0) != 0, x, 0.0)
    tl.store(error + e, x, mask=live)
    wide = tl.where(live, x, 0.0).to(tl.float64)
    _halve(wide * wide, sums)


@triton.jit
def _tree(x, out, count):
    e = _places()
    _halve(tl.load(x + e, mask=e < count, other=0.0), out)


@triton.jit
def _sum_squares(error, mask, sums, numel, MASKED: tl.constexpr):
    e = _places()
    live = e < numel
    _finish(error, e, tl.load(error + e, mask=live, other=0.0), live, mask, sums, MASKED)


@triton.jit
def _add_message(error, z, mask, sums, numel, MASKED: tl.constexpr):
    e = _places()
    live = e < numel
    x = tl.load(z + e, mask=live, other=0.0) + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit
def _add_momentum(error, g, m, mask, sums, numel, beta, rest, MASKED: tl.constexpr):
    e = _places()
    live = e < numel
    x = tl.load(g + e, mask=live, other=0.0) * rest + tl.load(m + e, mask=live, other=0.0) * beta
    x = x + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit
def _sign_sum(rows, width, scales, apart, n, byte, lane, live, x):
    """x + (1/n) sum_i scale_i * (+-1), in the order of the workers. Rows begin `width` bytes apart, scales `apart` floats.

    The division is done here: torch's on a GPU would multiply by 1/n.
    """
    for r in range(n):
        place = tl.cast(r, tl.int64)
        bits = tl.load(rows + place * width + byte, mask=live, other=0).to(tl.int32)
        weight = tl.div_rn(tl.load(scales + place * apart), tl.cast(n, tl.float32))
        x += tl.where(((bits >> lane) & 1) != 0, weight, -weight)
    return x


@triton.jit(do_not_specialize=["n"])
def _add_average(error, rows, scales, mask, sums, numel, words, n, MASKED: tl.constexpr):
    e = _places()  # a message has `words` words of 32 bits, the last is its scale
    live = e < numel
    lane = (e & 7).to(tl.int32)
    x = tl.zeros((BLOCK,), tl.float32)
    x = _sign_sum(rows, tl.cast(words, tl.int64) * 4, scales + words - 1, words, n, e >> 3, lane, live, x)
    x = x + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit(do_not_specialize=["n"])
def _average_signs(out, rows, scales, numel, n):
    e = _places()
    live = e < numel
    lane = (e & 7).to(tl.int32)
    x = _sign_sum(rows, numel // 8, scales, 1, n, e >> 3, lane, live, tl.zeros((BLOCK,), tl.float32))
    tl.store(out + e, x, mask=live)


@triton.jit
def _pack_signs(z, out, count, BYTES: tl.constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    x = tl.load(z + e, mask=(byte < count)[:, None], other=0.0)
    tl.store(out + byte, pack(x >= 0.0), mask=byte < count)


@triton.jit
def _split_signs(error, scale, mask, out, scales, count, words, MASKED: tl.constexpr, BYTES: tl.constexpr):
    part = tl.program_id(1).to(
        tl.int64
    )  # a message: `count` bytes of bits, `words` words of 32 bits, the last its scale
    place = first_byte(BYTES)
    live = place < count
    e = elements(part * count + place)
    x, size = tl.load(error + e, mask=live[:, None], other=0.0), tl.load(scale)
    plus = x >= 0.0
    left = tl.where(plus, x - size, x + size)
    if MASKED:
        left = tl.where(tl.load(mask + e, mask=live[:, None], other=0) != 0, left, 0.0)
    tl.store(error + e, left, mask=live[:, None])
    tl.store(out + part * words * 4 + place, pack(plus), mask=live)
    if tl.program_id(0) == 0:
        tl.store(scales + part * words + words - 1, size)


@triton.jit
def _write_signs(out, bits, scales, mask, count, words, MASKED: tl.constexpr, BYTES: tl.constexpr):
    part = tl.program_id(1).to(tl.int64)  # a message, as above
    place = first_byte(BYTES)
    live = place < count
    e = elements(part * count + place)
    size = tl.load(scales + part * words + words - 1)
    x = tl.where(unpack(tl.load(bits + part * words * 4 + place, mask=live, other=0)) != 0, size, -size)
    if MASKED:
        x = tl.where(tl.load(mask + e, mask=live[:, None], other=0) != 0, x, 0.0)
    tl.store(out + e, x, mask=live[:, None])


def _mask(mask: Tensor | None, stand_in: Tensor) -> tuple[Tensor, dict[str, bool]]:
    return (stand_in, {"MASKED": False}) if mask is None else (mask.view(torch.uint8), {"MASKED": True})


def _blocks(error: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where the sums of the blocks of `error` go, and what is left for the levels above."""
    sums = partial_sums(error.numel(), error.device) if sums is None else sums
    count = triton.cdiv(error.numel(), TREE_BLOCK)
    return sums[:count], sums[count:]


def _total(sums: Tensor, rest: Tensor) -> Tensor:
    while sums.numel() > 1:
        above, rest = _blocks(sums, rest)
        launch(_tree, above.numel(), sums, above, sums.numel(), num_warps=WARPS)
        sums = above
    return sums[0] if sums.numel() else sums.new_zeros(())


def sum_squares(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """See `reference_feedback.sum_squares`."""
    (sums, rest), (flags, masked) = _blocks(z), _mask(mask, z)
    launch(_sum_squares, sums.numel(), z, flags, sums, z.numel(), **masked, num_warps=WARPS)
    return _total(sums, rest)


def add_message(error: Tensor, z: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """See `reference_feedback.add_message`."""
    (sums, rest), (flags, masked) = _blocks(error, sums), _mask(mask, error)
    launch(_add_message, sums.numel(), error, z, flags, sums, error.numel(), **masked, num_warps=WARPS)
    return _total(sums, rest)


def add_momentum(
    error: Tensor, g: Tensor, m: Tensor, *, beta: float, mask: Tensor | None, sums: Tensor | None = None
) -> Tensor:
    """See `reference_feedback.add_momentum`."""
    (sums, rest), (flags, masked) = _blocks(error, sums), _mask(mask, error)
    launch(
        _add_momentum,
        sums.numel(),
        error,
        g,
        m,
        flags,
        sums,
        error.numel(),
        beta,
        1.0 - beta,
        **masked,
        num_warps=WARPS,
    )
    return _total(sums, rest)


def _words(messages: Tensor) -> tuple[Tensor, Tensor, int]:
    """The messages as bytes and as 32-bit words, of which each has so many."""
    words = messages.view(torch.float32)
    return messages, words, words.shape[1]


def add_average(error: Tensor, messages: Tensor, mask: Tensor | None, *, sums: Tensor | None = None) -> Tensor:
    """See `reference_feedback.add_average`."""
    (sums, rest), (flags, masked), n = _blocks(error, sums), _mask(mask, error), len(messages)
    rows, scales, words = _words(messages)
    sizes = error.numel(), words, n
    launch(_add_average, sums.numel(), error, rows, scales, flags, sums, *sizes, **masked, num_warps=WARPS)
    return _total(sums, rest)


def average_signs(rows: Tensor, scales: Tensor) -> Tensor:
    """See `reference_feedback.average_signs`."""
    out = torch.empty(rows.shape[1] * LANES, dtype=torch.float32, device=rows.device)
    launch(_average_signs, triton.cdiv(out.numel(), TREE_BLOCK), out, rows, scales, out.numel(), len(rows))
    return out


def pack_signs(z: Tensor) -> Tensor:
    """See `reference_feedback.pack_signs`."""
    out = torch.empty(z.numel() // LANES, dtype=torch.uint8, device=z.device)
    launch(_pack_signs, triton.cdiv(out.numel(), BYTES), z, out, out.numel(), BYTES=BYTES)
    return out


def split_signs(
    error: Tensor, scale: Tensor, mask: Tensor | None, *, parts: int = 1, out: Tensor | None = None
) -> Tensor:
    """See `reference_feedback.split_signs`."""
    size = error.numel() // parts
    messages = new_messages(parts, size, error.device) if out is None else out.view(parts, -1)
    (flags, masked), count, (bits, scales, words) = _mask(mask, error), size // LANES, _words(messages)
    programs = max(1, triton.cdiv(count, BYTES)), parts  # 1: there is a scale to write
    launch(_split_signs, programs, error, scale, flags, bits, scales, count, words, **masked, BYTES=BYTES)
    return messages


def write_signs(out: Tensor, messages: Tensor, mask: Tensor | None) -> None:
    """See `reference_feedback.write_signs`."""
    (flags, masked), (bits, scales, words) = _mask(mask, out), _words(messages)
    count = out.numel() // len(messages) // LANES
    programs = triton.cdiv(count, BYTES), len(messages)
    launch(_write_signs, programs, out, bits, scales, flags, count, words, **masked, BYTES=BYTES)
