"""`GradientWatch`: notices that gradients were changed between the end of backward and `step`, however that was done.

Methods that take their messages during backward have sent them by then, so a change would have no effect.

Version counters notice ordinary in-place changes. They miss `p.grad.data`, numpy, C++ and torch's multi-tensor functions on
FSDP's shards. So the contents are compared as well. On CPU: by an exact sum over the bits of every gradient in the first
steps, and then in every WHOLE_EVERY-th; by a sample of its elements in all others. On a GPU: by the norm and the largest
element of every gradient; the host waits for the answer in the first steps alone, later it comes one step late.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from birder.late import Late
from birder.optimizers.layout import gradient

WHOLE_FIRST, WHOLE_EVERY = 8, 16
SAMPLE = 64
"""Elements of a gradient that are compared where not all of them are."""


class GradientWatch:
    """Of one optimizer. `note` when backward is over, `changed` at the beginning of `step`."""

    def __init__(self) -> None:
        self.noted = False
        """Whether `note` was called and `changed` was not."""
        self._versions: dict[Tensor, int | None] = {}
        self._marks: list[Tensor] = []
        self._times = 0
        self._doubt: Late | None = None

    def note(self, params: Iterable[Tensor]) -> None:
        """Remembers the gradients of `params` as they are now. A parameter may have none."""
        self.noted = True
        self._times += 1
        self._versions = {p: None if p.grad is None else p.grad._version for p in params}
        self._marks = self._mark()

    def forget(self) -> None:
        """Drops what `note` remembered."""
        self.noted, self._versions, self._marks = False, {}, []

    def changed(self) -> bool:
        """Whether a gradient is another one than when `note` was called. Forgets that call. False where there was none."""
        doubt, self._doubt = self._doubt, None
        found = doubt is not None and bool(doubt.read()[0])
        if self.noted:
            found = found or any(
                version != (None if p.grad is None else p.grad._version) for p, version in self._versions.items()
            )
            found = found or self._differs()
        self.forget()
        return found

    @property
    def _whole(self) -> bool:
        return self._times <= WHOLE_FIRST or self._times % WHOLE_EVERY == 0

    def _differs(self) -> bool:
        now = self._mark()
        if len(now) != len(self._marks):
            return True
        for before, after in zip(self._marks, now, strict=True):
            if before.shape != after.shape:
                return True
            if before.is_cuda and self._times > WHOLE_FIRST:
                self._doubt = Late((before != after).any().view(1))
            elif not torch.equal(before, after):
                return True
        return False

    def _mark(self) -> list[Tensor]:
        """What tells these gradients from others: a tensor for each kind of device."""
        grads = [g for p in self._versions if (g := gradient(p)) is not None and g.numel()]
        host = [g.detach() for g in grads if not g.is_cuda]
        device = [g.detach() for g in grads if g.is_cuda]
        marks = []
        if host:
            marks.append(torch.cat([_bits(g) if self._whole else _sample(g) for g in host]))
        if device:
            marks.append(torch.stack([*torch._foreach_norm(device), *torch._foreach_max(device)]).view(torch.int32))
        return marks


Marks = tuple[list[int], Tensor | None]


def marks(params: Iterable[Tensor], bits: bool) -> Marks:
    """What tells the values of these parameters from others: versions; with `bits`, on the CPU, sums over their bits too."""
    several = [p.detach() for p in params]
    host = [_bits(p) for p in several if bits and not p.is_cuda and p.numel()]
    return [p._version for p in several], torch.cat(host) if host else None


def differ(a: Marks, b: Marks) -> bool:
    """Whether these are the marks of other values."""
    return a[0] != b[0] or (a[1] is not None and b[1] is not None and not torch.equal(a[1], b[1]))


def _memory(g: Tensor) -> Tensor:
    """The elements of a gradient in one dimension, in the order of memory: no copy, unless they have gaps."""
    order = sorted(range(g.dim()), key=g.stride, reverse=True)
    return g.permute(order).reshape(-1).contiguous()  # elements with even gaps would be a view of stride 2


def _bits(g: Tensor) -> Tensor:
    """The sum over the bits of all elements, modulo 2^64: int64[1]. Two elements of four bytes are added at a time."""
    flat = _memory(g)
    if flat.element_size() != 4:
        flat = flat.float()
    begin = flat.storage_offset() % 2
    end = begin + (flat.numel() - begin) // 2 * 2
    total = flat[begin:end].view(torch.int64).sum()
    for rest in (flat[:begin], flat[end:]):
        if rest.numel():
            total = total + rest.view(torch.int32).sum()
    return total.view(1)


def _sample(g: Tensor) -> Tensor:
    """The bits of some elements, evenly spread: int64[at most SAMPLE]."""
    flat = _memory(g)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].float().view(torch.int32).to(torch.int64)
