"""The kernels fused for GPUs with Triton: each one a single pass over its memory, on the current stream, nothing on the host.

Same results as `birder.kernels.reference`, bit for bit: Philox is written out, divisions round to nearest, multiply-adds are
not contracted. With TRITON_INTERPRET=1 in the environment before the import they run on CPU tensors, slowly, for tests.
What is only drawn is one launch each, where torch's integer arithmetic needs some 130. The scale of a message stays on the
device: nothing waits on the host between the pass that sums and the pass that splits.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from birder.kernels import reference
from birder.kernels.bits import new_messages, room
from birder.kernels.cuda_bits import BYTES, draw, elements, first_byte, launch, pack, philox, threshold, unpack, word
from birder.kernels.cuda_many import apply_bits, move_adam, take
from birder.kernels.implements import implements
from birder.kernels.philox import BLOCK_STREAM, LANES, MASK_STREAM, OWNER_STREAM, SELECT_STREAM, SERVER_STREAM
from birder.kernels.reference import BLOCK as TREE_BLOCK
from birder.kernels.reference import error_form, partial_sums

WORDS = 256
"""32-bit words of bits, or blocks, that one program works on."""
SELECTED = 512
"""Words of `_copied`: four from each Philox block, so that a thread has one block."""
BLOCK, LEVELS = tl.constexpr(TREE_BLOCK), tl.constexpr(TREE_BLOCK.bit_length() - 1)
WARPS = 1
"""Warps to a block that is added up. A single one adds within its threads and by shuffles, with no barrier."""


# ---- Birder, and what is drawn ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["shift", "k0", "k1", "step", "stream", "block"])
def _encode(
    g, m, b, out, count, beta, rest, beta2, rest2, scale, eps,
    shift, k0, k1, step, stream, block, HOLD: constexpr, BYTES: constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["shift", "k0", "k1", "step", "stream", "block"])
def _binarize(u, out, count, shift, k0, k1, step, stream, block, BYTES: constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    x = tl.load(u + e, mask=(byte < count)[:, None], other=0.0)
    plus = ((draw(block.to(tl.int64) + byte, k0, k1, step, stream) + shift) & 0xFFFF) < threshold(x)
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit
def _ones(rows, byte, count, n):
    """How many of n rows have each bit of these bytes set: int32[c, 8]."""
    ones = tl.zeros((byte.shape[0], 8), tl.int32)
    for r in range(n):
        ones += unpack(tl.load(rows + tl.cast(r, tl.int64) * count + byte, mask=byte < count, other=0))
    return ones


@triton.jit(do_not_specialize=["n", "shift", "k0", "k1", "step", "stream", "block"])
def _reduce(rows, out, count, n, shift, k0, k1, step, stream, block, BYTES: constexpr):
    byte = first_byte(BYTES)
    ones = _ones(rows, byte, count, n)
    # draw < (65536 ones + n//2) // n, without the division
    drawn = (draw(block.to(tl.int64) + byte, k0, k1, step, stream) + shift) & 0xFFFF
    plus = (drawn + 1) * n <= ones * 65536 + n // 2
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit
def _both(a, b):
    return a & b


@triton.jit(do_not_specialize=["n", "k0", "k1", "step", "stream", "first"])
def _copied(rows, out, count, n, k0, k1, step, stream, first, LEVELS: constexpr, WORDS: constexpr):
    """32-bit words: each bit from the worker whose number the random bits of its place make up, LEVELS or fewer of them.

    A program takes whole Philox blocks, of four words each; the first of them may begin before the first word.
    """
    place = tl.program_id(0).to(tl.int64)
    block = (first.to(tl.int64) >> 2) + place * (WORDS // 4) + tl.arange(0, WORDS // 4)
    level = tl.arange(0, LEVELS)[:, None]
    c0, c1, c2, c3 = philox(block[None, :] + tl.zeros_like(level), k0, k1, step, stream + level)
    chosen = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (LEVELS, WORDS)).to(tl.int32, bitcast=True)
    i = place * WORDS + tl.arange(0, WORDS) - (first & 3)
    live = (i >= 0) & (i < count)
    result = tl.zeros((WORDS,), tl.int32)
    for r in range(n):
        needed = ((r >> level) & 1) != 0
        mine = tl.where((1 << level) < n, tl.where(needed, chosen, ~chosen), -1)
        bits = tl.load(rows + tl.cast(r, tl.int64) * count + i, mask=live, other=0)
        result |= bits & tl.reduce(mine, 0, _both)
    tl.store(out + i, result, mask=live)


@triton.jit
def _unseen(b, active, out, numel, block, WIDTH: constexpr):
    i = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    e = i * block + place
    live = (place < block) & (e < numel)
    new = (tl.abs(tl.load(b + e, mask=live, other=0.0)) > 0.0) & (tl.load(active + e, mask=live, other=1) == 0)
    tl.store(out + i, (tl.sum(new.to(tl.int32), axis=0) > 0).to(tl.uint8))


@triton.jit(do_not_specialize=["limit", "k0", "k1", "step", "stream", "block"])
def _mask(out, numel, limit, k0, k1, step, stream, block, BYTES: constexpr):
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
def _blocks(out, count, ratio, k0, k1, step, stream, first, WORDS: constexpr):
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    run = first.to(tl.int64) + i
    place = _below(run, ratio, k0, k1, step, stream).to(tl.int64)
    tl.store(out + i, run * ratio + place, mask=i < count)


@triton.jit(do_not_specialize=["n", "worker", "k0", "k1", "step", "stream", "first"])
def _owned(words, out, count, n, worker, k0, k1, step, stream, first, WORDS: constexpr):
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    place = (worker + n - _below(first.to(tl.int64) + i * n, n, k0, k1, step, stream)) % n
    tl.store(out + i, tl.load(words + i * n + place, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["n", "turn", "k0", "k1", "step", "stream", "first"])
def _assemble(rows, out, count, n, turn, k0, k1, step, stream, first, WORDS: constexpr):
    e = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    group, j = e // n, (e % n).to(tl.int32)
    row = (j + turn + _below(first.to(tl.int64) + group * n, n, k0, k1, step, stream)) % n
    taken = tl.load(rows + row.to(tl.int64) * (count // n) + group, mask=e < count, other=0)
    tl.store(out + e, taken, mask=e < count)


def _counter(o, stream, each=LANES):
    """Key, step, stream and the number of the first Philox block, which serves `each` elements."""
    return word(o.seed), word(o.seed >> 32), word(o.step), stream, o.start // each


@implements(reference.encode)
def encode(g, m, b, o):
    out, beta2 = room(o.out, g.numel() // LANES, g), o.beta if o.beta2 is None else o.beta2
    law = o.beta, 1.0 - o.beta, beta2, 1.0 - beta2, float(o.scale), o.eps, o.shift, *_counter(o, o.worker)
    launch(_encode, triton.cdiv(out.numel(), BYTES), g, m, b, out, out.numel(), *law, HOLD=o.hold, BYTES=BYTES)
    return out


@implements(reference.binarize)
def binarize(u, o):
    out = room(o.out, u.numel() // LANES, u)
    counter = o.shift, *_counter(o, o.worker)
    launch(_binarize, triton.cdiv(out.numel(), BYTES), u, out, out.numel(), *counter, BYTES=BYTES)
    return out


@implements(reference.reduce_bits)
def reduce_bits(rows, o):
    n, count = rows.shape
    out = room(o.out, count, rows)
    if not count:
        return out
    if n & (n - 1) or o.shift is not None:
        counter = o.shift or 0, *_counter(o, SERVER_STREAM)
        launch(_reduce, triton.cdiv(count, BYTES), rows, out, count, n, *counter, BYTES=BYTES)
    elif count % 4 or o.start % 32:  # a unit of an optimizer never is like that
        reference.reduce_bits(rows, **vars(o) | {"out": out})
    else:
        words, levels = count // 4, triton.next_power_of_2(max(n.bit_length() - 1, 1))
        args = rows.view(torch.int32), out.view(torch.int32), words, n, *_counter(o, SELECT_STREAM, 32)
        launch(_copied, triton.cdiv(words + args[-1] % 4, SELECTED), *args, LEVELS=levels, WORDS=SELECTED)
    return out


@implements(reference.unseen_blocks)
def unseen_blocks(b, active, block):
    out = torch.empty(triton.cdiv(b.numel(), block), dtype=torch.bool, device=b.device)
    flags, width = (active.view(torch.uint8), out.view(torch.uint8)), triton.next_power_of_2(block)
    launch(_unseen, out.numel(), b, *flags, b.numel(), block, WIDTH=width)
    return out


@implements(reference.random_mask)
def random_mask(numel, limit, o):
    out = torch.empty(numel, dtype=torch.bool, device=o.device)
    args = out.view(torch.uint8), numel, limit, *_counter(o, MASK_STREAM)
    launch(_mask, triton.cdiv(numel, BYTES * LANES), *args, BYTES=BYTES)
    return out


@implements(reference.chosen_blocks)
def chosen_blocks(first, count, ratio, o):
    out = torch.empty(count, dtype=torch.int64, device=o.device)
    counter = word(o.seed), word(o.seed >> 32), word(o.step), BLOCK_STREAM + o.stream, first
    launch(_blocks, triton.cdiv(count, WORDS), out, count, ratio, *counter, WORDS=WORDS)
    return out


@implements(reference.owned)
def owned(bits, o):
    out, n = room(o.out, bits.numel() // o.n, bits), o.n
    words, taken = bits.view(torch.int32), out.view(torch.int32)
    args = words, taken, taken.numel(), n, (o.worker - o.turn) % n, *_counter(o, OWNER_STREAM, 32)
    launch(_owned, triton.cdiv(taken.numel(), WORDS), *args, WORDS=WORDS)
    return out


@implements(reference.assemble)
def assemble(rows, o):
    out, n = room(o.out, rows.numel(), rows), len(rows)
    words, whole = rows.view(torch.int32), out.view(torch.int32)
    args = words, whole, whole.numel(), n, o.turn % n, *_counter(o, OWNER_STREAM, 32)
    launch(_assemble, triton.cdiv(whole.numel(), WORDS), *args, WORDS=WORDS)
    return out


# ---- error feedback ---------------------------------------------------------------------------------------------------


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
def _finish(error, e, x, live, mask, sums, MASKED: constexpr):
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
def _add_message(error, z, mask, sums, numel, MASKED: constexpr):
    e = _places()
    live = e < numel
    x = tl.load(z + e, mask=live, other=0.0) + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit
def _add_momentum(error, g, m, mask, sums, numel, beta, rest, MASKED: constexpr):
    e = _places()
    live = e < numel
    x = tl.load(g + e, mask=live, other=0.0) * rest + tl.load(m + e, mask=live, other=0.0) * beta
    x = x + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit
def _sign_sum(rows, width, scales, apart, n, numel):
    """fp32[BLOCK]: (1/n) sum_i scale_i * (+-1), in the order of the workers. Rows begin `width` bytes apart, scales `apart`
    floats. The division is done here: torch's on a GPU would multiply by 1/n.
    """
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    x = tl.zeros((BLOCK // 8, 8), tl.float32)
    for r in range(n):
        place = tl.cast(r, tl.int64)
        bits = unpack(tl.load(rows + place * width + byte, mask=byte * 8 < numel, other=0))
        weight = tl.div_rn(tl.load(scales + place * apart), tl.cast(n, tl.float32))
        x += tl.where(bits != 0, weight, -weight)
    return tl.reshape(x, (BLOCK,))


@triton.jit(do_not_specialize=["n"])
def _add_average(error, rows, scales, mask, sums, numel, words, n, MASKED: constexpr):
    e = _places()  # a message has `words` words of 32 bits, the last is its scale
    live = e < numel
    x = _sign_sum(rows, tl.cast(words, tl.int64) * 4, scales + words - 1, words, n, numel)
    x = x + tl.load(error + e, mask=live, other=0.0)
    _finish(error, e, x, live, mask, sums, MASKED)


@triton.jit(do_not_specialize=["n"])
def _average_signs(out, rows, scales, numel, n):
    e = _places()
    tl.store(out + e, _sign_sum(rows, numel // 8, scales, 1, n, numel), mask=e < numel)


@triton.jit
def _pack_signs(z, out, count, BYTES: constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    x = tl.load(z + e, mask=(byte < count)[:, None], other=0.0)
    tl.store(out + byte, pack(x >= 0.0), mask=byte < count)


@triton.jit
def _split_signs(error, scale, mask, out, scales, count, words, MASKED: constexpr, BYTES: constexpr):
    # A message: `count` bytes of bits, `words` words, of which the last is its scale.
    part = tl.program_id(1).to(tl.int64)
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
def _write_signs(out, bits, scales, mask, count, words, MASKED: constexpr, BYTES: constexpr):
    part = tl.program_id(1).to(tl.int64)  # a message, as above
    place = first_byte(BYTES)
    live = place < count
    e = elements(part * count + place)
    size = tl.load(scales + part * words + words - 1)
    x = tl.where(unpack(tl.load(bits + part * words * 4 + place, mask=live, other=0)) != 0, size, -size)
    if MASKED:
        x = tl.where(tl.load(mask + e, mask=live[:, None], other=0) != 0, x, 0.0)
    tl.store(out + e, x, mask=live[:, None])


def _flags(mask: Tensor | None, stand_in: Tensor) -> tuple[Tensor, dict[str, bool]]:
    return (stand_in, {"MASKED": False}) if mask is None else (mask.view(torch.uint8), {"MASKED": True})


def _total(sums: Tensor, rest: Tensor) -> Tensor:
    """`reference.tree_sum` of the blocks' sums. rest: where those of the levels above go."""
    while sums.numel() > 1:
        count = triton.cdiv(sums.numel(), TREE_BLOCK)
        above, rest = rest[:count], rest[count:]
        launch(_tree, count, sums, above, sums.numel(), num_warps=WARPS)
        sums = above
    return sums[0] if sums.numel() else sums.new_zeros(())


