"""A method on virtual workers: one process that trains as all ranks of `cluster.nodes` x `cluster.ranks_per_node` would."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from birder import Topology, VirtualRanks
from experiments.training.method import AttachedMethod, Part, batches, forward_backward
from experiments.workloads.base import Batch, Shard


class VirtualMethod(AttachedMethod):
    """`AttachedMethod` for every virtual rank. A batch of its stream is one of each rank, in rank order."""

    def connect(self) -> None:
        assert isinstance(self.ddp, DistributedDataParallel)  # rules.check_virtual
        comm, cluster = self.config["comm"], self.config["cluster"]
        topology = Topology(int(cluster["nodes"]), int(cluster["ranks_per_node"]))
        optimizers = [self.make_optimizer() for _ in range(topology.world_size)]
        self.optimizer = optimizers[0]
        self.ranks = VirtualRanks(
            self.ddp,
            optimizers,
            topology=topology,
            hierarchical=comm["topology"] == "hierarchical",
            overlap=comm["overlap"],
            unit_mb=comm["bucket_cap_mb"],
        )
        self.attachment = self.ranks  # type: ignore[assignment] # of a connection the loop asks for the counter alone
        self._kept = [self.workload.state_dict() for _ in optimizers]

    def seed(self, rank: int) -> None:
        self.ranks.seed([self._seed * 1_000_003 + r + 1 for r in range(self.ranks.size)])

    def batches(self, shard: Shard, start: int) -> Iterator[Batch]:
        every = (Shard(rank, self.ranks.size, shard.device) for rank in range(self.ranks.size))
        return zip(*(batches(self.config, self.workload, one, self.length, start) for one in every), strict=True)

    def state_bytes(self) -> int:
        """Of all ranks together."""
        return self.ranks.state_bytes()

    def set_lr(self, step: int) -> None:
        super().set_lr(step)
        for optimizer in self.ranks.optimizers[1:]:
            for group, first in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
                group["lr"] = first["lr"]

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.ranks.averaged()

    def step(self, stream: Iterator[Batch], part: Part = lambda *_: None) -> Tensor:
        """One optimizer step of every rank; rank 0's mean loss."""
        trace, began = self.optimizer.pipeline.trace, time.perf_counter()
        given = [next(stream) for _ in range(self.accumulate)]
        part("data")
        losses = []
        for rank in range(self.ranks.size):
            with self.ranks.turn(rank):
                self.workload.load_state_dict(self._kept[rank])
                mine = iter([batch[rank] for batch in given])
                losses.append(forward_backward(self.workload, self.ddp, mine, self.settings, self.device))
                self._kept[rank] = self.workload.state_dict()
        part("forward_backward")
        trace.add("compute", None, began, time.perf_counter())
        self.ranks.step()
        part("optimizer_step")
        # A loss of NaN or inf on any rank is reported; otherwise it is rank 0's, as with real ranks.
        every = torch.stack(losses)
        return torch.where(every.isfinite().all(), every[0], every.sum())
