"""Has the caller changed gradients or parameters that messages were made of?

Version counters miss `.data`, numpy, C++ and torch's multi-tensor functions on FSDP's shards. So the contents are compared
too, by an exact sum over their bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from birder.comm import Communicator, Requests, Union
from birder.comm.late import Late
from birder.optim.layout import Unit, local

FIRST, ONE_OF = 8, 16
SAMPLE = 64
"""Elements of a gradient that are compared where not all of them are."""


def mixed(times: int) -> int:
    """A number below 2^32 that follows no period of a script's."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's last step
        times = (times ^ times >> shift) * factor % 2**32
    return times ^ times >> 16


def looked_at(times: int) -> bool:
    """Whether to do, this time, what costs too much to be done always: in the first steps, later in about one of ONE_OF."""
    return times <= FIRST or mixed(times) % ONE_OF == 0


class Counted:
    """How many numbers of each parameter are in some case, counted on the device now and then, for a warning."""

    def __init__(self) -> None:
        self.warned = False
        self._late: dict[int, Late] = {}

    def note(self, unit: Unit, there: Tensor) -> None:
        """there: bool[padded]."""
        self._late[unit.index] = Late(torch.stack([part.sum() for part in unit.views(there)]))

    def warn(self, method: Any, what: str) -> None:
        """Warns once of a parameter that has some, how many, and `what` of them. Does not wait."""
        for unit in method.units:
            if self.warned or (late := self._late.get(unit.index)) is None or not late.there:
                continue
            del self._late[unit.index]
            count, p = max(zip(late.read(), unit.wholes, strict=True), key=lambda found: found[0])
            if count:
                self.warned = True
                said = f"{method.kind}: {count} numbers of {method.named(p)} {what}"
                warnings.warn(said, RuntimeWarning, stacklevel=3)

    def clear(self) -> None:
        """Forgets what was counted, not `warned`."""
        self._late.clear()


class GradientWatch:
    """Of one optimizer. `note` when backward is over, `changed` at the beginning of `step`.

    On CPU the bits of every gradient are summed when they are `looked_at`, else a sample is compared, in each step another
    one: what a script changes in every step or every other one is found before long. On a GPU the norm and the largest
    element of each are compared when they are `looked_at`, else the norm; after the first steps the answer comes a step late,
    or later where the host is ahead, and the host waits for nothing.
    """

    def __init__(self) -> None:
        self._grads: list[tuple[Tensor, int, int, int]] = []
        """Each parameter; its gradient's id (0: it had none), place in memory and version. Empty: `note` was not called."""
        self._marks: list[Tensor] = []
        self._times = 0
        self._late: list[Late] = []
        """Of steps on a GPU, whether a gradient was changed: on its way to the host."""

    def note(self, params: Iterable[Tensor]) -> None:
        """Remembers the present gradients of `params`. A parameter may have none."""
        self._times += not self._grads  # again in the same pass: counts once
        found = [(p, p.grad) for p in params]
        self._grads = [(p, 0, 0, 0) if g is None else (p, id(g), _place(g), g._version) for p, g in found]
        self._marks = self._mark([g for _, g in found if g is not None])

    def forget(self) -> None:
        """Drops what `note` remembered."""
        self._grads, self._marks = [], []

    def changed(self) -> bool:
        """Whether a gradient is another one than when `note` was called. Forgets that call. False where there was none."""
        found = False
        while not found and self._late and self._late[0].there:
            found = bool(self._late.pop(0).read()[0])
        if self._grads and not found:
            grads = self._untouched()
            found = grads is None or self._differs(grads)
        self.forget()
        return found

    def _untouched(self) -> list[Tensor] | None:
        """The present gradients. None: one is gone, new, or the same tensor with another version. Of another tensor the
        contents decide: DDP that rebuilds its buckets in a forward pass makes other views. The object and its place are
        compared: one of the two alone may be another tensor's by now."""
        grads = []
        for p, which, place, version in self._grads:
            g = p.grad
            if g is None:
                if which:
                    return None
                continue
            if not which or (g._version != version and id(g) == which and _place(g) == place):
                return None
            grads.append(g)
        return grads

    def _differs(self, grads: list[Tensor]) -> bool:
        now = self._mark(grads)
        if [m.shape for m in now] != [m.shape for m in self._marks]:
            return True
        for before, after in zip(self._marks, now, strict=True):
            if before.is_cuda and self._times > FIRST:
                self._late.append(Late((before != after).any()))
            elif not torch.equal(before, after):
                return True
        return False

    @torch.no_grad()
    def _mark(self, grads: list[Tensor]) -> list[Tensor]:
        """What tells these gradients from others: a tensor for each kind of device."""
        mine = [g for g in map(local, grads) if g.numel()]
        host = [g for g in mine if not g.is_cuda]
        device = [g for g in mine if g.is_cuda]
        marks, whole, start = [], looked_at(self._times), mixed(self._times)
        if host and whole:
            marks.append(bit_sums(host))
        elif host:
            marks.append(torch.cat([_sample(g, start) for g in host]).view(torch.int32))
        if device:
            largest = torch._foreach_max(device) if whole else ()
            marks.append(torch.stack([*torch._foreach_norm(device), *largest]).view(torch.int32))
        return marks


def _place(g: Tensor) -> int:
    mine = local(g)
    return mine.data_ptr() if mine.layout is torch.strided else 0