def _summed(kernel, error, arrays, mask, o, *numbers):
    """Launches `kernel`, which adds to `error`, and returns the sum of squares."""
    numel = error.numel()
    sums, count = partial_sums(numel, error.device) if o.sums is None else o.sums, triton.cdiv(numel, TREE_BLOCK)
    flags, masked = _flags(mask, error)
    launch(kernel, count, error, *arrays, flags, sums[:count], numel, *numbers, **masked, num_warps=WARPS)
    return _total(sums[:count], sums[count:])


def _words(messages: Tensor) -> tuple[Tensor, Tensor, int]:
    """The messages as bytes and as 32-bit words, of which each has so many."""
    words = messages.view(torch.float32)
    return messages, words, words.shape[1]


@implements(reference.add_message)
def add_message(error, z, mask, o):
    return _summed(_add_message, error, (z,), mask, o)


@implements(reference.add_momentum)
def add_momentum(error, g, m, o):
    return _summed(_add_momentum, error, (g, m), o.mask, o, o.beta, 1.0 - o.beta)


@implements(reference.add_average)
def add_average(error, messages, mask, o):
    rows, scales, words = _words(messages)
    return _summed(_add_average, error, (rows, scales), mask, o, words, len(messages))


@implements(reference.average_signs)
def average_signs(rows, scales):
    out = torch.empty(rows.shape[1] * LANES, dtype=torch.float32, device=rows.device)
    launch(_average_signs, triton.cdiv(out.numel(), TREE_BLOCK), out, rows, scales, out.numel(), len(rows))
    return out


