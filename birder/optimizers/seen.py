"""Which coordinates have ever had a gradient on any rank: `unit.state["active"]`, bool[padded], until all of them have.

A flag for every BLOCK coordinates is united over ranks in each step, and where a flag is up also a bit for each coordinate.
A coordinate has been seen on a rank when b, the mean of |g|, is above 0 there.

While there is a map, the host waits for the device once a step, for the flags, and in a step with news a second time:
how many bits are sent depends on what the flags say, and the update on those bits. Units seen whole wait for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birder import kernels
from birder.comm import Communicator
from birder.late import sent
from birder.optimizers.layout import Unit

BLOCK = 1024
"""Elements for which one flag says whether any of them has just seen its first gradient."""
PART = 4096
"""Blocks whose coordinates are united at a time: what that takes for a moment stays small beside the model."""


def unite_seen(comm: Communicator, units: list[Unit]) -> None:
    """Unites the ranks' knowledge about `units`, those with a map. Drops the map of a unit that is seen whole."""
    if not units:
        return
    blocks = [_unseen_blocks(comm, unit) for unit in units]
    flags = comm.union(torch.cat(blocks)).cpu()
    if not flags.any():
        return
    news = []
    for unit, changed in zip(units, flags.split([part.numel() for part in blocks]), strict=True):
        if not changed.any():
            continue
        for k, part in enumerate(changed.split(PART)):
            if part.any():
                where = slice(k * PART * BLOCK, (k * PART + len(part)) * BLOCK)
                _unite(comm, unit, where, len(part), sent(part.nonzero().view(-1), unit.device))
        news.append(unit)
    counts = torch.stack([unit.state["active"].sum() for unit in news]).cpu().tolist()
    for unit, seen in zip(news, counts, strict=True):
        if seen == sum(p.numel() for p in unit.params):  # padding is never seen
            del unit.state["active"]


def _unite(comm: Communicator, unit: Unit, where: slice, blocks: int, numbers: Tensor) -> None:
    """Unites which coordinates of `where` have been seen, in those of its `blocks` where any rank has news: their numbers."""
    active = unit.state["active"][where]
    b, own = unit.state["b"], _own(comm, unit)
    # The elements of `where` of which this rank keeps b.
    begin, end = max(where.start, own.start), min(where.start + len(active), own.stop)
    news = torch.zeros(blocks * BLOCK, dtype=torch.bool, device=unit.device)
    if begin < end:
        mine = slice(begin - where.start, end - where.start)
        news[mine] = (b[begin - own.start : end - own.start] > 0) & ~active[mine]
    news = news.view(-1, BLOCK)
    united = comm.union(news.index_select(0, numbers).flatten())
    news.index_copy_(0, numbers, united.view(-1, BLOCK))
    active |= news.flatten()[: len(active)]


def _own(comm: Communicator, unit: Unit) -> slice:
    """The elements of the unit of which this rank keeps b."""
    kept = unit.state["b"].numel()
    begin = comm.shard * kept if kept < unit.padded else 0
    return slice(begin, begin + kept)


def _unseen_blocks(comm: Communicator, unit: Unit) -> Tensor:
    """bool[blocks]: where this rank has just seen a coordinate for the first time, BLOCK coordinates a block."""
    b, active = unit.state["b"], unit.state["active"]
    if b.numel() == unit.padded:
        return kernels.unseen_blocks(b, active, BLOCK)
    whole = unit.zeros()
    whole[_own(comm, unit)] = b
    return kernels.unseen_blocks(whole, active, BLOCK)
