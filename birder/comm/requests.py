"""What a method asks of the other ranks: `exchange` and its like yield these, and are sent the answers.

    g = yield ShardMean(grad)
    rows = yield AllToAll(bits)

A driver performs them (birder/comm/runtime.py) by the operations of the rank's communicator (birder/comm/communicator.py),
which have the same arguments, and say their shapes. All ranks yield the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from birder.comm.communicator import Communicator
from birder.comm.link import Operation

T = TypeVar("T")


class Request:
    """Arguments are those of the operation.

    counted: whether its bytes are payload; False for what ranks tell each other to stay in step.
    """

    operation: ClassVar[str]
    early: ClassVar[bool]
    """Whether the method continues on the first thread or stream; after any other request, on the second (runtime.py)."""

    def __init_subclass__(cls, operation: str | None = None, early: bool = False) -> None:
        if operation is not None:
            cls.operation, cls.early = operation, early

    def __init__(self, *args: Any, counted: bool = True, **named: Any) -> None:
        self.args, self.named, self.counted = args, named, counted

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return getattr(comm, self.operation)(*self.args, **self.named)


Requests = Generator[Request, Tensor, T]
"""What yields requests, is sent the answers, and ends with a result."""


class ShardMean(Request, operation="shard_mean", early=True):
    """This rank's shard of `flat`, averaged over the ranks of its worker. Valid until the next request."""


class AllToAll(Request, operation="scatter"):
    """Phase 1: every worker's bytes for the chunk that this rank serves."""


class AllGather(Request, operation="gather"):
    """Phase 2: the served chunks of all shards and workers, in element order."""


class GatherWorkers(Request, operation="gather_workers"):
    """`values` of each worker, for this rank's shard."""


class GatherShards(Request, operation="gather_shards"):
    """The parts of all shards, in element order."""


class GatherRanks(Request, operation="gather_ranks"):
    """`values` of every rank, in rank order."""


class Mean(Request, operation="mean"):
    """The mean over all ranks, added up in their order, sent as `wire`."""


class WorkerMean(Request, operation="worker_mean"):
    """The mean over workers of what each has for this rank's shard, sent as `wire`."""


class Union(Request, operation="union"):
    """The union of flags over all ranks."""


class Total(Request, operation="total"):
    """The sum of a scalar over all ranks."""


class AcrossHolders(Request, operation="across_holders"):
    """The sum, or the maximum, over the ranks that hold the other parts of the same parameters."""
