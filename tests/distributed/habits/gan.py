"""Two models, two optimizers: GAN loops."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.distributed.habits.base import (
    habit,
)
from tests.distributed.habits.script import DEVICE, NAMES, Net, Script, drawn


class TwoModels(Script):
    """A generator and a discriminator, each with DDP and an optimizer; the discriminator steps first."""

    accelerate = False

    ways = Script.ways
    twin: ClassVar[Any] = None

    def build(self) -> None:
        super().build()
        first, ddp, opt = self.model, self.ddp, self.opt
        torch.manual_seed(1)
        self.model = Net().to(DEVICE)
        self.opt = self.make_optimizer(self.model.parameters())
        self.ddp = self.wrap(self.model)
        attachment = getattr(self, "attachment", None)
        self.attach(self.ddp, self.opt)
        self.generator, self.g_ddp, self.g_opt = first, ddp, opt
        self.d_ddp, self.d_opt = self.ddp, self.opt
        self.g_attachment = attachment

    def named(self) -> dict[str, Tensor]:
        if not hasattr(self, "generator"):
            return super().named()
        return {f"{k}.{n}": p for k, m in (("g", self.generator), ("d", self.model)) for n, p in m.named_parameters()}

    names = tuple(f"{k}.{n}" for k in "gd" for n in NAMES)

    def d_step(self) -> None:
        self.d_opt.zero_grad()
        self.d_ddp(drawn(self.rank, self.t)).backward()
        self.d_opt.step()

    def g_step(self) -> None:
        self.g_opt.zero_grad()
        self.g_ddp(drawn(self.rank, self.t, 2)).backward()
        self.g_opt.step()

    def step(self) -> None:
        self.d_step()
        self.g_step()


@habit
class Gan(TwoModels):
    """the generator's loss goes through the discriminator, whose gradients are thrown away by the next zero_grad"""

    twin = TwoModels
    since = 2
    says = r"zero_grad|skip|requires_grad"

    def g_step(self) -> None:
        self.g_opt.zero_grad()
        (self.g_ddp(drawn(self.rank, self.t, 2)) + self.d_ddp(drawn(self.rank, self.t, 4))).backward()
        self.g_opt.step()


@habit
class GanToggled(TwoModels):
    """the same, with requires_grad_(False) for the discriminator meanwhile"""

    twin = TwoModels

    def g_step(self) -> None:
        self.g_opt.zero_grad()
        for p in self.model.parameters():
            p.requires_grad_(False)
        (self.g_ddp(drawn(self.rank, self.t, 2)) + self.d_ddp(drawn(self.rank, self.t, 4))).backward()
        for p in self.model.parameters():
            p.requires_grad_(True)
        self.g_opt.step()


@habit
class GanThroughModule(TwoModels):
    """the same through ddp.module"""

    twin = TwoModels

    def g_step(self) -> None:
        self.g_opt.zero_grad()
        (self.g_ddp(drawn(self.rank, self.t, 2)) + self.model(drawn(self.rank, self.t, 4))).backward()
        self.g_opt.step()


@habit
class GanTwoBackwards(TwoModels):
    """the discriminator's loss of real and of false examples, each with its own backward pass"""

    twin = staticmethod(lambda m, w: TwoModelsSum)
    says = r"twice|no_sync"
    tolerance = 1e-6

    def d_step(self) -> None:
        self.d_opt.zero_grad()
        self.d_ddp(drawn(self.rank, self.t)).backward()
        self.d_ddp(drawn(self.rank, self.t, 1)).backward()
        self.d_opt.step()


class TwoModelsSum(TwoModels):
    def d_step(self) -> None:
        self.d_opt.zero_grad()
        a, b = drawn(self.rank, self.t), drawn(self.rank, self.t, 1)
        self.d_ddp({n: a[n] + b[n] for n in a}).backward()
        self.d_opt.step()


@habit
class GanOneLoss(TwoModels):
    """both losses in one backward: real and false through two forward passes"""

    twin = TwoModelsSum
    tolerance = 1e-6

    def d_step(self) -> None:
        self.d_opt.zero_grad()
        (self.d_ddp(drawn(self.rank, self.t)) + self.d_ddp(drawn(self.rank, self.t, 1))).backward()
        self.d_opt.step()


@habit
class GanBothBeforeSteps(TwoModels):
    """both backward passes, then both steps"""

    twin = TwoModels

    def step(self) -> None:
        self.d_opt.zero_grad()
        self.g_opt.zero_grad()
        self.d_ddp(drawn(self.rank, self.t)).backward()
        self.g_ddp(drawn(self.rank, self.t, 2)).backward()
        self.d_opt.step()
        self.g_opt.step()


@habit
class GanCritic(TwoModels):
    """five steps of the critic for one of the generator, in the first of which its gradients of the last are thrown away"""

    twin = staticmethod(lambda m, w: GanCriticTwin)
    steps = 4
    since = 2

    def step(self) -> None:
        for k in range(3):
            self.d_opt.zero_grad()
            self.d_ddp(drawn(self.rank, self.t, k)).backward()
            self.d_opt.step()
        self.g_opt.zero_grad()
        (self.g_ddp(drawn(self.rank, self.t, 5)) + self.d_ddp(drawn(self.rank, self.t, 4))).backward()
        self.g_opt.step()

    says = r"zero_grad|skip|requires_grad"


class GanCriticTwin(GanCritic):
    def step(self) -> None:
        for k in range(3):
            self.d_opt.zero_grad()
            self.d_ddp(drawn(self.rank, self.t, k)).backward()
            self.d_opt.step()
        self.g_opt.zero_grad()
        self.g_ddp(drawn(self.rank, self.t, 5)).backward()
        self.g_opt.step()
