"""Kernels over the tensors of a unit, one launch for all of them: see birder/kernels/segments.py for their table.

Tensors in logical order are read and written 16 bytes at a time. Others (channels last) are read and written in the order of
memory too; what is beside them in flat buffers is then gathered, from the cache for the greater part.
"""

# In the functions of Triton only constants are annotated.
# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from birder.kernels import reference_feedback, reference_many
from birder.kernels.cuda_bits import launch, unpack
from birder.kernels.segments import CHUNK, order, table

ROWS = tl.constexpr(CHUNK // 8)


@triton.jit
def _cell(rows, column, COLUMNS: tl.constexpr):
    return tl.load(rows + tl.program_id(0).to(tl.int64) * COLUMNS + column)


@triton.jit
def _inside():
    """int32[ROWS, 8]: this program's elements, counted from its first one on, in the order of memory."""
    return tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _begin(rows, COLUMNS: tl.constexpr):
    """Number of this program's first element in memory."""
    return tl.multiple_of(_cell(rows, 0, COLUMNS), 32)


@triton.jit
def _live(rows, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """bool[ROWS, 8]: which of this program's elements there are. All of them, where that is known, keep accesses wide."""
    return _inside() < (ROWS * 8 if WHOLE else _cell(rows, 1, COLUMNS).to(tl.int32))


@triton.jit
def _whole(rows, COLUMNS: tl.constexpr):
    return _cell(rows, 1, COLUMNS) == ROWS * 8


@triton.jit
def _place(rows, COLUMNS: tl.constexpr, ORDERED: tl.constexpr):
    """Where in the flat buffer the numbers of `_logical` begin to count."""
    place = tl.multiple_of(_cell(rows, 2, COLUMNS), 32)
    return place + _begin(rows, COLUMNS) if ORDERED else place


@triton.jit
def _logical(rows, COLUMNS: tl.constexpr, ORDERED: tl.constexpr):
    """int32[ROWS, 8]: the logical numbers of this program's elements; where memory has that order, from its first one on."""
    if ORDERED:
        return _inside()
    inner, middle = _cell(rows, 3, COLUMNS).to(tl.int32), _cell(rows, 4, COLUMNS).to(tl.int32)
    k = _begin(rows, COLUMNS).to(tl.int32) + _inside()
    outer, i = k // inner, k % inner
    return (outer // middle * inner + i) * middle + outer % middle


@triton.jit
def _pointer(rows, column, first, KIND: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """To element `first` of the tensor whose address stands in that column."""
    address = _cell(rows, column, COLUMNS).to(tl.pointer_type(KIND))
    if ALIGNED:  # chunks begin at multiples of CHUNK
        return tl.multiple_of(address + first, 16)
    return address + first


@triton.jit
def _apply_part(
    rows,
    bits,
    active,
    lr,
    keep,
    DECAYS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ORDERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    inside, logical, live = _inside(), _logical(rows, 6, ORDERED), _live(rows, 6, WHOLE)
    p, place = _pointer(rows, 5, _begin(rows, 6), tl.float32, 6, ALIGNED), _place(rows, 6, ORDERED)
    x = tl.load(p + inside, mask=live, other=0.0)
    if DECAYS:
        x = x * keep
    if ORDERED:
        byte = tl.arange(0, ROWS)
        plus = (
            unpack(
                tl.load(bits + (place >> 3) + byte, mask=byte * 8 < (ROWS * 8 if WHOLE else _cell(rows, 1, 6)), other=0)
            )
            != 0
        )
    else:
        byte = tl.load(bits + (place >> 3) + (logical >> 3), mask=live, other=0).to(tl.int32)
        plus = ((byte >> (logical & 7)) & 1) != 0
    moved = tl.where(plus, x - lr, x + lr)
    if PARTIAL:
        moved = tl.where(tl.load(active + place + logical, mask=live, other=0) != 0, moved, x)
    tl.store(p + inside, moved, mask=live)


@triton.jit
def _apply(
    rows,
    bits,
    active,
    lr,
    keep,
    DECAYS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ORDERED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if _whole(rows, 6):
        _apply_part(rows, bits, active, lr, keep, DECAYS, PARTIAL, ORDERED, ALIGNED, True)
    else:
        _apply_part(rows, bits, active, lr, keep, DECAYS, PARTIAL, ORDERED, ALIGNED, False)


@triton.jit
def _move_part(
    rows, rate_down, correction, eps, keep, ORDERED: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr
):
    inside, logical, live = _inside(), _logical(rows, 8, ORDERED), _live(rows, 8, WHOLE)
    first = _begin(rows, 8)
    p = _pointer(rows, 5, first, tl.float32, 8, ALIGNED)
    other = first if ORDERED else first * 0
    m = _pointer(rows, 6, other, tl.float32, 8, ALIGNED)
    v = _pointer(rows, 7, other, tl.float32, 8, ALIGNED)
    below = tl.div_rn(tl.sqrt_rn(tl.load(v + logical, mask=live, other=1.0)), correction) + eps
    up = tl.load(m + logical, mask=live, other=0.0) * rate_down
    x = tl.load(p + inside, mask=live, other=0.0) * keep + tl.div_rn(up, below)
    tl.store(p + inside, x, mask=live)


@triton.jit
def _move(rows, rate_down, correction, eps, keep, ORDERED: tl.constexpr, ALIGNED: tl.constexpr):
    if _whole(rows, 8):
        _move_part(rows, rate_down, correction, eps, keep, ORDERED, ALIGNED, True)
    else:
        _move_part(rows, rate_down, correction, eps, keep, ORDERED, ALIGNED, False)


@triton.jit
def _take_part(
    rows,
    flat,
    factor,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    SCREENED: tl.constexpr,
    ORDERED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    inside, logical, live = _inside(), _logical(rows, 6, ORDERED), _live(rows, 6, WHOLE)
    g, place = _pointer(rows, 5, _begin(rows, 6), KIND, 6, ALIGNED), _place(rows, 6, ORDERED)
    x = tl.load(g + inside, mask=live, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(factor)
    if SCREENED:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # false for NaN too
    tl.store(flat + place + logical, x, mask=live)


@triton.jit
def _take(
    rows,
    flat,
    factor,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    SCREENED: tl.constexpr,
    ORDERED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if _whole(rows, 6):
        _take_part(rows, flat, factor, KIND, SCALED, SCREENED, ORDERED, ALIGNED, True)
    else:
        _take_part(rows, flat, factor, KIND, SCALED, SCREENED, ORDERED, ALIGNED, False)


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    more: Sequence[Sequence[Tensor]],
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """One launch for the tensors that stand in memory as they are numbered, one for the others."""
    numbered = [order(t) == (1, 1) for t in tensors]
    for ordered in (True, False):
        here = [i for i, n in enumerate(numbered) if n is ordered and tensors[i].numel()]
        if here:
            rows, aligned = table(
                [tensors[i].detach() for i in here], [offsets[i] for i in here], *([t[i] for i in here] for t in more)
            )
            launch(kernel, len(rows), rows, *args, ORDERED=ordered, ALIGNED=aligned, **constants)


def _apart(tensors: Sequence[Tensor], fits: Callable[[Tensor], bool]) -> tuple[list[int], list[int]]:
    """Numbers of the tensors that fit, and of the others."""
    yes = [i for i, t in enumerate(tensors) if order(t) is not None and fits(t)]
    return yes, sorted(set(range(len(tensors))) - set(yes))


def _single(t: Tensor) -> bool:
    return t.dtype == torch.float32


def apply_bits(
    params: Sequence[Tensor], offsets: Sequence[int], bits: Tensor, *, lr: float, decay: float, active: Tensor | None
) -> None:
    """See `reference_many.apply_bits`; parameters that are not fp32 take it."""
    here, rest = _apart(params, _single)
    law = {"lr": lr, "decay": decay, "active": active}
    reference_many.apply_bits([params[i] for i in rest], [offsets[i] for i in rest], bits, **law)  # type: ignore[arg-type]
    moves = bits if active is None else active.view(torch.uint8)
    constants = {"DECAYS": bool(decay), "PARTIAL": active is not None}
    chosen = [params[i] for i in here], [offsets[i] for i in here]
    _launch(_apply, *chosen, (), (bits, moves, lr, 1.0 - decay), constants)


def move_adam(
    params: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    rate: float,
    correction: float,
    eps: float,
    keep: float,
) -> None:
    """See `reference_feedback.move_adam`; parameters that are not fp32 take it."""
    here, rest = _apart(params, _single)
    if rest:
        law = {"rate": rate, "correction": correction, "eps": eps, "keep": keep}
        reference_feedback.move_adam(*([t[i] for i in rest] for t in (params, m, v)), **law)  # type: ignore[arg-type]
    chosen, more = [params[i] for i in here], ([m[i] for i in here], [v[i] for i in here])
    _launch(_move, chosen, [0] * len(here), more, (-rate, correction, eps, keep), {})


def take(flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], *, factor: Tensor | None, screen: bool) -> None:
    """See `reference_many.take`."""
    for kind, name in KINDS.items():
        here, _ = _apart(grads, lambda g, kind=kind: g.dtype == kind)  # type: ignore[misc]
        chosen = [grads[i] for i in here], [offsets[i] for i in here]
        constants = {"KIND": name, "SCALED": factor is not None, "SCREENED": screen}
        _launch(_take, *chosen, (), (flat, flat if factor is None else factor), constants)
    _, rest = _apart(grads, lambda g: g.dtype in KINDS)
    reference_many.take(flat, [grads[i] for i in rest], [offsets[i] for i in rest], factor=factor, screen=screen)
