"""Where tensors of a flat buffer stand in memory: the table by which one launch works on all of them.

A tensor's place in a flat buffer is that of its elements in logical order. In memory they may stand in another order: with
[O, I, K] the logical shape, channels-last memory is [O, K, I], and so is that of a transposed matrix (O = 1). A kernel goes
through memory in order; element k there is logical element

    (o I + i) K + j        with  o = k // (K I),  j = k // I mod K,  i = k mod I.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 2048
"""Elements of a tensor that one program works on."""
COLUMNS = 5
"""Of the table, before the addresses: first element in memory, elements from there on, place in the flat buffer, I, K."""
ROOM, MOST = 256, 8192
"""Of what `launches` has made, so much is kept at a time: at first, and at most. A step needs a few for each unit."""

Order = tuple[int, int]
"""(I, K) of the module's docstring."""
IN_ORDER: Order = (1, 1)
"""Of memory in logical order."""


class SegmentCache:
    """What was made last. For each that is asked for again after it was dropped, there is room for one more from then on.

    Each step asks for the same in the same order: with room for less, nothing of it would ever be found.
    """

    def __init__(self) -> None:
        self.room = ROOM
        self._made: OrderedDict[tuple, Any] = OrderedDict()
        self._dropped: OrderedDict[int, None] = OrderedDict()
        """The hashes of what was dropped, at most MOST of them."""

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: tuple) -> Any:
        if key in self._made:
            self._made.move_to_end(key)
        return self._made.get(key)

    def put(self, key: tuple, value: Any) -> None:
        if hash(key) in self._dropped:
            del self._dropped[hash(key)]
            self.room = min(self.room + 1, MOST)
        self._made[key] = value
        if len(self._made) > self.room:
            gone, _ = self._made.popitem(last=False)
            self._dropped[hash(gone)] = None
        if len(self._dropped) > MOST:
            self._dropped.popitem(last=False)


_made = SegmentCache()


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


Launch = tuple[torch.dtype, bool, bool, Tensor]
"""What one launch takes: the tensors' type, whether their memory is in logical order, whether all addresses are multiples
of 16 bytes, and its table, int64[chunks, COLUMNS + addresses] on their device."""


def launches(
    tensors: Sequence[Tensor], offsets: Sequence[int], kinds: tuple[torch.dtype, ...], *more: Sequence[Tensor]
) -> tuple[list[Launch], list[int]]:
    """What a kernel works on, and the numbers of the tensors that it cannot take, by their type or their order of memory.

    tensors: of one device. offsets: where each begins in the flat buffer. kinds: the types that the kernel takes.
    more:    for each tensor others, whose elements stand in memory as logical.

    Made once for all that it depends on: a step has hundreds of tensors, and the host has less than a GPU's step for them.
    """
    device = tensors[0].device
    # Made and used on one stream: no other may read a table before it is there, or write where it stood.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    places = tuple(tuple(map(Tensor.data_ptr, each)) for each in (tensors, *more))
    forms = tuple(map(Tensor.size, tensors)), tuple(map(Tensor.stride, tensors)), tuple([t.dtype for t in tensors])
    key = (device, stream, places, forms, tuple(offsets), kinds)
    if (found := _made.get(key)) is not None:
        return found  # type: ignore[no-any-return]
    together, rest = by_order(tensors, kinds)
    made: list[Launch] = []
    for (dtype, ordered), members in together.items():
        addresses = [[each[i] for each in places] for i, _ in members]
        rows = [
            (first, min(CHUNK, tensors[i].numel() - first), offsets[i], *form, *address)
            for (i, form), address in zip(members, addresses, strict=True)
            for first in range(0, tensors[i].numel(), CHUNK)
        ]
        aligned = all(a % 16 == 0 for address in addresses for a in address)
        host = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if device.type == "cuda":  # from pinned memory, so that nothing waits for it
            host = host.pin_memory().to(device, non_blocking=True)
        made.append((dtype, ordered, aligned, host))
    _made.put(key, (made, rest))
    return made, rest


def by_order(
    tensors: Sequence[Tensor], kinds: tuple[torch.dtype, ...]
) -> tuple[dict[tuple[torch.dtype, bool], list[tuple[int, Order]]], list[int]]:
    """By type, and by whether they are in logical order: numbers of tensors with elements, and the order of each; and those
    that are of another type or order."""
    together: dict[tuple[torch.dtype, bool], list[tuple[int, Order]]] = {}
    rest: list[int] = []
    for i, t in enumerate(tensors):
        here = order(t) if t.dtype in kinds else None
        if here is None:
            rest.append(i)
        elif t.numel():
            together.setdefault((t.dtype, here == IN_ORDER), []).append((i, here))
    return together, rest
