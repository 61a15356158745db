"""What a method asks of the other ranks: `exchange` and its like yield these, and are sent what came of each.

    g = yield ShardMean(grad)
    rows = yield AllToAll(bits)

A driver performs them (birder/comm/runtime.py) by the operations of the rank's communicator (birder/comm/communicator.py),
where shapes are told. All ranks yield the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from birder.comm.communicator import Communicator
from birder.comm.link import Operation

T = TypeVar("T")


@dataclass
class Request:
    """counted: whether its bytes are payload; False for what ranks tell each other to go on together."""

    _: KW_ONLY
    counted: bool = True

    early: ClassVar[bool] = False
    """Whether the method goes on where it was. After any other request it does so beside the next unit's beginning."""

    def on(self, comm: Communicator) -> Operation[Tensor]:
        """The operation that answers it."""
        raise NotImplementedError


Requests = Generator[Request, Tensor, T]
"""What yields requests, is sent the answers, and ends with a result."""


@dataclass
class ShardMean(Request):
    """This rank's shard of `flat`, averaged over the ranks of its worker. Valid until the next request."""

    flat: Tensor
    early: ClassVar[bool] = True

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.shard_mean(self.flat)


@dataclass
class AllToAll(Request):
    """Phase 1: every worker's bytes for the chunk that this rank serves."""

    packed: Tensor
    out: Tensor | None = None

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.scatter(self.packed, self.out)


@dataclass
class AllGather(Request):
    """Phase 2: the served chunks of all shards and workers, in element order."""

    chunk: Tensor
    out: Tensor | None = None

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.gather(self.chunk, self.out)


@dataclass
class GatherWorkers(Request):
    """`values` of each worker, for this rank's shard."""

    values: Tensor
    out: Tensor | None = None

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.gather_workers(self.values, self.out)


@dataclass
class GatherShards(Request):
    """The parts of all shards, in element order."""

    part: Tensor
    out: Tensor | None = None

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.gather_shards(self.part, self.out)


@dataclass
class GatherRanks(Request):
    """`values` of every rank, in rank order."""

    values: Tensor

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.gather_ranks(self.values)


@dataclass
class Mean(Request):
    """The mean over all ranks, added up in their order, sent as `wire`."""

    flat: Tensor
    wire: torch.dtype = torch.float32

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.mean(self.flat, self.wire)


@dataclass
class WorkerMean(Request):
    """The mean over workers of what each has for this rank's shard, sent as `wire`."""

    part: Tensor
    wire: torch.dtype = torch.float32

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.worker_mean(self.part, self.wire)


@dataclass
class Union(Request):
    """The union of flags over all ranks."""

    flags: Tensor

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.union(self.flags)


@dataclass
class Total(Request):
    """The sum of a scalar over all ranks."""

    value: Tensor

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.total(self.value)


@dataclass
class AcrossHolders(Request):
    """The sum, or the maximum, over the ranks that hold the other parts of the same parameters."""

    values: Tensor
    largest: bool = False

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return comm.across_holders(self.values, self.largest)
