"""The ranks of a world in one process, each with the toy problem: for what a method computes, at a third of the time.

`birder.VirtualRanks` is held to real ranks bit for bit, bytes included, by tests/distributed/test_virtual.py. To be called in
a process group of one: `run_ranks(function, 1, ...)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from birder import BucketOptimizer, Topology, VirtualRanks
from birder.comm import ByteCounter
from tests.helpers import toy


class World:
    """`ranks` virtual ranks.

    make: an optimizer from parameters. how: as for `attach`.
    """

    def __init__(
        self, make: Callable[[Iterable[Tensor]], BucketOptimizer], ranks: int, ranks_per_node: int = 1, **how: Any
    ) -> None:
        self.model = toy.make()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        self.optimizers = [make(self.model.parameters()) for _ in range(ranks)]
        topology = Topology(ranks // ranks_per_node, ranks_per_node)
        self.ranks = VirtualRanks(self.ddp, self.optimizers, topology=topology, **how)
        self.counters: list[ByteCounter] = list(self.ranks.counter.counters)
        """Of each rank."""

    def step(self, number: int, broken: Iterable[int] = ()) -> list[list[Tensor]]:
        """One step of all ranks; the gradients of each. broken: the ranks whose gradients are not numbers."""
        gradients = []
        for rank in range(self.ranks.size):
            with self.ranks.turn(rank):
                loss = toy.loss(self.ddp, rank, number)
                (loss * float("nan") if rank in broken else loss).backward()
                gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        self.ranks.step()
        return gradients

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def each(self, look: Callable[[], Any]) -> list[Any]:
        """look() on every rank's model."""
        found = []
        for rank in range(self.ranks.size):
            with self.ranks.turn(rank):
                found.append(look())
        return found

    def models(self) -> list[Tensor]:
        """The parameters of every rank, in one vector each."""
        return self.each(lambda: toy.flat(self.model).clone())

    def saved(self) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        """What every rank would write into a checkpoint: its model and its optimizer."""
        found = []
        for rank, optimizer in enumerate(self.optimizers):
            with self.ranks.turn(rank):
                found.append(copy.deepcopy((self.model.state_dict(), optimizer.state_dict())))
        return found

    def load(self, saved: Iterable[tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
        """Goes on from what `saved` gave."""
        for rank, (model, state) in enumerate(saved):
            with self.ranks.turn(rank):
                self.model.load_state_dict(model)
                self.optimizers[rank].load_state_dict(state)
