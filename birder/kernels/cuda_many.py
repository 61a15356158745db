"""Kernels over the tensors of a unit, one launch for all of them: see birder/kernels/segments.py for their table.

Tensors in logical order are read and written 16 bytes at a time. Others (channels last) are read and written in the order of
memory too; the flat buffers are then gathered, from the cache for the greater part.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from birder.kernels import reference
from birder.kernels.cuda_bits import launch, unpack
from birder.kernels.implements import implements
from birder.kernels.segments import CHUNK, launches

ROWS = tl.constexpr(CHUNK // 8)


@triton.jit
def _row(rows, COLUMNS: constexpr):
    """This program's row of the table."""
    return rows + tl.program_id(0).to(tl.int64) * COLUMNS


@triton.jit
def _inside():
    """int32[ROWS, 8]: this program's elements, counted from its first one on, in the order of memory."""
    return tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _begin(row):
    """Number of this program's first element in memory."""
    return tl.multiple_of(tl.load(row), 32)


@triton.jit
def _live(row, WHOLE: constexpr):
    """bool[ROWS, 8]: which of this program's elements there are. All of them, where that is known, keep accesses wide."""
    return _inside() < (ROWS * 8 if WHOLE else tl.load(row + 1).to(tl.int32))


@triton.jit
def _whole(row):
    return tl.load(row + 1) == ROWS * 8


@triton.jit
def _place(row, ORDERED: constexpr):
    """Where in the flat buffer the numbers of `_logical` begin to count."""
    place = tl.multiple_of(tl.load(row + 2), 32)
    return place + _begin(row) if ORDERED else place


