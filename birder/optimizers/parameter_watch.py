"""`ParameterWatch`: has the caller changed parameters since the optimizer wrote or read them? Clipped, loaded, masked.

Methods whose ranks train on their own for some steps keep the model of the last synchronisation. What the caller does to the
parameters meanwhile is not part of what they send. So they look at the parameters' bits, whatever way these were changed
(in place, through `.data`, numpy or C++: version counters see only the first).

Each look is one pass over the parameters. On a GPU the host waits for what was found in a synchronisation alone.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from birder.comm import Communicator, Requests, Union
from birder.optimizers.layout import Unit


class ParameterWatch:
    """By unit: the sum of its parameters' bits as they were last known, and whether the caller has changed them."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}
        self._changed: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}
        self._told = False

    def note(self, unit: Unit, flat: Tensor | None = None) -> None:
        """The optimizer has changed them, or read them, `flat`: fp32[padded]. They should stay as they are."""
        self._known[unit.index] = bit_sum(unit, flat)

    def follow(self, unit: Unit) -> None:
        """The same where they are being watched."""
        if unit.index in self._known:
            self.note(unit)

    def forget(self, unit: Unit) -> None:
        """A synchronisation is over, and has seen to what was found."""
        for found in (self._known, self._changed, self._late):
            found.pop(unit.index, None)

    def look(self, unit: Unit, flat: Tensor | None = None, late: bool = False) -> None:
        """Finds out whether the caller has changed them since `note` or `look`.

        flat: what was read of them just now. late: a message was made of them before.
        """
        if unit.index not in self._known:
            return
        known, found = self._known[unit.index], self._late if late else self._changed
        self.note(unit, flat)
        differs = (known != self._known[unit.index]).view(1)
        found[unit.index] = found[unit.index] | differs if unit.index in found else differs

    @property
    def changed(self) -> bool:
        """Whether they have been changed in this interval. On a GPU the host waits for it."""
        return any(bool(flag) for flag in self._changed.values())

    def restore(self, units: list[Unit], changed: bool) -> None:
        """A state has been loaded, at whose saving `changed` was this. Its parameters may come before it or after it."""
        self._known, self._late = {}, {}
        self._changed = {u.index: torch.ones(1, dtype=torch.bool, device=u.device) for u in units if changed}

    def anywhere(self, comm: Communicator, units: list[Unit]) -> Requests[bool]:
        """Whether parameters have been changed in this interval on any rank. Every rank calls it, in a synchronisation.

        Raises RuntimeError on all ranks when one's have been changed after its message was made of them.
        """
        device = units[0].device
        none = torch.zeros(1, dtype=torch.bool, device=device)
        found = [
            torch.cat([none, *(flag.to(device) for flag in flags.values())]).any().view(1)
            for flags in (self._changed, self._late)
        ]
        changed, late = (yield Union(torch.cat(found))).tolist()
        if late:
            raise RuntimeError(
                "parameters were changed between backward and step(), but messages had been made of them: change them "
                "before backward or after step(), or use attach(..., overlap=False)"
            )
        if changed and not self._told and comm.rank == 0:
            self._told = True
            warnings.warn(
                "parameters were changed between two synchronisations (clipped, loaded?): such a synchronisation averages "
                "the models themselves, whole and in fp32",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(changed)


def bit_sum(unit: Unit, flat: Tensor | None = None) -> Tensor:
    """The sum of the parameters' bits, 64 or 32 at a time: int64[]. A change of any one value changes it.

    flat: what was read of them, fp32[padded], in their place.
    """
    if unit.device.type == "cpu":  # one by one, nothing is copied
        values = [p.detach() for p in unit.params] if flat is None else unit.views(flat)
        return torch.stack([part for v in values for part in _parts(v.reshape(-1).contiguous())]).sum()
    if flat is None:
        flat = unit.zeros()
        torch._foreach_copy_(unit.views(flat), [p.detach() for p in unit.params])
    return flat.view(torch.int64).sum()


def _parts(values: Tensor) -> list[Tensor]:
    even = values.numel() // 2 * 2
    pairs, rest = values[:even], values[even:].view(torch.int32)
    if pairs.storage_offset() % 2:
        pairs = pairs.clone()
    return [pairs.view(torch.int64).sum(), rest.sum()]
