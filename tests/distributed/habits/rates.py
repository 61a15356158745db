"""Hyper-parameters that change between backward and step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.distributed.habits.base import (
    EVERYWHERE,
    habit,
)
from tests.distributed.habits.script import NAMES, Script, Stop


class Scheduled(Script):
    """lr is set before the step begins."""

    ways = EVERYWHERE

    def set(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 1e-3 * (1 + self.t % 3)

    def step(self) -> None:
        self.set()
        super().step()


@habit
class LrBetweenBackwardAndStep(Scheduled):
    """the loop sets lr between backward and step"""

    twin = Scheduled
    since = 1
    says = r"lr|hyper-parameter"

    def step(self) -> None:
        Script.step(self)

    def between(self) -> None:
        self.set()


@habit
class SchedulerBetweenBackwardAndStep(Script):
    """scheduler.step() between backward and optimizer.step()"""

    accelerate = False

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: SchedulerBefore)
    says = r"lr|hyper-parameter"

    def prepared(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda n: 1.0 / (1 + n))

    def between(self) -> None:
        self.scheduler.step()


class SchedulerBefore(SchedulerBetweenBackwardAndStep):
    def step(self) -> None:
        self.scheduler.step()
        super().step()

    def between(self) -> None:
        pass


@habit
class SchedulerAfter(Script):
    """a scheduler that is made before attach, stepped after the optimizer"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: SchedulerAfterByHand)

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        opt = super().make_optimizer(params)
        self.base = opt.param_groups[0]["lr"]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0 / (1 + n))
        return opt

    def after(self) -> None:
        self.scheduler.step()


class SchedulerAfterByHand(Script):
    ways = EVERYWHERE

    def prepared(self) -> None:
        self.base = self.opt.param_groups[0]["lr"]

    def after(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = self.base * (1.0 / (1 + self.t))


@habit
class MomentumBetweenBackwardAndStep(Script):
    """betas, beta or momentum are set between backward and step (cycled momentum)"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: MomentumBefore)
    says = r"beta|momentum|hyper-parameter"

    def set(self) -> None:
        low = 0.8 if self.t % 2 else 0.9
        for group in self.opt.param_groups:
            if "betas" in group:
                group["betas"] = (low, group["betas"][1])
            elif "beta" in group:
                group["beta"] = low
            else:
                group["momentum"] = low

    def between(self) -> None:
        self.set()


class MomentumBefore(MomentumBetweenBackwardAndStep):
    def step(self) -> None:
        self.set()
        super().step()

    def between(self) -> None:
        pass


@habit
class DecayBetweenBackwardAndStep(Script):
    """weight_decay is set between backward and step"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: DecayBefore)
    says = r"weight_decay|decay|hyper-parameter"

    def applies(self) -> bool:
        return self.method.options.get("variant") != "released"

    def set(self) -> None:
        for group in self.opt.param_groups:
            group["weight_decay"] = 0.1 * ((self.t + 1) % 3)

    def between(self) -> None:
        self.set()


class DecayBefore(DecayBetweenBackwardAndStep):
    def step(self) -> None:
        self.set()
        super().step()

    def between(self) -> None:
        pass


@habit
class LrAsNumpy(Scheduled):
    """lr is set as a numpy number"""

    twin = Scheduled

    def set(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = np.float64(1e-3 * (1 + self.t % 3))


@habit
class LrAsTensor(Scheduled):
    """lr is set as a tensor"""

    twin = Scheduled
    says = r"lr"
    tolerance = 1e-6

    def set(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = torch.tensor(1e-3 * (1 + self.t % 3))


@habit
class WarmUpFromZero(Script):
    """a schedule that begins with lr 0"""

    ways = EVERYWHERE
    twin = None

    def step(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 1e-4 * max(0, self.t - 2)
        super().step()

    def stays(self, t: int) -> tuple[str, ...]:
        return tuple(NAMES) if t <= 2 else ()

    def finish(self) -> None:
        if not all(np.isfinite(v).all() for v in self.trace[-1].values()):
            raise Stop("parameters are not finite")