@implements(reference.pack_signs)
def pack_signs(z):
    out = room(None, z.numel() // LANES, z)
    launch(_pack_signs, triton.cdiv(out.numel(), BYTES), z, out, out.numel(), BYTES=BYTES)
    return out


@implements(reference.split_signs)
def split_signs(error, scale, mask, o):
    parts, size = o.parts, error.numel() // o.parts
    messages = new_messages(parts, size, error.device) if o.out is None else o.out.view(parts, -1)
    (flags, masked), count, (bits, scales, words) = _flags(mask, error), size // LANES, _words(messages)
    programs = max(1, triton.cdiv(count, BYTES)), parts  # 1: there is a scale to write
    launch(_split_signs, programs, error, scale, flags, bits, scales, count, words, **masked, BYTES=BYTES)
    return messages


@implements(reference.write_signs)
def write_signs(out, messages, mask):
    (flags, masked), (bits, scales, words) = _flags(mask, out), _words(messages)
    count = out.numel() // len(messages) // LANES
    programs = triton.cdiv(count, BYTES), len(messages)
    launch(_write_signs, programs, out, bits, scales, flags, count, words, **masked, BYTES=BYTES)


# ---- sigma-delta ------------------------------------------------------------------------------------------------------


@triton.jit
def _clipped(z, most):
    z = tl.where(z < most, z, most)
    return tl.where(z > -most, z, -most)


@triton.jit
def _floor(x):
    """Of small numbers. The instruction for it takes numbers below 1e-38 for 0."""
    whole = x.to(tl.int32).to(tl.float32)
    return tl.where(x < whole, whole - 1.0, whole)


@triton.jit
def _old(error, e, live, step, STEPS: constexpr):
    """What the error says, as fp32."""
    old = tl.load(error + e, mask=live, other=0)
    return old.to(tl.float32) * step if STEPS else old


@triton.jit
def _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK: constexpr, STEPS: constexpr):
    """Writes the bits of z, and what they leave in `error`."""
    plus = z >= 0.0
    if FEEDBACK:
        z = z - tl.where(plus, 1.0, -1.0)
    if STEPS:
        tl.store(error + e, _clipped(_floor(z * units + dither), most).to(tl.int8), mask=live)
    else:
        tl.store(error + e, _clipped(z, most), mask=live)
    tl.store(out + byte, pack(plus), mask=byte < count)