def marks(params: Iterable[Tensor], bits: bool) -> list[int]:
    """What tells the values of these parameters from others: versions; with `bits`, on the CPU, sums over their bits too."""
    several = [p.detach() for p in params]
    host = [p for p in several if bits and not p.is_cuda]
    return [p._version for p in several] + (bit_sums(host).tolist() if host else [])


class ParameterWatch:
    """Has the caller changed parameters since the optimizer wrote or read them? Clipped, loaded, masked.

    For methods with local steps: what the caller does to the parameters meanwhile is not part of what they send. Each look is
    one pass over the parameters. On a GPU the host waits for what was found only in a synchronisation.
    """

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}
        """By unit: the last known sum of its parameters' bits."""
        self._found: Tensor | None = None
        """Whether they have been changed in this interval, and after a message was made of them: bool[2]. None: neither."""
        self._told = False

    def note(self, unit: Unit, flat: Tensor | None = None) -> None:
        """The optimizer has changed them, or read them, `flat`: fp32[padded]. They should not change."""
        self._known[unit.index] = _unit_sum(unit, flat)

    def follow(self, unit: Unit) -> None:
        """The same where they are being watched."""
        if unit.index in self._known:
            self.note(unit)

    def forget(self, unit: Unit) -> None:
        """A synchronisation is over."""
        self._known.pop(unit.index, None)

    def look(self, unit: Unit, flat: Tensor | None = None, late: bool = False) -> None:
        """Finds out whether the caller has changed them since `note` or `look`.

        flat: what was read of them just now. late: a message was made of them before.
        """
        if unit.index not in self._known:
            return
        known = self._known[unit.index]
        self.note(unit, flat)
        found = torch.zeros(2, dtype=torch.bool, device=unit.device)
        found[int(late)] = known != self._known[unit.index]
        self._found = found if self._found is None else self._found | found

    def look_all(self, units: list[Unit]) -> tuple[bool, bool]:
        """Whether any unit is being watched, and `changed`, before units are laid out again."""
        for unit in units:
            self.look(unit)
        return bool(self._known), self.changed

    @property
    def changed(self) -> bool:
        """Whether they have been changed in this interval. On a GPU the host waits for it."""
        return self._found is not None and bool(self._found[0])

    def restore(self, units: list[Unit], changed: bool, watched: bool = False) -> None:
        """A state has been loaded, at whose saving `changed` was this. Its parameters may come before it or after it.

        watched: they are there, and only the units are new.
        """
        self._known = {unit.index: _unit_sum(unit, None) for unit in units if watched}
        self._found = torch.tensor([True, False], device=units[0].device) if units and changed else None

    def anywhere(self, comm: Communicator, units: list[Unit], meets: bool, late: bool = False) -> Requests[bool]:
        """`look`s at all units. Where ranks meet: whether parameters have been changed in this interval on any rank.

        Raises RuntimeError on all ranks when one's have been changed after its message was made of them.
        """
        for unit in units:
            self.look(unit, late=late)
        if not meets:
            return False
        found = torch.zeros(2, dtype=torch.bool, device=units[0].device) if self._found is None else self._found
        changed, late = (yield Union(found)).tolist()
        if late:
            raise RuntimeError(
                "parameters were changed between backward and step(), but messages had been made of them: change them "
                "before backward or after step(), or use attach(..., overlap=False)"
            )
        self._found = None  # the synchronisation sees to it
        if changed and not self._told and comm.rank == 0:
            self._told = True
            warnings.warn(
                "parameters were changed between two synchronisations (clipped, loaded?): such a synchronisation averages "
                "the models themselves, whole and in fp32",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(changed)


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """`bit_sum` of each: int64[tensors]."""
    return torch.stack([bit_sum(_memory(t.detach())) for t in tensors])


def _unit_sum(unit: Unit, flat: Tensor | None) -> Tensor:
    """`bit_sum` of the unit's parameters, in logical order. flat: what was read of them, fp32[padded], in their place."""
    if unit.device.type == "cpu":  # one by one, nothing is copied
        values = [p.detach() for p in unit.params] if flat is None else unit.views(flat)
        return torch.stack([bit_sum(v.reshape(-1).contiguous()) for v in values]).sum()
    if flat is None:
        flat = unit.zeros()
        torch._foreach_copy_(unit.views(flat), [p.detach() for p in unit.params])
    return bit_sum(flat)


def _memory(g: Tensor) -> Tensor:
    """The elements of a gradient in one dimension, in the order of memory: no copy, unless they have gaps."""
    if g.is_contiguous():
        return g.view(-1)
    order = sorted(range(g.dim()), key=g.stride, reverse=True)
    return g.permute(order).reshape(-1).contiguous()  # elements with even gaps would be a view of stride 2


def bit_sum(flat: Tensor) -> Tensor:
    """The sum over the bits of all elements, 64 or 32 at a time: int64[]. A change of any one of them changes it."""
    flat = flat.float()
    even = flat.numel() // 2 * 2
    pairs, rest = flat[:even], flat[even:].view(torch.int32)
    if not even:  # of one element any stride counts as contiguous, but not to be viewed as another type
        return rest.sum()
    if pairs.storage_offset() % 2:
        pairs = pairs.clone()
    return pairs.view(torch.int64).sum() + rest.sum()


def _sample(g: Tensor, start: int) -> Tensor:
    """Some elements, evenly spread, from another one on with another `start`: fp32[at most SAMPLE]."""
    flat = _memory(g)
    step = max(1, flat.numel() // SAMPLE)
    first = start % step
    count = min(SAMPLE, -(-(flat.numel() - first) // step))
    return flat.as_strided((count,), (step,), flat.storage_offset() + first).float()
