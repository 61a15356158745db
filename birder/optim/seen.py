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
from torch.nn import functional as F

from birder import kernels
from birder.comm import Communicator, Requests, Union
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
        super().__init__(*args, **kwargs)

    def init_seen(self, unit: Unit) -> None:
        """The map is there until every coordinate has been seen. Padding is never seen."""
        self._few.pop(unit.index, None)
        unit.state["active"] = unit.zeros(dtype=torch.bool)

    def after_units(self, step: int) -> Requests[None]:
        units = [unit for unit in self.units if "active" in unit.state]
        if units:
            yield from unite_seen(self.comm, units, self.seen_by, self._few, sum(unit.padded for unit in self.units))

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


def unite_seen(
    comm: Communicator, units: list[Unit], by: str = "b", few: dict[int, Few] | None = None, elements: int = 0
) -> Requests[None]:
    """Unites the ranks' knowledge about `units`, those with a map. Drops the map of a unit that is seen whole.

    by:  the state that says what has been seen.
    few: by the unit's index, where it has few unseen coordinates; kept by the caller between steps. elements: of all units.
    """
    few = {} if few is None else few
    _look_again([unit for unit in units if unit.index in few], few)
    units = [unit for unit in units if "active" in unit.state]
    many = [unit for unit in units if unit.index not in few]
    yield from _unite_few(comm, [unit for unit in units if unit.index in few], few, by)
    unseen = yield from _unite_many(comm, many, by)
    if many and sum(unseen) + sum(len(some.places) for some in few.values()) <= elements // SHARE:
        few.update({unit.index: Few(_unseen(unit)) for unit in many if "active" in unit.state})


def _unite_many(comm: Communicator, units: list[Unit], by: str) -> Requests[list[int]]:
    """Returns how many coordinates of each unit are unseen now."""
    if not units:
        return []
    blocks = [kernels.unseen_blocks(_everywhere(comm, unit, by), unit.state["active"], BLOCK) for unit in units]
    flags = yield Union(torch.cat(blocks))
    known = torch.stack([unit.state["active"].count_nonzero() for unit in units])
    answer = torch.cat([flags.to(torch.int64), known]).cpu()
    flags, counts = answer[: len(flags)], answer[len(flags) :].tolist()
    if flags.any():
        news = []
        for i, changed in enumerate(flags.split([part.numel() for part in blocks])):
            if changed.any():
                yield from _unite(comm, units[i], changed.nonzero().view(-1), by)
                news.append(i)
        recounted = torch.stack([units[i].state["active"].count_nonzero() for i in news]).cpu().tolist()
        for i, count in zip(news, recounted, strict=True):
            counts[i] = count
    unseen = [_elements(unit) - count for unit, count in zip(units, counts, strict=True)]
    for unit, left in zip(units, unseen, strict=True):
        if left == 0:
            del unit.state["active"]
    return unseen


def _elements(unit: Unit) -> int:
    return sum(p.numel() for p in unit.params)  # padding is never seen


def there(unit: Unit) -> Tensor:
    """Where there are coordinates, and not padding: bool[padded]."""
    there = unit.zeros(dtype=torch.bool)
    for view in unit.views(there):
        view.fill_(True)
    return there


def _unseen(unit: Unit) -> Tensor:
    """The places of coordinates that have not been seen. The host waits for their number."""
    return (there(unit) & ~unit.state["active"]).nonzero().view(-1)


def _look_again(units: list[Unit], few: dict[int, Few]) -> None:
    """What the host learns of the step before: the same on all ranks, whenever it asks."""
    for unit in units:
        some = few[unit.index]
        seen = some.seen.read()[0] if some.seen is not None else 0
        if seen == len(some.places):
            del unit.state["active"], few[unit.index]
        elif 2 * seen > len(some.places):
            few[unit.index] = Few(_unseen(unit))


def _unite_few(comm: Communicator, units: list[Unit], few: dict[int, Few], by: str) -> Requests[None]:
    if not units:
        return
    places = [few[unit.index].places for unit in units]
    had = [_had_gradient(comm, unit, at, by) for unit, at in zip(units, places, strict=True)]
    united = (yield Union(torch.cat(had))).split([len(at) for at in places])
    for unit, at, new in zip(units, places, united, strict=True):
        seen = unit.state["active"].index_select(0, at) | new
        unit.state["active"].index_copy_(0, at, seen)
        few[unit.index].seen = Late(seen.sum())


def _had_gradient(comm: Communicator, unit: Unit, places: Tensor, by: str) -> Tensor:
    """Whether the state `by` is above 0 there: bool[k]. False where another rank keeps it."""
    b = unit.state[by]
    if b.numel() == unit.padded:
        return b.index_select(0, places).abs() > 0
    own = places - comm.shard * b.numel()
    inside = (own >= 0) & (own < b.numel())
    return (b.index_select(0, own.clamp(0, b.numel() - 1)).abs() > 0) & inside


def _unite(comm: Communicator, unit: Unit, blocks: Tensor, by: str) -> Requests[None]:
    """Unites which coordinates have been seen, in the unit's `blocks` where any rank has news: int64[k], ascending."""
    b, active = _everywhere(comm, unit, by), unit.state["active"]
    for some in blocks.split(PART):
        known = _rows(active, some)
        united = yield Union(((_rows(b, some).abs() > 0) & ~known).flatten())
        known |= united.view(-1, BLOCK)
        inner, end = _inner(active, some), len(active) // BLOCK * BLOCK
        active[:end].view(-1, BLOCK).index_copy_(0, inner, known[: len(inner)])
        if len(inner) < len(some):
            active[end:] = known[-1, : len(active) - end]


def _rows(values: Tensor, blocks: Tensor) -> Tensor:
    """These blocks of `values`: [k, BLOCK]. Behind the end of `values` the last one is 0."""
    inner, end = _inner(values, blocks), len(values) // BLOCK * BLOCK
    rows = values[:end].view(-1, BLOCK).index_select(0, inner)
    if len(inner) == len(blocks):
        return rows
    return torch.cat([rows, F.pad(values[end:], (0, BLOCK - len(values) + end)).view(1, -1)])


def _inner(values: Tensor, blocks: Tensor) -> Tensor:
    """Those of `blocks`, which are on the host, that `values` has whole; on its device."""
    short = len(blocks) > 0 and int(blocks[-1]) == len(values) // BLOCK
    return sent(blocks[: len(blocks) - short], values.device)


def _everywhere(comm: Communicator, unit: Unit, by: str) -> Tensor:
    """That state of the whole unit, 0 where another rank keeps it: fp32[padded]."""
    b = unit.state[by]
    if b.numel() == unit.padded:
        return b
    whole, begin = unit.zeros(), comm.shard * b.numel()
    whole[begin : begin + b.numel()] = b
    return whole
