"""What a method asks of the other ranks: `exchange` and its like yield these, and are sent the answers.

    g = yield ShardMean(grad)
    rows = yield AllToAll(bits)

A driver performs them (birder/comm/runtime.py) by the operations of the rank's communicator (birder/comm/communicator.py),
which say what each does, its arguments and shapes. All ranks yield the same requests in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch import Tensor

from birder.comm.collectives import Operation
from birder.comm.communicator import Communicator

T = TypeVar("T")


class Request:
    """What `asks` makes. counted: whether its bytes are payload; False for what ranks tell each other to stay in step.

    early: whether the method continues on the first thread or stream; after any other request, on the second (runtime.py).
    """

    def __init__(self, operation: str, early: bool, *args: Any, counted: bool = True, **named: Any) -> None:
        self.operation, self.early, self.args, self.named, self.counted = operation, early, args, named, counted

    def on(self, comm: Communicator) -> Operation[Tensor]:
        return getattr(comm, self.operation)(*self.args, **self.named)


Requests = Generator[Request, Tensor, T]
"""What yields requests, is sent the answers, and ends with a result."""


def asks(operation: Callable[..., Operation[Tensor]], early: bool = False) -> Callable[..., Request]:
    """Makes requests for that operation, with its arguments and `counted`."""
    return functools.partial(Request, operation.__name__, early)


ShardMean = asks(Communicator.shard_mean, early=True)
AllToAll = asks(Communicator.scatter)
AllGather = asks(Communicator.gather)
GatherWorkers = asks(Communicator.gather_workers)
GatherShards = asks(Communicator.gather_shards)
GatherRanks = asks(Communicator.gather_ranks)
Mean = asks(Communicator.mean)
WorkerMean = asks(Communicator.worker_mean)
Union = asks(Communicator.union)
Total = asks(Communicator.total)
AcrossHolders = asks(Communicator.across_holders)
