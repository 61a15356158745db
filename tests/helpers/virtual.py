"""The ranks of a world in one process, each with the toy problem: for what a method computes, at a third of the time.

`birder.VirtualRanks` is held to real ranks bit for bit, bytes included, by tests/distributed/test_virtual.py. To be called in
a process group of one: `run_ranks(function, 1, ...)`. `OwnRank` is the same for this process's rank of a real world, so that
one function trains both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from birder import BucketOptimizer, Topology, VirtualRanks, attach
from birder.comm import ByteCounter
from tests.helpers import toy

Make = Callable[[Iterable[Tensor]], BucketOptimizer]
"""An optimizer from parameters."""


class World:
    """`ranks` virtual ranks. how: as for `attach`."""

    first = 0
    """The number of the first rank here."""

    def __init__(self, make: Make, ranks: int, ranks_per_node: int = 1, **how: Any) -> None:
        self.model = toy.make()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.0005)
        self.optimizers = [make(self.model.parameters()) for _ in range(ranks)]
        topology = Topology(ranks // ranks_per_node, ranks_per_node)
        self.ranks = VirtualRanks(self.ddp, self.optimizers, topology=topology, **how)
        self.counters: list[ByteCounter] = list(self.ranks.counter.counters)
        """Of each rank."""

    def close(self) -> None:
        """So that others may take the groups. Virtual ranks have none."""

    def step(self, number: int, broken: Iterable[int] = ()) -> list[list[Tensor]]:
        """One step of all ranks; the gradients of each. broken: the ranks whose gradients are not numbers."""
        gradients = []
        for turn in range(self.ranks.size):
            with self.ranks.turn(turn):
                rank = self.first + turn
                loss = toy.loss(self.ddp, rank, number)
                (loss * float("nan") if rank in broken else loss).backward()
                gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        self.ranks.step()
        return gradients

    def train(
        self, steps: Iterable[int], rate: Callable[[int], float] | None = None, broken: Iterable[tuple[int, int]] = ()
    ) -> list[list[tuple[int, int]]]:
        """These steps, at the rate of each; for every rank the bytes and collectives of every step.

        broken: (rank, step) at which gradients are not numbers.
        """
        sent = []
        for step in steps:
            self.ranks.counter.reset()
            if rate is not None:
                self.set_lr(rate(step))
            self.step(step, [rank for rank, at in broken if at == step])
            sent.append([(counter.total, counter.collectives) for counter in self.counters])
        return [list(of_rank) for of_rank in zip(*sent, strict=True)]

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


class OwnRank(World):
    """This process's rank of a real world, in the place of virtual ones: lists have one entry."""

    def __init__(self, make: Make, rank: int, **how: Any) -> None:
        self.first, self.model = rank, toy.make()
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=0.0005
        )  # several, which DDP rebuilds in another order
        optimizer = make(self.model.parameters())
        self.optimizers = [optimizer]
        attachment = attach(self.ddp, optimizer, **how)
        self.close = attachment.close  # type: ignore[method-assign]
        self.counters = [attachment.counter]

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        self.ranks: Any = SimpleNamespace(
            size=1, turn=contextlib.nullcontext, step=step, counter=attachment.counter, averaged=optimizer.averaged
        )


def begun(make: Make, rank: int, ranks: int = 0, ranks_per_node: int = 1, **how: Any) -> World:
    """So many virtual ranks, or with 0 the own one."""
    return World(make, ranks, ranks_per_node, **how) if ranks else OwnRank(make, rank, **how)


def resumed(
    make: Callable[[], World], at: int, last: int, rate: Callable[[int], float] | None = None
) -> tuple[World, World]:
    """After `last` steps: what has trained in one go, and what has gone on from the other's state after step `at`."""
    whole = make()
    whole.train(range(1, at + 1), rate)
    saved = whole.saved()
    whole.train(range(at + 1, last + 1), rate)
    fresh = make()
    assert len(fresh.optimizers[0].units) > 1
    fresh.load(saved)
    fresh.train(range(at + 1, last + 1), rate)
    return whole, fresh


def ends(worlds: tuple[World, World]) -> list[tuple[Tensor, Tensor]]:
    """For every rank the parameters in both."""
    return list(zip(worlds[0].models(), worlds[1].models(), strict=True))
