"""Which coordinates have ever had a gradient on any rank: `unit.state["active"]`, bool[padded], until all of them have.

A flag for every BLOCK coordinates is united over ranks in each step, and where a flag is up also a bit for each coordinate.
A coordinate has been seen on a rank when the mean of |g| or g^2 that the method keeps (`seen_by`) is above 0 there.

While there is a map, the host waits for the device once a step, for the flags, and in a step with news a second time:
how many bits are sent depends on what the flags say, and the update on those bits. Units seen whole wait for nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from birder import kernels
from birder.comm import Communicator
from birder.late import sent
from birder.optimizers.contract import Method
from birder.optimizers.layout import Unit

BLOCK = 1024
"""Elements for which one flag says whether any of them has just seen its first gradient."""
PART = 4096
"""Blocks whose coordinates are united at a time: what that takes for a moment stays small beside the model."""


class SeenMap(Method):
    """The part of a method that keeps the map: to be named before `BucketOptimizer` among its bases."""

    seen_by: ClassVar[str]
    """The state, fp32[padded] or this rank's shard, that is above 0 where a coordinate has had a gradient here."""

    def init_seen(self, unit: Unit) -> None:
        """The map is there until every coordinate has been seen. Padding is never seen."""
        unit.state["active"] = unit.zeros(dtype=torch.bool)

    def after_units(self, step: int) -> None:
        unite_seen(self.comm, [unit for unit in self.units if "active" in unit.state], self.seen_by)

    def load_unit(self, unit: Unit, tensors: dict[str, Tensor]) -> None:
        """As `MethodState.load_unit`; a map that says nothing any more is left out."""
        if "active" in tensors and int(tensors["active"].sum()) == sum(p.numel() for p in unit.params):
            tensors = {name: tensor for name, tensor in tensors.items() if name != "active"}  # seen whole
        if "active" in tensors:
            unit.state.setdefault("active", unit.zeros(dtype=torch.bool))
        else:
            unit.state.pop("active", None)
        super().load_unit(unit, tensors)  # type: ignore[misc]

    def complete_state(self, unit: Unit) -> dict[str, Tensor]:
        """`unit.state`, with a map of all coordinates where it has been dropped."""
        active = unit.zeros(dtype=torch.bool)
        for view in unit.views(active):
            view.fill_(True)
        return {"active": active} | unit.state


def unite_seen(comm: Communicator, units: list[Unit], by: str = "b") -> None:
    """Unites the ranks' knowledge about `units`, those with a map. Drops the map of a unit that is seen whole.

    by: the state that says what has been seen.
    """
    if not units:
        return
    blocks = [kernels.unseen_blocks(_everywhere(comm, unit, by), unit.state["active"], BLOCK) for unit in units]
    flags = comm.union(torch.cat(blocks)).cpu()
    if not flags.any():
        return
    news = []
    for unit, changed in zip(units, flags.split([part.numel() for part in blocks]), strict=True):
        if changed.any():
            _unite(comm, unit, changed.nonzero().view(-1), by)
            news.append(unit)
    counts = torch.stack([unit.state["active"].count_nonzero() for unit in news]).cpu().tolist()
    for unit, seen in zip(news, counts, strict=True):
        if seen == sum(p.numel() for p in unit.params):  # padding is never seen
            del unit.state["active"]


def _unite(comm: Communicator, unit: Unit, blocks: Tensor, by: str) -> None:
    """Unites which coordinates have been seen, in the unit's `blocks` where any rank has news: int64[k], ascending."""
    b, active = _everywhere(comm, unit, by), unit.state["active"]
    for some in blocks.split(PART):
        known = _rows(active, some)
        united = comm.union(((_rows(b, some) > 0) & ~known).flatten())
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
