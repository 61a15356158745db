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

    operation: ClassVar[str]
    """Of the communicator, with the request's fields as its arguments."""
    early: ClassVar[bool] = False
    """Whether the method goes on where it was. After any other request it does so beside the next unit's beginning."""

    def on(self, comm: Communicator) -> Operation[Tensor]:
        given = [value for name, value in vars(self).items() if name != "counted"]
        return getattr(comm, self.operation)(*given)


Requests = Generator[Request, Tensor, T]
"""What yields requests, is sent the answers, and ends with a result."""


@dataclass
class ShardMean(Request):
    """This rank's shard of `flat`, averaged over the ranks of its worker. Valid until the next request."""

    operation = "shard_mean"
    early = True
    flat: Tensor


@dataclass
class AllToAll(Request):
    """Phase 1: every worker's bytes for the chunk that this rank serves."""

    operation = "scatter"
    packed: Tensor
    out: Tensor | None = None


@dataclass
class AllGather(Request):
    """Phase 2: the served chunks of all shards and workers, in element order."""

    operation = "gather"
    chunk: Tensor
    out: Tensor | None = None


@dataclass
class GatherWorkers(Request):
    """`values` of each worker, for this rank's shard."""

    operation = "gather_workers"
    values: Tensor
    out: Tensor | None = None


@dataclass
class GatherShards(Request):
    """The parts of all shards, in element order."""

    operation = "gather_shards"
    part: Tensor
    out: Tensor | None = None


@dataclass
class GatherRanks(Request):
    """`values` of every rank, in rank order."""

    operation = "gather_ranks"
    values: Tensor


@dataclass
class Mean(Request):
    """The mean over all ranks, added up in their order, sent as `wire`."""

    operation = "mean"
    flat: Tensor
    wire: torch.dtype = torch.float32


@dataclass
class WorkerMean(Request):
    """The mean over workers of what each has for this rank's shard, sent as `wire`."""

    operation = "worker_mean"
    part: Tensor
    wire: torch.dtype = torch.float32


@dataclass
class Union(Request):
    """The union of flags over all ranks."""

    operation = "union"
    flags: Tensor


@dataclass
class Total(Request):
    """The sum of a scalar over all ranks."""

    operation = "total"
    value: Tensor


@dataclass
class AcrossHolders(Request):
    """The sum, or the maximum, over the ranks that hold the other parts of the same parameters."""

    operation = "across_holders"
    values: Tensor
    largest: bool = False
