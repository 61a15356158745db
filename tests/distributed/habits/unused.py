"""Branches that are not used: by any rank, by some of them, in some steps, ever."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tests.distributed.habits.base import DDP_ONLY, FIRST, SECOND, Absent, habit, others
from tests.distributed.habits.script import Gradients, Script, Stop, drawn


@habit
class Unused(Absent):
    """a branch is not used by any rank in some steps, with find_unused_parameters=True"""

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {n: v for n, v in g.items() if n not in FIRST} if self.absent(t) else g


@habit
class UnusedViews(Unused):
    """the same with gradient_as_bucket_view=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


@habit
class UnusedFromTheStart(Unused):
    """a branch is not used until step 4"""

    since = 4
    says = r"warm-up"

    def absent(self, t: int) -> bool:
        return t < 4

    def finish(self) -> None:
        if np.array_equal(self.trace[-1]["first.weight"], self.trace[3]["first.weight"]) and self.method.elementwise:
            raise Stop("a branch that is used later on does not move")


@habit
class UnusedEveryOtherStep(Unused):
    """two heads in turns"""

    names = others(*FIRST, *SECOND)

    def absent(self, t: int) -> bool:
        return t % 2 == 0

    def gradients(self, t: int, rank: int) -> Gradients:
        gone = FIRST if t % 2 == 0 else SECOND
        return {n: v for n, v in drawn(rank, t).items() if n not in gone}

    def stays(self, t: int) -> tuple[str, ...]:
        if self.method.local:
            return ()  # ranks' models meet in a sync, after local steps with a gradient
        return FIRST if t % 2 == 0 else SECOND


@habit
class UnusedChannelsLast(Unused):
    """a branch that is not used, in a channels_last model"""

    norm_tolerance = 1e-5
    ways = Script.ways

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)


@habit
class UnusedStaticGraph(Unused):
    """a branch that is never used, static_graph=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"static_graph": True}

    def absent(self, t: int) -> bool:
        return True


@habit
class UnusedByOneRank(Script):
    """a branch is used by some ranks only"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    twin = staticmethod(lambda m, w: ZerosOnOneRank)

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {n: v for n, v in g.items() if n not in FIRST} if rank == t % self.way.ranks else g


@habit
class UnusedByOneRankViews(UnusedByOneRank):
    """the same with gradient_as_bucket_view=True"""

    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


class ZerosOnOneRank(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        if rank == t % self.way.ranks:
            for n in FIRST:
                g[n].zero_()
        return g


@habit
class UnusedAndZeroed(Script):
    """zero_grad(set_to_none=False): an unused branch has a gradient of 0, by which torch moves it"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    twin = staticmethod(lambda m, w: ZerosEverywhere)

    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: v for n, v in drawn(rank, t).items() if n not in FIRST or t < 4}

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=False)
        self.backward()
        self.update()


class ZerosEverywhere(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        if t >= 4:
            for n in FIRST:
                g[n].zero_()
        return g
