"""What is only drawn, with Triton: stochastic signs of a given ratio, masks, blocks, and the owners of words.

One launch each, where torch's integer arithmetic needs some 130. Same results as birder/kernels/philox.py, reference.py,
one_phase.py and draw.py.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from birder.kernels.cuda_bits import BYTES, draw, elements, first_byte, launch, pack, philox, threshold, word
from birder.kernels.philox import BLOCK_STREAM, LANES, MASK_STREAM, OWNER_STREAM

WORDS = 256
"""Words or blocks that one program draws for."""


@triton.jit(do_not_specialize=["shift", "k0", "k1", "step", "stream", "block"])
def _binarize(u, out, count, shift, k0, k1, step, stream, block, BYTES: tl.constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    x = tl.load(u + e, mask=(byte < count)[:, None], other=0.0)
    plus = ((draw(block.to(tl.int64) + byte, k0, k1, step, stream) + shift) & 0xFFFF) < threshold(x)
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit(do_not_specialize=["limit", "k0", "k1", "step", "stream", "block"])
def _mask(out, numel, limit, k0, k1, step, stream, block, BYTES: tl.constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    chosen = draw(block.to(tl.int64) + byte, k0, k1, step, stream) < limit
    tl.store(out + e, chosen.to(tl.uint8), mask=e < numel)


@triton.jit
def _below(number, n, k0, k1, step, stream):
    """A number in [0, n) for each Philox block: the first word times n, divided by 2^32."""
    word, _c1, _c2, _c3 = philox(number, k0, k1, step, stream)
    return tl.umulhi(word, tl.zeros_like(word) + n.to(tl.uint32)).to(tl.int32)


@triton.jit(do_not_specialize=["ratio", "k0", "k1", "step", "stream", "first"])
def _blocks(out, count, ratio, k0, k1, step, stream, first, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    run = first.to(tl.int64) + i
    place = _below(run, ratio, k0, k1, step, stream).to(tl.int64)
    tl.store(out + i, run * ratio + place, mask=i < count)


@triton.jit(do_not_specialize=["n", "worker", "k0", "k1", "step", "stream", "first"])
def _owned(words, out, count, n, worker, k0, k1, step, stream, first, WORDS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    place = (worker + n - _below(first.to(tl.int64) + i * n, n, k0, k1, step, stream)) % n
    tl.store(out + i, tl.load(words + i * n + place, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["n", "turn", "k0", "k1", "step", "stream", "first"])
def _assemble(rows, out, count, n, turn, k0, k1, step, stream, first, WORDS: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    group, j = e // n, (e % n).to(tl.int32)
    row = (j + turn + _below(first.to(tl.int64) + group * n, n, k0, k1, step, stream)) % n
    taken = tl.load(rows + row.to(tl.int64) * (count // n) + group, mask=e < count, other=0)
    tl.store(out + e, taken, mask=e < count)


def binarize(
    u: Tensor, *, seed: int, step: int, worker: int, start: int, shift: int = 0, out: Tensor | None = None
) -> Tensor:
    """See `reference.binarize`."""
    out = torch.empty(u.numel() // LANES, dtype=torch.uint8, device=u.device) if out is None else out
    counter = shift, word(seed), word(seed >> 32), word(step), worker, start // LANES
    launch(_binarize, triton.cdiv(out.numel(), BYTES), u, out, out.numel(), *counter, BYTES=BYTES)
    return out


def random_mask(numel: int, limit: int, *, seed: int, step: int, start: int, device: torch.device) -> Tensor:
    """See `draw.random_mask`."""
    out = torch.empty(numel, dtype=torch.bool, device=device)
    counter = word(seed), word(seed >> 32), word(step), MASK_STREAM, start // LANES
    launch(_mask, triton.cdiv(numel, BYTES * LANES), out.view(torch.uint8), numel, limit, *counter, BYTES=BYTES)
    return out


def chosen_blocks(
    first: int, count: int, ratio: int, *, seed: int, step: int, stream: int, device: torch.device
) -> Tensor:
    """See `draw.chosen_blocks`."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    counter = word(seed), word(seed >> 32), word(step), BLOCK_STREAM + stream, first
    launch(_blocks, triton.cdiv(count, WORDS), out, count, ratio, *counter, WORDS=WORDS)
    return out


def owned(
    bits: Tensor, *, n: int, worker: int, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None
) -> Tensor:
    """See `one_phase.owned`."""
    out = torch.empty(bits.numel() // n, dtype=torch.uint8, device=bits.device) if out is None else out
    words, taken = bits.view(torch.int32), out.view(torch.int32)
    counter = word(seed), word(seed >> 32), word(step), OWNER_STREAM, start // 32
    programs = triton.cdiv(taken.numel(), WORDS)
    launch(_owned, programs, words, taken, taken.numel(), n, (worker - turn) % n, *counter, WORDS=WORDS)
    return out


def assemble(rows: Tensor, *, seed: int, step: int, start: int, turn: int = 0, out: Tensor | None = None) -> Tensor:
    """See `one_phase.assemble`."""
    out = torch.empty(rows.numel(), dtype=torch.uint8, device=rows.device) if out is None else out
    words, whole, n = rows.view(torch.int32), out.view(torch.int32), len(rows)
    counter = turn % n, word(seed), word(seed >> 32), word(step), OWNER_STREAM, start // 32
    launch(_assemble, triton.cdiv(whole.numel(), WORDS), words, whole, whole.numel(), n, *counter, WORDS=WORDS)
    return out
