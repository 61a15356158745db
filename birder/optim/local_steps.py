"""Methods that train on each rank alone for some steps, and then meet at a common point z.

A step t with t mod `sync_every` = 0 is a synchronisation, all others are local. What the caller does to parameters between
two of them (clips, loads) is not part of a message: where any rank's have been changed in an interval (`ParameterWatch`), all
of the models are averaged instead, so that it is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from birder.comm import Requests
from birder.optim.base import BucketOptimizer, Plan, Unit


class LocalSteps(BucketOptimizer):
    """Base of these methods. z is `unit.state["common"]`, fp32[padded], the same on all ranks."""

    sync_every: int

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED if step % self.sync_every == 0 else Plan.SKIP

    @property
    def always_meets(self) -> bool:
        """Whether ranks have just met too: z is x then, and is not kept."""
        return self.sync_every == 1 and not self._apart

    def restores(self, name: str, step: int) -> bool:
        return name != "common"  # it repeats the parameters

    def joins(self, p: Tensor, kept: dict[str, Tensor], passed: int) -> dict[str, Tensor]:
        return kept | {"common": p.detach()}  # within an interval z is not taken from the parameters again

    def drift(self, unit: Unit, moved: Tensor, step: int) -> Tensor | None:
        """z - (x - moved) in a synchronisation, in a new buffer; None in a local step. moved: what the step takes from x."""
        z = unit.state["common"]
        begins = not self._apart
        if begins:  # every model is at the common point now
            z.copy_(self.flat_parameters(unit))
            if self.sync_every > 1:
                self.watch.note(unit, z)
        if self.plan(step) is Plan.SKIP:
            unit.result = moved
            return None
        x = z.clone() if begins else self.flat_parameters(unit)  # read once: the caller may change it meanwhile
        self.watch.look(unit, x)
        return torch.sub(z, x.sub_(moved), out=x)

    def meet(self, unit: Unit, whole: bool) -> Requests[Any]:
        """Moves z; ends with what z gains, where ranks meet in every step. whole: all of the models are averaged."""
        raise NotImplementedError

    def update(self, step: int, plan: Plan) -> Requests[None]:
        syncs = plan is not Plan.SKIP
        asks = syncs and not self.always_meets
        whole = yield from self.watch.anywhere(self.comm, self.units, asks, late=syncs)
        for unit in self.units:
            if not syncs:
                torch._foreach_sub_(unit.params, unit.views(unit.result))
                self.watch.note(unit)
                continue
            gained = yield from self.meet(unit, whole)
            if not self.always_meets:
                torch._foreach_copy_(unit.params, unit.state_views("common"))
                self.watch.forget(unit)
            else:  # x is z, and may have been changed since it was read
                torch._foreach_add_(unit.params, unit.views(gained))
            unit.result = None
