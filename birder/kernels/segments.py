"""Where tensors of a flat buffer stand in memory: the table by which one launch works on all of them.

A tensor's place in a flat buffer is that of its elements in logical order. In memory they may stand in another order: with
[O, I, K] the logical shape, channels-last memory is [O, K, I], and so is that of a transposed matrix (O = 1). A kernel goes
through memory in order; element k there is logical element

    (o I + i) K + j        with  o = k // (K I),  j = k // I mod K,  i = k mod I.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 2048
"""Elements of a tensor that one program works on."""
COLUMNS = 5
"""Of the table, before the addresses: first element in memory, elements from there on, place in the flat buffer, I, K."""
KEPT = 256
"""Tables kept at a time. A step needs a few for each unit."""

Order = tuple[int, int]
"""(I, K) of the module's docstring."""
IN_ORDER: Order = (1, 1)
"""Of memory in logical order."""

_tables: OrderedDict[tuple, tuple[Tensor, bool]] = OrderedDict()


def order(t: Tensor) -> Order | None:
    """The order of its memory; None where that is another one than those of the module's docstring."""
    if t.is_contiguous():
        return IN_ORDER
    if t.numel() >= 2**31:  # places within a tensor are 32-bit numbers there
        return None
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    if form is not None and t.is_contiguous(memory_format=form):
        return t.shape[1], t.shape[2:].numel()
    if t.dim() == 2 and t.t().is_contiguous():
        return t.shape[0], t.shape[1]
    return None


def table(
    tensors: Sequence[Tensor], forms: Sequence[tuple[int, int, int, int]], *more: Sequence[Tensor]
) -> tuple[Tensor, bool]:
    """int64[chunks, COLUMNS + 1 + len(more)] on the tensors' device, and whether all addresses are multiples of 16 bytes.

    tensors: those whose `order` is not None, of one device, and all in logical order or none.
    forms:   of each: elements, where it begins in the flat buffer, and its `order`.
    more:    for each tensor others, whose elements stand in memory as logical.

    Made once for each set of addresses; copied from pinned memory, so that nothing waits for it.
    """
    addresses = [tuple(t.data_ptr() for t in row) for row in zip(tensors, *more, strict=True)]
    device = tensors[0].device
    # Made and used on one stream: no other may read it before it is there, or write where it stood.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, *addresses, *forms)
    if (found := _tables.get(key)) is not None:
        _tables.move_to_end(key)
        return found
    rows = [
        (first, min(CHUNK, numel - first), offset, inner, middle, *address)
        for (numel, offset, inner, middle), address in zip(forms, addresses, strict=True)
        for first in range(0, numel, CHUNK)
    ]
    host = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, COLUMNS + 1 + len(more))
    if device.type == "cuda":
        host = host.pin_memory().to(device, non_blocking=True)
    made = host, all(a % 16 == 0 for row in addresses for a in row)
    _tables[key] = made
    if len(_tables) > KEPT:
        _tables.popitem(last=False)
    return made
