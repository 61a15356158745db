"""Who holds what: two optimizers, parameters in none, parameters that DDP ignores."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
from tests.distributed.habits.base import (
    DDP_ONLY,
    EVERYWHERE,
    SECOND,
    habit,
    others,
)
from tests.distributed.habits.script import DEVICE, Gradients, Script, Stop, drawn, whole


class Head(Script):
    """A second optimizer's part: what torch does with the mean of the gradients in one process."""

    def other(self, params: Any) -> Any:
        return torch.optim.AdamW(params, lr=1e-2)


@habit
class TwoOptimizers(Head):
    """the trunk by the method, the head by torch.optim.AdamW"""

    accelerate = False

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: TrunkAlone)
    names = others(*SECOND)
    rest: ClassVar[str] = "adamw"

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])

    def prepared(self) -> None:
        self.second = self.other(self.of("second"))
        values = self.values()
        self.shadow = [nn.Parameter(torch.from_numpy(values[n]).clone().to(DEVICE)) for n in SECOND]
        self.shadow_opt = self.other(self.shadow)

    def step(self) -> None:
        self.opt.zero_grad()
        self.second.zero_grad()
        self.backward()
        self.opt.step()
        self.second.step()
        self.check()

    def check(self) -> None:
        ranks = range(self.way.ranks)
        for p, n in zip(self.shadow, SECOND, strict=True):
            p.grad = sum(self.gradients(self.t, r)[n] for r in ranks) / len(ranks)  # type: ignore[assignment]
        self.shadow_opt.step()
        for p, n in zip(self.shadow, SECOND, strict=True):
            got = whole(self.named()[n]).detach()
            if not torch.allclose(got, p.detach(), atol=1e-5, rtol=1e-5):
                by = float((got - p.detach()).abs().max())
                raise Stop(
                    f"step {self.t}: the head, which another optimizer holds, is {by:.3g} from where torch takes it"
                )


class TrunkAlone(Script):
    """A model without the head."""

    ways = EVERYWHERE

    def make_model(self) -> nn.Module:
        model = super().make_model()
        del model.second
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: g for n, g in drawn(rank, t).items() if n not in SECOND}


@habit
class TwoOptimizersInOneBucket(TwoOptimizers):
    """the same, with one large bucket for both"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 25}
    tolerance = 2e-6

    def applies(self) -> bool:
        return self.way.ranks == 2 or self.method.compressed


@habit
class TwoOptimizersUnused(TwoOptimizers):
    """the same with find_unused_parameters=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


@habit
class TwoOptimizersViews(TwoOptimizers):
    """the same with gradient_as_bucket_view=True and channels_last"""

    ways = DDP_ONLY
    norm_tolerance = 1e-5
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)


@habit
class HeadEverySecondStep(TwoOptimizers):
    """the head's optimizer accumulates over two steps of the trunk's"""

    ways = EVERYWHERE

    def step(self) -> None:
        self.opt.zero_grad()
        self.backward()
        self.opt.step()
        if self.t % 2 == 0:
            self.second.step()
            self.check()
            self.second.zero_grad()

    def check(self) -> None:
        ranks = range(self.way.ranks)
        for p, n in zip(self.shadow, SECOND, strict=True):
            both = [self.gradients(t, r)[n] for r in ranks for t in (self.t - 1, self.t)]
            p.grad = sum(both) / len(ranks)  # type: ignore[assignment]
        self.shadow_opt.step()
        for p, n in zip(self.shadow, SECOND, strict=True):
            got = whole(self.named()[n]).detach()
            if not torch.allclose(got, p.detach(), atol=1e-5, rtol=1e-5):
                by = float((got - p.detach()).abs().max())
                raise Stop(f"step {self.t}: the head is {by:.3g} from where torch takes it")


