"""Steps that are not made, or made twice."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.distributed.habits.base import (
    CHANGED,
    DDP_ONLY,
    EVERYWHERE,
    Plain,
    habit,
)
from tests.distributed.habits.script import NAMES, Gradients, Script, drawn
from tests.distributed.habits.surgery import MeanOnEveryRank


@habit
class SkippedStep(Script):
    """zero_grad and the next batch, without a step (loss not finite): on all ranks"""

    ways = EVERYWHERE
    twin = Plain
    skips: ClassVar[tuple[int, ...]] = (2, 5, 7)
    since = 2
    says = r"skip|zero_grad"

    def skip(self) -> None:
        self.opt.zero_grad()
        self.ddp(drawn(self.rank, 77)).backward()

    def step(self) -> None:
        if self.t in self.skips:
            self.skip()
        super().step()


@habit
class SkippedFirst(SkippedStep):
    """the first batch is skipped, and one more"""

    skips = (1, 6)
    since = 1


@habit
class SkippedTwice(SkippedStep):
    """two batches in a row are skipped"""

    def skip(self) -> None:
        super().skip()
        super().skip()


@habit
class SkippedByModelZeroGrad(SkippedStep):
    """model.zero_grad(set_to_none=False) and the next batch"""

    def skip(self) -> None:
        self.ddp(drawn(self.rank, 77)).backward()
        self.model.zero_grad(set_to_none=False)


@habit
class SkippedByNone(SkippedStep):
    """every p.grad = None by hand and the next batch"""

    def skip(self) -> None:
        self.ddp(drawn(self.rank, 77)).backward()
        for p in self.model.parameters():
            p.grad = None


@habit
class SkippedByOneRank(Script):
    """one rank alone skips the step and the others make it"""

    ways = (*DDP_ONLY, "FSDP2")
    since = 4  # the others cannot know before their next step
    says = r"rank|skip|step"
    twin = None
    by_one = True
    apart = "all"

    def update(self) -> None:
        if not (self.t == 3 and self.rank == 1):
            self.opt.step()


@habit
class StepWithoutBackward(Script):
    """step() with no gradient at all, before the first backward and later"""

    ways = EVERYWHERE
    twin = None

    def step(self) -> None:
        self.opt.zero_grad()
        if self.t not in (1, 2, 5, 8):
            self.backward()
        self.update()

    def stays(self, t: int) -> tuple[str, ...]:
        return tuple(NAMES) if t in (1, 2, 5, 8) else ()


@habit
class StepWithoutBackwardGoesOn(Script):
    """step() with no gradient at all, then as if nothing had been"""

    ways = EVERYWHERE
    twin = Plain
    says = r"no gradient|backward"

    def step(self) -> None:
        self.opt.zero_grad()
        if self.t in (1, 5):
            self.opt.step()
        self.backward()
        self.update()


@habit
class ZeroGradBeforeStep(Script):
    """zero_grad by mistake between backward and step: torch does nothing"""

    ways = EVERYWHERE
    since = 4
    says = CHANGED + "|zero_grad"

    def between(self) -> None:
        if self.t == 4:
            self.opt.zero_grad()

    def stays(self, t: int) -> tuple[str, ...]:
        return tuple(NAMES) if t == 4 else ()


@habit
class StepTwice(Script):
    """step() twice on the same gradients"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: SameBatchTwice)
    since = 5
    says = r"twice|again|backward"

    def update(self) -> None:
        self.opt.step()
        if self.t == 5:
            self.opt.step()


class SameBatchTwice(Script):
    ways = EVERYWHERE

    def step(self) -> None:
        super().step()
        if self.t == 5:
            super().step()


@habit
class NoZeroGrad(Script):
    """zero_grad is forgotten in one step: gradients add up"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: AddedUp)
    tolerance = 2e-6
    says = r"zero_grad|twice|accumulat"
    since = 6

    def step(self) -> None:
        if self.t != 6:
            self.opt.zero_grad()
        self.backward()
        self.update()


class AddedUp(Script):
    ways = EVERYWHERE

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        if t == 6:
            g = {n: v + drawn(rank, 5)[n] for n, v in g.items()}
        return g


@habit
class ZerosInsteadOfNone(Script):
    """zero_grad(set_to_none=False), model.zero_grad, zero_grad after the step"""

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        self.backward()
        self.update()
        if self.t % 2:
            self.opt.zero_grad(set_to_none=False)
        else:
            self.model.zero_grad()


@habit
class ZeroGradAfterForward(Script):
    """zero_grad between forward and backward"""

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        loss = self.loss()
        self.opt.zero_grad()
        loss.backward()
        self.update()


@habit
class ForwardWithoutBackward(Script):
    """a forward pass with gradients on, whose backward never comes"""

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        if self.t in (1, 4, 6):
            self.ddp(drawn(self.rank, 60))
        super().step()


@habit
class HandMadeGradients(Script):
    """p.grad is set by hand, without a backward pass (evolution strategies, reinforcement learning)"""

    twin = staticmethod(lambda m, w: MeanOnEveryRank)
    tolerance = 2e-5

    def backward(self) -> None:
        everyone = [drawn(r, self.t) for r in range(self.way.ranks)]
        for n, p in self.named().items():
            p.grad = self.laid(n, sum(g[n] for g in everyone) / self.way.ranks)  # type: ignore[assignment]

    def laid(self, name: str, g: Tensor) -> Tensor:
        return g


@habit
class HandMadeGradientsInAnotherLayout(HandMadeGradients):
    """the same, and the gradients lie otherwise in memory than their parameters"""

    norm_tolerance = 2e-5

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)

    def laid(self, name: str, g: Tensor) -> Tensor:
        if name == "first.weight":
            return g.t().contiguous().t()
        return g


@habit
class ExpandedGradients(Script):
    """the loss is a sum of parameters: gradients are expanded from one number"""

    twin = staticmethod(lambda m, w: Ones)

    def loss(self) -> Tensor:
        self.inner().forward = lambda g: sum(p.sum() * float(self.t) for p in self.model.parameters())  # type: ignore
        return self.ddp(None)


class Ones(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: torch.full_like(g, float(t)) for n, g in drawn(rank, t).items()}
