"""`Replicas`: 1-bit messages between the replicas of a model that FSDP has sharded inside each of them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from birder.comm.communicator import TwoPhase
from birder.comm.link import Link
from birder.comm.topology import Topology


class Replicas(TwoPhase):
    """A replica is one worker. Each of its ranks exchanges its shard with the ranks that hold the same shard elsewhere.

    The reduce-scatter inside a replica and the all-gather of parameters are FSDP's, so that for this communicator a shard is
    all there is (`shards` is 1). `world_size` counts replicas; `rank` is the world's, since every rank's state is its own.
    """

    def __init__(self, group: dist.ProcessGroup, holding: dist.ProcessGroup, topology: Topology) -> None:
        """group: of the ranks with this rank's shard. holding: of those in its replica. topology: of the whole world."""
        super().__init__(group, topology)
        self.inside = Link(holding, topology, self.counter)
        self.holders = self.inside.size
        self.rank = dist.get_rank()

    @property
    def signature(self) -> tuple[int, int]:
        return self.workers, self.holders

    def total(self, value: Tensor) -> Tensor:
        return super().total(self.across_holders(value.reshape(1))).reshape(value.shape)

    def across_holders(self, values: Tensor, *, largest: bool = False) -> Tensor:
        rows = self.inside.all_gather(values.contiguous())
        if largest:
            return rows.amax(0)
        total = rows[0].clone()  # in rank order, so that all ranks get the same bits
        for row in rows[1:]:
            total += row
        return total
