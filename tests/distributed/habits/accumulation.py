"""Accumulation of gradients."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.habits.base import (
    DDP_ONLY,
    EVERYWHERE,
    FIRST,
    habit,
)
from tests.distributed.habits.script import NAMES, Gradients, Script, drawn


class SumOfTwo(Script):
    """The twin of accumulation: one batch with the sum of both gradients."""

    ways = EVERYWHERE

    def gradients(self, t: int, rank: int) -> Gradients:
        a, b = drawn(rank, t), drawn(rank, t, 1)
        return {n: a[n] + b[n] for n in a}


@habit
class Accumulation(Script):
    """two batches a step, the first under no_sync"""

    ways = EVERYWHERE
    twin = SumOfTwo
    tolerance = 1e-6

    def no_sync(self) -> Any:
        if isinstance(self.ddp, DistributedDataParallel):
            return self.ddp.no_sync()
        return contextlib.nullcontext()

    def backward(self) -> None:
        if self.way.sharded:
            self.ddp.set_requires_gradient_sync(False)
        with self.no_sync():
            self.ddp(drawn(self.rank, self.t)).backward()
        if self.way.sharded:
            self.ddp.set_requires_gradient_sync(True)
        self.ddp(drawn(self.rank, self.t, 1)).backward()


@habit
class AccumulationViews(Accumulation):
    """the same with gradient_as_bucket_view=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


@habit
class AccumulationChannelsLast(Accumulation):
    """the same with channels_last"""

    norm_tolerance = 1e-5
    ways = Script.ways

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)


@habit
class AccumulationUnused(Accumulation):
    """a branch is used by the first of two batches only"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    twin = staticmethod(lambda m, w: AccumulationUnusedTwin)

    def backward(self) -> None:
        with self.no_sync():
            self.ddp(drawn(self.rank, self.t)).backward()
        last = drawn(self.rank, self.t, 1)
        self.ddp({n: g for n, g in last.items() if n not in FIRST}).backward()


class AccumulationUnusedTwin(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        a, b = drawn(rank, t), drawn(rank, t, 1)
        return {n: a[n] if n in FIRST else a[n] + b[n] for n in a}


@habit
class AccumulationWithoutNoSync(Script):
    """two batches a step, both synchronised"""

    ways = EVERYWHERE
    twin = SumOfTwo
    says = r"no_sync|set_requires_gradient_sync|twice"
    tolerance = 1e-6

    def backward(self) -> None:
        self.ddp(drawn(self.rank, self.t)).backward()
        self.ddp(drawn(self.rank, self.t, 1)).backward()


@habit
class AccumulationOfUneven(Script):
    """1, 2 or 3 batches a step, as many as remain"""

    ways = DDP_ONLY
    twin = staticmethod(lambda m, w: UnevenTwin)
    tolerance = 1e-6

    def backward(self) -> None:
        many = 1 + self.t % 3
        for k in range(many):
            with self.ddp.no_sync() if k < many - 1 else contextlib.nullcontext():
                self.ddp(drawn(self.rank, self.t, k)).backward()


class UnevenTwin(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        batches = [drawn(rank, t, k) for k in range(1 + t % 3)]
        return {n: sum(b[n] for b in batches) for n in NAMES}  # type: ignore[misc]


@habit
class ForwardInNoSync(Script):
    """two forward passes, then one backward through their sum"""

    ways = EVERYWHERE
    twin = SumOfTwo
    tolerance = 1e-6
    says = r"no_sync|twice|backward"

    def loss(self) -> Tensor:
        return self.ddp(drawn(self.rank, self.t)) + self.ddp(drawn(self.rank, self.t, 1))
