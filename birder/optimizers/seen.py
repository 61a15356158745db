"""Which coordinates have ever had a gradient on any rank: `unit.state["active"]`, bool[padded], until all of them have.

A flag for every BLOCK coordinates is united over ranks in each step, and where a flag is up also a bit for each coordinate.
A coordinate has been seen on a rank when b, the mean of |g|, is above 0 there.

While there is a map, the host waits for the device once a step, for the flags, and in a step with news a second time:
how many bits are sent depends on what the flags say, and the update on those bits. Units seen whole wait for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
    blocks = [kernels.unseen_blocks(_everywhere(comm, unit), unit.state["active"], BLOCK) for unit in units]
    flags = comm.union(torch.cat(blocks)).cpu()
    if not flags.any():
        return
    news = []
    for unit, changed in zip(units, flags.split([part.numel() for part in blocks]), strict=True):
        if changed.any():
            _unite(comm, unit, changed.nonzero().view(-1))
            news.append(unit)
    counts = torch.stack([unit.state["active"].count_nonzero() for unit in news]).cpu().tolist()
    for unit, seen in zip(news, counts, strict=True):
        if seen == sum(p.numel() for p in unit.params):  # padding is never seen
            del unit.state["active"]


def _unite(comm: Communicator, unit: Unit, blocks: Tensor) -> None:
    """Unites which coordinates have been seen, in the unit's `blocks` where any rank has news: int64[k], ascending."""
    b, active = _everywhere(comm, unit), unit.state["active"]
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


def _everywhere(comm: Communicator, unit: Unit) -> Tensor:
    """b of the whole unit, 0 where another rank keeps it: fp32[padded]."""
    b = unit.state["b"]
    if b.numel() == unit.padded:
        return b
    whole, begin = unit.zeros(), comm.shard * b.numel()
    whole[begin : begin + b.numel()] = b
    return whole