@triton.jit
def _modulate(
    u, error, out, count, weight, step, most, units, dither, FEEDBACK: constexpr, STEPS: constexpr, BYTES: constexpr
):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    z = tl.load(u + e, mask=live, other=0.0) * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK, STEPS)


@triton.jit
def _modulate_adam(
    g, m, v, shared, error, out, count, beta1, rest1, beta2, rest2, scale, eps, weight, step, most, units, dither,
    MOMENTS: constexpr, HOLD: constexpr, SHARED: constexpr, FEEDBACK: constexpr, STEPS: constexpr, BYTES: constexpr,
):  # fmt: skip
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    mean = tl.load(m + e, mask=live, other=0.0)
    if MOMENTS:
        x = tl.load(g + e, mask=live, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # false for NaN too
        old = tl.load(v + e, mask=live, other=0.0)
        square = old * beta2 + (x * x) * rest2
        if HOLD:
            square = tl.where(x == 0.0, old, square)
        mean = mean * beta1 + x * rest1
        tl.store(m + e, mean, mask=live)
        tl.store(v + e, square, mask=live)
    if SHARED:
        square = tl.load(shared + e, mask=live, other=0.0)
    elif not MOMENTS:
        square = tl.load(v + e, mask=live, other=0.0)
    below = tl.sqrt_rn(square) + eps
    ratio = tl.div_rn(mean * scale, tl.where(below > 0.0, below, 1.0))
    ratio = _clipped(tl.where(below > 0.0, ratio, 0.0), 1.0)
    z = ratio * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, FEEDBACK, STEPS)


