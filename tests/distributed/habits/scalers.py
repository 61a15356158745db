"""Closures and GradScaler."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.distributed.habits.base import (
    DDP_ONLY,
    EVERYWHERE,
    SECOND,
    Plain,
    habit,
    others,
)
from tests.distributed.habits.holders import TrunkAlone
from tests.distributed.habits.script import DEVICE, Gradients, Script, drawn


@habit
class Closure(Script):
    """optimizer.step(closure)"""

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        def closure() -> Tensor:
            self.opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.opt.step(closure)


@habit
class ClosureAfterBackward(Script):
    """backward by hand, then step(lambda: loss)"""

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        self.opt.zero_grad()
        loss = self.loss()
        loss.backward()
        self.opt.step(lambda: loss)


@habit
class Scaler(Script):
    """GradScaler"""

    accelerate = False

    ways = Script.ways
    twin = Plain
    says = r"GradScaler"

    def prepared(self) -> None:
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=1000)

    def step(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.between()
        self.scaler.step(self.opt)
        self.scaler.update()


@habit
class ScalerOff(Scaler):
    """GradScaler(enabled=False)"""

    says = None

    def prepared(self) -> None:
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=False)


@habit
class ScalerClipping(Scaler):
    """GradScaler, unscale_ and a clipping without effect"""

    says = r"GradScaler|changed|clip"

    def between(self) -> None:
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)


@habit
class ScalerOverflow(Scaler):
    """GradScaler, overflow on one rank in steps 1 and 5: all skip"""

    infinite: ClassVar[tuple[int, ...]] = (1, 5)
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def gone(self, t: int) -> tuple[str, ...]:
        return ()

    def bad(self) -> None:
        self.opt.zero_grad()
        g = drawn(self.rank, 77)
        if self.rank == self.way.ranks - 1:
            for v in g.values():
                v.fill_(float("inf"))
        g = {n: v for n, v in g.items() if n not in self.gone(0)}
        self.scaler.scale(self.ddp(g)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def step(self) -> None:
        if self.t in self.infinite:
            self.bad()
        super().step()


@habit
class ScalerOverflowUnusedFirst(ScalerOverflow):
    """the same, while the first parameter is not used in that step"""

    ways = DDP_ONLY

    def gone(self, t: int) -> tuple[str, ...]:
        return ("conv.weight", "conv.bias")


@habit
class ScalerOverflowUnusedLast(ScalerOverflow):
    """the same, while the last parameters are not used in that step"""

    ways = DDP_ONLY

    def gone(self, t: int) -> tuple[str, ...]:
        return ("scale.weight", *SECOND)


@habit
class ScalerOverflowInOneElement(ScalerOverflow):
    """overflow of one element on one rank"""

    def bad(self) -> None:
        self.opt.zero_grad()
        g = drawn(self.rank, 77)
        if self.rank == self.way.ranks - 1:
            g["first.weight"][3, 3] = float("inf")
        self.scaler.scale(self.ddp(g)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()


@habit
class ScalerSubset(Scaler):
    """GradScaler, overflow on one rank; the optimizer holds the head alone, or all but the first part"""

    ways = DDP_ONLY
    twin = staticmethod(lambda m, w: HeadAlone)
    names = SECOND
    gone: ClassVar[str] = ""

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(self.of("second"))

    def step(self) -> None:
        if self.t in (1, 5):
            self.opt.zero_grad()
            self.model.zero_grad()
            g = drawn(self.rank, 77)
            if self.rank == self.way.ranks - 1:
                for v in g.values():
                    v.fill_(float("inf"))
            self.scaler.scale(self.ddp(g)).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        self.model.zero_grad()
        super().step()


class HeadAlone(Script):
    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(self.of("second"))

    def step(self) -> None:
        self.model.zero_grad()
        super().step()


@habit
class ScalerTwoOptimizers(Scaler):
    """GradScaler and two optimizers, overflow on one rank in the one's part"""

    ways = DDP_ONLY
    twin = staticmethod(lambda m, w: TrunkAlone)
    names = others(*SECOND)

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])

    def prepared(self) -> None:
        super().prepared()
        self.second = torch.optim.SGD(self.of("second"), lr=0.1)

    def both(self, g: Gradients) -> None:
        self.opt.zero_grad()
        self.second.zero_grad()
        self.scaler.scale(self.ddp(g)).backward()
        self.scaler.step(self.opt)
        self.scaler.step(self.second)
        self.scaler.update()

    def step(self) -> None:
        if self.t in (2, 5):
            g = drawn(self.rank, 77)
            if self.rank == self.way.ranks - 1:
                g["conv.weight"].fill_(float("inf"))
            self.both(g)
        self.both(self.gradients(self.t, self.rank))