@habit
class TrunkFrozen(TwoOptimizers):
    """the trunk by the method and frozen from the start, the head by torch.optim.AdamW: one trains, the other does nothing"""

    ways = (*DDP_ONLY, "one process")
    twin = None

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for name, part in model.named_children():
            part.requires_grad_(name == "second")
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: g for n, g in drawn(rank, t).items() if n in SECOND}

    def stays(self, t: int) -> tuple[str, ...]:
        return self.names

    def finish(self) -> None:
        if not self.method.torch and self.opt.steps:
            raise Stop(f"{self.opt.steps} steps were made of gradients that are another optimizer's")


@habit
class NobodysParameters(Script):
    """some parameters are in no optimizer: their gradients, which the script reads, are the mean"""

    ways = EVERYWHERE
    twin = staticmethod(lambda m, w: TrunkAlone)
    names = others(*SECOND)

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])

    def step(self) -> None:
        self.model.zero_grad()
        self.backward()
        self.update()
        for n in SECOND:
            mean = sum(self.gradients(self.t, r)[n] for r in range(self.way.ranks)) / self.way.ranks
            got = whole(self.named()[n].grad)
            if not torch.allclose(got, mean, atol=1e-5):
                by = float((got - mean).abs().max())
                raise Stop(f"step {self.t}: p.grad of a parameter in no optimizer is {by:.3g} from the mean")

    def stays(self, t: int) -> tuple[str, ...]:
        return SECOND


@habit
class TwoOfOurs(Script):
    """two optimizers of the package on one DDP model, both attached"""

    accelerate = False

    ways = DDP_ONLY
    since = 0
    says = r"hook is registered|attach|one optimizer"
    twin = TrunkAlone
    names = others(*SECOND)

    def build(self) -> None:
        self.model = self.make_model()
        self.opt = self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])
        self.second = self.method.make(self.of("second"))
        self.ddp = self.wrap(self.model)
        self.attach(self.ddp, self.opt)
        self.attach(self.ddp, self.second)

    def applies(self) -> bool:
        return not self.method.norms or self.way.ranks == 2

    def step(self) -> None:
        self.opt.zero_grad()
        self.second.zero_grad()
        self.backward()
        self.opt.step()
        self.second.step()


@habit
class IgnoredParameters(Script):
    """DDP is told to ignore some parameters, the optimizer holds them"""

    accelerate = False

    ways = DDP_ONLY
    since = 1
    says = r"ignore|second"
    apart = "all"
    twin = None

    def wrap(self, model: nn.Module) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(SECOND))
        return super().wrap(model)

    def finish(self) -> None:
        if not self.method.torch:
            for n in SECOND:
                if np.array_equal(self.trace[-1][n], self.trace[0][n]):
                    raise Stop(f"{n}, which DDP ignores, is not trained, and nothing is said")


@habit
class OursForBoth(TwoOptimizers):
    """the trunk by the method, the head by the package's own SGD with momentum, attached without overlap"""

    ways = DDP_ONLY
    says = r"hook is registered|attach"
    since = 0

    def applies(self) -> bool:
        return not self.method.torch

    def other(self, params: Any) -> Any:
        ours = params[0] is self.model.second.weight
        return (birder.SGDM if ours else torch.optim.SGD)(params, lr=0.01, momentum=0.9)

    def prepared(self) -> None:
        super().prepared()
        first, way = self.attachment, self.way
        self.way = dataclasses.replace(way, options={"overlap": False})
        self.attach(self.ddp, self.second)
        self.way, self.attachment = way, first


@habit
class MethodForTheHead(TwoOptimizers):
    """the head by the method, the trunk by torch.optim.AdamW"""

    twin = staticmethod(lambda m, w: HeadModel)
    names = SECOND

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(self.of("second"))

    def prepared(self) -> None:
        self.second = self.other([p for n, p in self.model.named_parameters() if n not in SECOND])

    def check(self) -> None:
        pass


class HeadModel(Script):
    """A model of the head alone."""

    ways = EVERYWHERE

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for name in ("conv", "embed", "first", "scale"):
            delattr(model, name)
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: g for n, g in drawn(rank, t).items() if n in SECOND}