@triton.jit
def _logical(row, ORDERED: constexpr):
    """int32[ROWS, 8]: the logical numbers of this program's elements; where memory has that order, from its first one on."""
    if ORDERED:
        return _inside()
    inner, middle = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    k = _begin(row).to(tl.int32) + _inside()
    outer, i = k // inner, k % inner
    return (outer // middle * inner + i) * middle + outer % middle


@triton.jit
def _pointer(row, column, first, KIND: constexpr, ALIGNED: constexpr):
    """To element `first` of the tensor whose address stands in that column."""
    address = tl.load(row + column).to(tl.pointer_type(KIND))
    if ALIGNED:  # chunks begin at multiples of CHUNK
        return tl.multiple_of(address + first, 16)
    return address + first


@triton.jit
def _apply_part(
    row, bits, active, lr, keep,
    DECAYS: constexpr, PARTIAL: constexpr, ORDERED: constexpr, ALIGNED: constexpr, WHOLE: constexpr,
):  # fmt: skip
    inside, logical, live = _inside(), _logical(row, ORDERED), _live(row, WHOLE)
    p, place = _pointer(row, 5, _begin(row), tl.float32, ALIGNED), _place(row, ORDERED)
    x = tl.load(p + inside, mask=live, other=0.0)
    if DECAYS:
        x = x * keep
    if ORDERED:
        byte, count = tl.arange(0, ROWS), ROWS * 8 if WHOLE else tl.load(row + 1)
        plus = unpack(tl.load(bits + (place >> 3) + byte, mask=byte * 8 < count, other=0)) != 0
    else:
        byte = tl.load(bits + (place >> 3) + (logical >> 3), mask=live, other=0).to(tl.int32)
        plus = ((byte >> (logical & 7)) & 1) != 0
    moved = tl.where(plus, x - lr, x + lr)
    if PARTIAL:
        moved = tl.where(tl.load(active + place + logical, mask=live, other=0) != 0, moved, x)
    tl.store(p + inside, moved, mask=live)


@triton.jit
def _apply(rows, bits, active, lr, keep, DECAYS: constexpr, PARTIAL: constexpr, ORDERED: constexpr, ALIGNED: constexpr):
    row = _row(rows, 6)
    if _whole(row):
        _apply_part(row, bits, active, lr, keep, DECAYS, PARTIAL, ORDERED, ALIGNED, True)
    else:
        _apply_part(row, bits, active, lr, keep, DECAYS, PARTIAL, ORDERED, ALIGNED, False)


@triton.jit
def _move_part(row, rate_down, correction, eps, keep, ORDERED: constexpr, ALIGNED: constexpr, WHOLE: constexpr):
    inside, logical, live = _inside(), _logical(row, ORDERED), _live(row, WHOLE)
    first = _begin(row)
    p = _pointer(row, 5, first, tl.float32, ALIGNED)
    other = first if ORDERED else first * 0
    m = _pointer(row, 6, other, tl.float32, ALIGNED)
    v = _pointer(row, 7, other, tl.float32, ALIGNED)
    below = tl.div_rn(tl.sqrt_rn(tl.load(v + logical, mask=live, other=1.0)), correction) + eps
    up = tl.load(m + logical, mask=live, other=0.0) * rate_down
    x = tl.load(p + inside, mask=live, other=0.0) * keep + tl.div_rn(up, below)
    tl.store(p + inside, x, mask=live)


@triton.jit
def _move(rows, rate_down, correction, eps, keep, ORDERED: constexpr, ALIGNED: constexpr):
    row = _row(rows, 8)
    if _whole(row):
        _move_part(row, rate_down, correction, eps, keep, ORDERED, ALIGNED, True)
    else:
        _move_part(row, rate_down, correction, eps, keep, ORDERED, ALIGNED, False)


@triton.jit
def _take_part(
    row, flat, factor,
    KIND: constexpr, SCALED: constexpr, SCREENED: constexpr, ORDERED: constexpr, ALIGNED: constexpr, WHOLE: constexpr,
):  # fmt: skip
    inside, logical, live = _inside(), _logical(row, ORDERED), _live(row, WHOLE)
    g, place = _pointer(row, 5, _begin(row), KIND, ALIGNED), _place(row, ORDERED)
    x = tl.load(g + inside, mask=live, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(factor)
    if SCREENED:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # false for NaN too
    # On the pointer: older Triton forgets hints on numbers that it loads.
    tl.store(tl.multiple_of(flat + place, 16) + logical, x, mask=live)


@triton.jit
def _take(
    rows, flat, factor, KIND: constexpr, SCALED: constexpr, SCREENED: constexpr, ORDERED: constexpr, ALIGNED: constexpr
):
    row = _row(rows, 6)
    if _whole(row):
        _take_part(row, flat, factor, KIND, SCALED, SCREENED, ORDERED, ALIGNED, True)
    else:
        _take_part(row, flat, factor, KIND, SCALED, SCREENED, ORDERED, ALIGNED, False)


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SINGLE, EVERY = (torch.float32,), tuple(KINDS)


def _launch(kernel, made, args, **constants):
    """Launches `kernel` on the tensors of each table."""
    for kind, ordered, aligned, rows in made:
        types = {"KIND": KINDS[kind]} if kernel is _take else {}
        launch(kernel, len(rows), rows, *args, ORDERED=ordered, ALIGNED=aligned, **types, **constants)


def _some(numbers: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    return [[each[i] for i in numbers] for each in lists]


@implements(reference.apply_bits)
def apply_bits(params, offsets, bits, o):
    made, rest = launches(params, offsets, SINGLE)
    if rest:
        some, at = _some(rest, params, offsets)
        reference.apply_bits(some, at, bits, **vars(o))
    moves = bits if o.active is None else o.active.view(torch.uint8)
    args = bits, moves, o.lr, 1.0 - o.decay
    _launch(_apply, made, args, DECAYS=bool(o.decay), PARTIAL=o.active is not None)


@implements(reference.move_adam)
def move_adam(params, m, v, o):
    made, rest = launches(params, [0] * len(params), SINGLE, m, v)
    if rest:
        reference.move_adam(*_some(rest, params, m, v), **vars(o))
    _launch(_move, made, (-o.rate, o.correction, o.eps, o.keep))


@implements(reference.take)
def take(flat, grads, offsets, o):
    if flat.storage_offset() % 4 or not grads:  # a flat buffer begins at a multiple of 16 bytes; a part of one need not
        reference.take(flat, grads, offsets, **vars(o))
        return
    made, rest = launches(grads, offsets, EVERY)
    _launch(_take, made, (flat, flat if o.factor is None else o.factor), SCALED=o.factor is not None, SCREENED=o.screen)
    if rest:
        reference.take(flat, *_some(rest, grads, offsets), **vars(o))
