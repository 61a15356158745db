"""Gradients changed between backward and step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.habits.base import (
    CHANGED,
    DDP_ONLY,
    EVERYWHERE,
    HABITS,
    SECOND,
    Plain,
    Taken,
    habit,
)
from tests.distributed.habits.script import DEVICE, Gradients, Script, Stop, drawn, whole


class Halved(Taken):
    """SECOND's gradients halved from step 2 on."""

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {n: v * 0.5 if n in SECOND and t >= 2 else v for n, v in g.items()}


class Surgery(Script):
    """`change` of every gradient of SECOND between backward and step, from step 2 on."""

    ways = EVERYWHERE
    since = 2
    says = CHANGED
    twin: ClassVar[Any] = Halved
    tolerance = 1e-6

    def between(self) -> None:
        if self.t >= 2:
            for p in self.of("second"):
                self.change(p)

    def change(self, p: Tensor) -> None:
        raise NotImplementedError


class HalvedLate:
    """Of a framework's habit: SECOND's gradients are halved between backward and step, from step 2 on."""

    twin: ClassVar[Any] = Halved
    since = 2
    says = r"changed"
    tolerance = 1e-6

    def between(self: Any) -> None:
        if self.t >= 2:
            for p in self.of("second"):
                _data_mul(p)


def _surgery(name: str, doc: str, change: Any, **attributes: Any) -> None:
    body = {"__doc__": doc, "__module__": __name__, "change": staticmethod(change)}
    HABITS[name] = type(name, (Surgery,), body | attributes)
    globals()[name] = HABITS[name]


def _replace(p: Any) -> None:
    p.grad = p.grad * 0.5


def _data_mul(p: Any) -> None:
    p.grad.data.mul_(0.5)


def _in_place(p: Any) -> None:
    p.grad.mul_(0.5)


def _index(p: Any) -> None:
    p.grad[:] = p.grad * 0.5


def _foreach(p: Any) -> None:
    torch._foreach_mul_([p.grad], 0.5)


def _numpy(p: Any) -> None:
    (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).numpy()[...] *= 0.5


def _detach(p: Any) -> None:
    p.grad.detach().mul_(0.5)


def _copy(p: Any) -> None:
    p.grad.copy_(p.grad.clone() * 0.5)


def _set_data(p: Any) -> None:
    p.grad.data = p.grad.data * 0.5


_surgery("SurgeryReplaced", "p.grad = p.grad * 0.5", _replace)
_surgery("SurgeryData", "p.grad.data.mul_(0.5)", _data_mul)
_surgery("SurgeryInPlace", "p.grad.mul_(0.5)", _in_place)
_surgery("SurgeryIndex", "p.grad[:] = p.grad * 0.5", _index)
_surgery("SurgeryForeach", "torch._foreach_mul_([p.grad], 0.5)", _foreach)
if DEVICE == "cpu":
    _surgery("SurgeryNumpy", "p.grad.numpy()[...] *= 0.5", _numpy)
_surgery("SurgeryDetach", "p.grad.detach().mul_(0.5)", _detach)
_surgery("SurgeryCopy", "p.grad.copy_(p.grad * 0.5)", _copy)
_surgery("SurgerySetData", "p.grad.data = p.grad.data * 0.5", _set_data, ways=Script.ways)


@habit
class SurgeryDataViews(Surgery):
    """p.grad.data.mul_ with gradient_as_bucket_view=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}
    change = staticmethod(_data_mul)


@habit
class SurgeryReplacedViews(SurgeryDataViews):
    """p.grad = p.grad * 0.5 with gradient_as_bucket_view=True"""

    change = staticmethod(_replace)


@habit
class SurgeryClipNorm(Surgery):
    """torch.nn.utils.clip_grad_norm_"""

    twin = None
    since = 1

    def between(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)


@habit
class SurgeryClipNormNoEffect(Surgery):
    """clip_grad_norm_ with a limit that is never reached: nothing is changed, as torch"""

    twin = Plain
    since = 1

    def between(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)


@habit
class NormForTheLog(Script):
    """the gradients' norm is read for a log"""

    ways = EVERYWHERE
    twin = Plain

    def between(self) -> None:
        torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        float(sum(whole(p.grad).detach().square().sum() for p in self.model.parameters() if p.grad is not None))


@habit
class SurgeryClipValue(Surgery):
    """torch.nn.utils.clip_grad_value_"""

    twin = None
    since = 1

    def between(self) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)


@habit
class SurgeryOldClip(Surgery):
    """clipping of old scripts: p.grad.data.clamp_"""

    twin = Plain  # to limits that no element reaches
    since = 1
    tolerance = 1e-6

    def between(self) -> None:
        if self.t >= 1:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.data.clamp_(-1e9, 1e9)