@triton.jit(do_not_specialize=["n"])
def _serve(rows, error, out, count, n, weight, step, most, units, dither, STEPS: constexpr, BYTES: constexpr):
    byte = first_byte(BYTES)
    e = elements(byte)
    live = (byte < count)[:, None]
    z = (2 * _ones(rows, byte, count, n) - n).to(tl.float32) * weight + _old(error, e, live, step, STEPS)
    _leave(z, error, e, out, byte, live, count, most, units, dither, True, STEPS)


def _constants(error: Tensor, limit: int) -> dict[str, object]:
    return {"FEEDBACK": limit == 1, "STEPS": error.dtype != torch.float32, "BYTES": BYTES}


@implements(reference.modulate)
def modulate(u, error, o):
    out, form = room(o.out, u.numel() // LANES, u), (float(o.weight), *error_form(error, o.limit, o.dither))
    programs = triton.cdiv(out.numel(), BYTES)
    launch(_modulate, programs, u, error, out, out.numel(), *form, **_constants(error, o.limit))
    return out


@implements(reference.modulate_adam)
def modulate_adam(g, m, v, error, shared, o):
    out, form = room(o.out, m.numel() // LANES, m), (float(o.weight), *error_form(error, o.limit, o.dither))
    tensors = m if g is None else g, m, v, v if shared is None else shared, error, out
    law = o.beta1, 1.0 - o.beta1, o.beta2, 1.0 - o.beta2, float(o.scale), float(o.eps)
    constants = {"MOMENTS": g is not None, "HOLD": o.hold, "SHARED": shared is not None, **_constants(error, o.limit)}
    launch(_modulate_adam, triton.cdiv(out.numel(), BYTES), *tensors, out.numel(), *law, *form, **constants)
    return out


@implements(reference.serve_sigma)
def serve_sigma(rows, error, o):
    n, count = rows.shape
    out, args = room(o.out, count, rows), (o.gamma / n, *error_form(error, 1, o.dither))
    steps = error.dtype != torch.float32
    launch(_serve, triton.cdiv(count, BYTES), rows, error, out, count, n, *args, STEPS=steps, BYTES=BYTES)
    return out
