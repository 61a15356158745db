"""Which coordinates have ever had a gradient on any rank: `unit.state["active"]`, bool[padded], until all of them have.

A coordinate has been seen on a rank when the mean of g, |g| or g^2 that the method keeps (`seen_by`) is not 0 there. There
are two ways to unite what ranks know:

many unseen: a flag for every BLOCK coordinates in each step, and where a flag is up also a bit for each coordinate. The host
             waits for the device once a step, for the flags, and in a step with news a second time: how many bits are sent
             depends on what the flags say, and the update on those bits.
few unseen:  a bit for each coordinate that had not been seen when the host last looked, in each step. Their number is known,
             so the host waits for nothing. It looks again, a step late, when half of them have been seen.

Rows of an embedding that no batch holds (padding, unused positions) stay unseen for ever: they end as the few. Either way a
coordinate is seen in the step of its first gradient. Units seen whole have no map, and take no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder import kernels
from birder.comm import Requests, Union
from birder.comm.late import Late, sent
from birder.optim.contract import Method
from birder.optim.layout import Unit

BLOCK = 1024
"""Elements for which one flag says whether any of them has just seen its first gradient."""
PART = 4096
"""Blocks whose coordinates are united at a time: the memory that this takes stays small compared with the model."""
SHARE = 64
"""Few is at most one in so many of all elements. Their bits are then as small a part of what is sent in one bit."""


@dataclass
class Few:
    """The coordinates of a unit that were unseen when the host last looked, the same on all ranks.

    places: int64[k], ascending. seen: how many of them have been seen since then, asked for in the last step.
    """

    places: Tensor
    seen: Late | None = None


class SeenMap(Method):
    """The part of a method that keeps the map: to be named before `BucketOptimizer` among its bases."""

    seen_by: ClassVar[str]
    """The state, fp32[padded] or this rank's shard, not 0 where a coordinate has had a gradient here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._few: dict[int, Few] = {}
        """By the unit's index, where it has few unseen coordinates."""
        super().__init__(*args, **kwargs)

    def init_seen(self, unit: Unit) -> None:
        """The map is there until every coordinate has been seen. Padding is never seen."""
        self._few.pop(unit.index, None)
        unit.state["active"] = unit.zeros(dtype=torch.bool)

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        """As `Method.load_unit`; a map that says nothing any more is left out."""
        self._few.pop(unit.index, None)
        active = tensors.get("active")
        if active is not None and int(active.sum()) != _elements(unit):
            unit.state.setdefault("active", unit.zeros(dtype=torch.bool))
        else:  # seen whole
            unit.state.pop("active", None)
            tensors = {name: tensor for name, tensor in tensors.items() if name != "active"}
        super().load_unit(unit, tensors)  # type: ignore[misc]

    def complete_state(self, unit: Unit) -> dict[str, Tensor]:
        """`unit.state`, with a map of all coordinates where it has been dropped."""
        return {"active": there(unit)} | unit.state

    def after_units(self, step: int) -> Requests[None]:
        """Unites the ranks' knowledge. Drops the map of a unit that is seen whole."""
        self._look_again()
        units = [unit for unit in self.units if "active" in unit.state]
        few = [unit for unit in units if unit.index in self._few]
        many = [unit for unit in units if unit.index not in self._few]
        if few:
            seen = yield from self._unite(few, [self._few[unit.index].places for unit in few])
            for unit, now in zip(few, seen, strict=True):
                self._few[unit.index].seen = Late(now.sum())
        if many:
            unseen = yield from self._unite_many(many)
            unseen += sum(len(some.places) for some in self._few.values())
            if unseen <= sum(unit.padded for unit in self.units) // SHARE:
                self._few |= {unit.index: Few(_unseen(unit)) for unit in many if "active" in unit.state}

    def _look_again(self) -> None:
        """What the host learns of the step before: the same on all ranks, whenever it asks."""
        for unit in (unit for unit in self.units if unit.index in self._few):
            some = self._few[unit.index]
            seen = some.seen.read()[0] if some.seen is not None else 0
            if seen == len(some.places):
                del unit.state["active"], self._few[unit.index]
            elif 2 * seen > len(some.places):
                self._few[unit.index] = Few(_unseen(unit))

    def _unite_many(self, units: list[Unit]) -> Requests[int]:
        """Returns how many coordinates of these units are unseen now."""
        blocks = [kernels.unseen_blocks(self._everywhere(unit), unit.state["active"], BLOCK) for unit in units]
        flags = yield Union(torch.cat(blocks))
        flags, known = torch.cat([flags.to(torch.int64), _seen(units)]).cpu().split([len(flags), len(units)])
        if flags.any():
            for unit, changed in zip(units, flags.split([len(part) for part in blocks]), strict=True):
                news = changed.nonzero()
                for some in news.split(PART) if len(news) else ():
                    yield from self._unite([unit], [_places(unit, some)])
            known = _seen(units).cpu()
        unseen = [_elements(unit) - count for unit, count in zip(units, known.tolist(), strict=True)]
        for unit, left in zip(units, unseen, strict=True):
            if left == 0:
                del unit.state["active"]
        return sum(unseen)

    def _unite(self, units: list[Unit], places: list[Tensor]) -> Requests[list[Tensor]]:
        """Unites which coordinates have been seen, at `places` of each unit: int64[k]. Returns that, bool[k] each."""
        had = [self._had_gradient(unit, at) for unit, at in zip(units, places, strict=True)]
        united = (yield Union(torch.cat(had))).split([len(at) for at in places])
        found = []
        for unit, at, new in zip(units, places, united, strict=True):
            found.append(unit.state["active"].index_select(0, at) | new)
            unit.state["active"].index_copy_(0, at, found[-1])
        return found

    def _had_gradient(self, unit: Unit, places: Tensor) -> Tensor:
        """Whether the state `seen_by` is not 0 there: bool[k]. False where another rank keeps it."""
        b = unit.state[self.seen_by]
        if b.numel() == unit.padded:
            return b.index_select(0, places).abs() > 0
        own = places - self.comm.shard * b.numel()
        inside = (own >= 0) & (own < b.numel())
        return (b.index_select(0, own.clamp(0, b.numel() - 1)).abs() > 0) & inside

    def _everywhere(self, unit: Unit) -> Tensor:
        """The state `seen_by` of the whole unit, 0 where another rank keeps it: fp32[padded]."""
        b = unit.state[self.seen_by]
        if b.numel() == unit.padded:
            return b
        whole = unit.zeros()
        whole[self.comm.shard_of(unit.padded)] = b
        return whole


def there(unit: Unit) -> Tensor:
    """Where there are coordinates, and not padding: bool[padded]."""
    there = unit.zeros(dtype=torch.bool)
    for view in unit.views(there):
        view.fill_(True)
    return there


def _elements(unit: Unit) -> int:
    return sum(p.numel() for p in unit.params)  # padding is never seen


def _seen(units: list[Unit]) -> Tensor:
    """How many coordinates of each unit have been seen."""
    return torch.stack([unit.state["active"].count_nonzero() for unit in units])


def _unseen(unit: Unit) -> Tensor:
    """The places of coordinates that have not been seen. The host waits for their number."""
    return (there(unit) & ~unit.state["active"]).nonzero().view(-1)


def _places(unit: Unit, blocks: Tensor) -> Tensor:
    """The places of all elements of these blocks, which are on the host: int64[k, 1] -> int64[k BLOCK] on the device.

    The last block may be short: what would be behind its end stands for its last element.
    """
    inside = torch.arange(BLOCK, device=unit.device)
    return (sent(blocks, unit.device) * BLOCK + inside).view(-1).clamp_(max=unit.padded - 1)