@habit
class SurgeryOneElement(Surgery):
    """one element of the largest gradient is changed, by .data"""

    twin = staticmethod(lambda m, w: OneElement)

    def between(self) -> None:
        if self.t >= 2:
            g = self.named()["first.weight"].grad
            g = g.to_local() if hasattr(g, "to_local") else g
            g.data.view(-1)[g.numel() // 2] = 3.0

    ways = Script.ways


class OneElement(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        if t >= 2:
            g["first.weight"].view(-1)[37 * 9 // 2] = 3.0
        return g


@habit
class SurgerySwap(Surgery):
    """two parameters' gradients are exchanged (PCGrad, gradient vaccine: whole sets are replaced)"""

    twin = staticmethod(lambda m, w: AllHalved)

    def between(self) -> None:
        if self.t >= 2:
            new = [p.grad * 0.5 for p in self.model.parameters()]
            for p, g in zip(self.model.parameters(), new, strict=True):
                p.grad = g


class AllHalved(Taken):
    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: v * 0.5 if t >= 2 else v for n, v in drawn(rank, t).items()}


@habit
class SurgeryOnOneRank(Surgery):
    """one rank alone changes its gradients (a guard against NaN): the others do not wait for it for ever"""

    ways = ("DDP", "hierarchical", "FSDP2")
    twin = None
    by_one = True
    apart = "dense"
    since = 3
    says = CHANGED + "|rank"

    def finish(self) -> None:
        if self.method.compressed:
            raise Stop("a change on one rank alone has no effect, and not a word is said")

    def between(self) -> None:
        if self.t == 3 and self.rank == 1:
            for p in self.of("second"):
                p.grad = None


@habit
class SurgeryInPlaceOnOneRank(SurgeryOnOneRank):
    """the same, in place"""

    def between(self) -> None:
        if self.t == 3 and self.rank == 1:
            for p in self.of("second"):
                p.grad.zero_()


@habit
class SurgeryInStepHook(Surgery):
    """a step pre-hook of the optimizer clips (register_step_pre_hook)"""

    accelerate = False

    twin = Halved
    since = 2

    def prepared(self) -> None:
        def halve(*_: Any) -> None:
            if self.t >= 2:
                for p in self.of("second"):
                    p.grad.mul_(0.5)

        self.opt.register_step_pre_hook(halve)

    def between(self) -> None:
        pass


@habit
class TensorHook(Script):
    """p.register_hook(lambda g: g / 2) before DDP"""

    twin = staticmethod(lambda m, w: HalvedAlways)

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for p in model.second.parameters():
            p.register_hook(lambda g: g * 0.5)
        return model


class HalvedAlways(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        return {n: v * 0.5 if n in SECOND else v for n, v in drawn(rank, t).items()}


def halve_gradient(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@habit
class PostAccumulateHook(Script):
    """p.register_post_accumulate_grad_hook that halves p.grad, before DDP"""

    twin = staticmethod(lambda m, w: HalvedAlways)
    says = CHANGED + "|hook"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for p in model.second.parameters():
            p.register_post_accumulate_grad_hook(halve_gradient)
        return model


@habit
class PostAccumulateHookLate(PostAccumulateHook):
    """the same, after attach"""

    def make_model(self) -> nn.Module:
        return Script.make_model(self)

    def prepared(self) -> None:
        for p in self.of("second"):
            p.register_post_accumulate_grad_hook(halve_gradient)


@habit
class ManualAveraging(Script):
    """dist.all_reduce of p.grad by hand, after DDP has done so"""

    ways = DDP_ONLY
    twin = Plain
    says = CHANGED + "|averag"
    tolerance = 1e-5

    def between(self) -> None:
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.way.ranks)

    def applies(self) -> bool:
        return (
            self.way.overlap or not self.method.compressed
        )  # otherwise it is one more averaging, which has its effect


@habit
class ManualAveragingUnderNoSync(Script):
    """no_sync around everything, dist.all_reduce by hand"""

    ways = DDP_ONLY
    twin = staticmethod(lambda m, w: MeanOnEveryRank)
    tolerance = 2e-5
    says = r"no_sync"

    def backward(self) -> None:
        with self.ddp.no_sync():
            super().backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.way.ranks)


class MeanOnEveryRank(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        everyone = [drawn(r, t) for r in range(self.way.ranks)]
        total = everyone[0]
        for g in everyone[1:]:
            total = {n: total[n] + g[n] for n in total}
        return {n: v / self.way.ranks for n, v in total.items()}
