"""Parameter groups that a script edits, orders or fills with its own entries; another optimizer over the same parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tests.distributed.habits.base import (
    DDP_ONLY,
    EVERYWHERE,
    FIRST,
    Plain,
    elementwise,
    habit,
    others,
)
from tests.distributed.habits.script import DEVICE, Gradients, Script, drawn


class Slower(Script):
    """lr is a tenth from step 4 on, set in the groups."""

    ways = EVERYWHERE

    def set(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] *= 0.1

    def step(self) -> None:
        if self.t == 4:
            self.set()
        super().step()


@habit
class GroupsCopied(Slower):
    """optimizer.param_groups is replaced by copies of its groups, in which lr is set (wrappers that load a state do so)"""

    twin = Slower

    def set(self) -> None:
        opt = self.opt
        while hasattr(opt, "optimizer"):
            opt = opt.optimizer
        opt.param_groups = [dict(group) for group in opt.param_groups]
        super().set()


@habit
class GroupReplaced(Slower):
    """optimizer.param_groups[i] = {**group, "lr": lr}"""

    twin = Slower

    def set(self) -> None:
        groups = self.opt.param_groups
        for i, group in enumerate(groups):
            groups[i] = {**group, "lr": group["lr"] * 0.1}


class TwoGroups(Script):
    """The first layer has a group for itself."""

    ways = EVERYWHERE

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        named = dict(self.model.named_parameters())
        first = {"params": [named[n] for n in FIRST]}
        rest = {"params": [p for n, p in named.items() if n not in FIRST]}
        return self.method.make([rest, first], **options)


@habit
class TakenOut(TwoGroups):
    """parameters are taken out of their group after some steps: they stay, as in torch"""

    ways = Script.ways
    twin = elementwise(TwoGroups)
    names = others(*FIRST)
    since = 4
    says = r"taken out"

    def out(self) -> None:
        gone = {id(p) for n, p in self.model.named_parameters() if n in FIRST}
        for group in self.opt.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]

    def step(self) -> None:
        if self.t == 4:
            self.out()
            self.model.zero_grad()
        super().step()

    def stays(self, t: int) -> tuple[str, ...]:
        return FIRST if t >= 4 else ()


@habit
class TakenOutBetween(TakenOut):
    """the same between backward and step"""

    def step(self) -> None:
        Script.step(self)

    def between(self) -> None:
        if self.t == 4:
            self.out()


@habit
class GroupTakenOut(TakenOut):
    """a whole group is removed from optimizer.param_groups"""

    def out(self) -> None:
        gone = {id(p) for n, p in self.model.named_parameters() if n in FIRST}
        groups = self.opt.param_groups
        groups[:] = [group for group in groups if not gone.intersection(map(id, group["params"]))]


@habit
class TakenOutAndAttachedAgain(GroupTakenOut):
    """the same, and attach is called again"""

    accelerate = False
    ways = DDP_ONLY
    says = None

    def out(self) -> None:
        super().out()
        self.attach(self.ddp, self.opt)

    def stays(self, t: int) -> tuple[str, ...]:
        averaged = t == 4 and self.method.local  # what ranks had each its own of is their mean from now on
        return () if averaged else super().stays(t)


@habit
class OrderOfRanks(Script):
    """parameters come to the optimizer in another order on every rank (from a set), two of them with the same shape"""

    ways = DDP_ONLY
    twin = Plain
    norm_tolerance = 1e-5
    since = 0
    says = r"order"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.second.bias = nn.Parameter(model.second.bias.detach().clone())
        model.second.twin = nn.Parameter(torch.zeros(5, device=DEVICE))
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {**g, "second.twin": 2.0 * g["second.bias"]}

    def trained(self) -> Any:
        named = dict(self.model.named_parameters())
        if self.rank % 2:
            named["second.bias"], named["second.twin"] = named["second.twin"], named["second.bias"]
        return list(named.values())


@habit
class FrozenInBfloat16(Script):
    """a frozen layer in bfloat16, which the optimizer is given with the others"""

    twin = staticmethod(lambda m, w: FrozenInFloat32)
    names = others(*FIRST)
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.first.requires_grad_(False).to(self.dtype)
        return model

    def stays(self, t: int) -> tuple[str, ...]:
        return FIRST


class FrozenInFloat32(FrozenInBfloat16):
    dtype = torch.float32


@habit
class EntriesOfItsOwn(TwoGroups):
    """groups have entries of the script: a name, a function, an object of each rank"""

    twin = TwoGroups

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        opt = super().make_optimizer(params)
        for i, group in enumerate(opt.param_groups):
            group.update(name=f"group {i}", lr_scale=0.5, decay=lambda lr: lr, owner=f"rank {self.rank}")
        return opt


@habit
class OptionOfTorch(Script):
    """a group has an option of torch's optimizers that the method lacks (maximize=True)"""

    ways = EVERYWHERE
    refuses = True
    since = 0
    says = r"maximize"

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([{"params": list(params), "maximize": True}])


@habit
class OptionOfAllGroups(OptionOfTorch):
    """a group sets an option that is not one of groups, but of the whole optimizer (max_grad_norm)"""

    says = r"max_grad_norm"

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([{"params": list(params), "max_grad_norm": 1.0}])


@habit
class MadeAgain(Script):
    """a wrapper makes the optimizer again: type(optimizer)(params, **optimizer.defaults), also after load_state_dict"""

    ways = EVERYWHERE
    twin = Plain

    def applies(self) -> bool:
        return self.method.cls != "torch.AdamW"  # whose constructor does not take all of its own defaults

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        first = self.method.make(params)
        if self.method.torch or not self.way.sharded:
            first.load_state_dict(first.state_dict())
        return type(first)(first.param_groups, **first.defaults)


@habit
class ParameterTwice(Script):
    """a list names a parameter twice: torch warns, and moves it twice"""

    refuses = True
    since = 0
    says = r"twice"

    def applies(self) -> bool:
        return not self.method.torch

    def trained(self) -> Any:
        return [*self.model.parameters(), self.model.first.weight]


class RateOf(Script):
    """lr is a number of another kind when the optimizer is made."""

    ways = EVERYWHERE
    twin = Plain
    tolerance = 1e-6

    def rate(self, lr: float) -> Any:
        raise NotImplementedError

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(params, lr=self.rate(self.method.options["lr"]))


@habit
class RateOfNumpy(RateOf):
    """lr=np.float32(...) when the optimizer is made"""

    def rate(self, lr: float) -> Any:
        return np.float32(lr)


@habit
class RateOfTensor(RateOf):
    """lr=torch.tensor(...) when the optimizer is made"""

    def rate(self, lr: float) -> Any:
        return torch.tensor(lr)

    def applies(self) -> bool:
        return not (self.method.torch and self.way.sharded)


class SecondStage(Script):
    """Another optimizer takes over in step 4."""

    accelerate = False
    ways = DDP_ONLY
    closes: ClassVar[bool] = True

    def second(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        if self.t == 4:
            if self.closes and hasattr(self, "attachment"):
                self.attachment.close()
            self.opt = self.second()
        super().step()


@habit
class SecondStageByTorch(SecondStage):
    """after some steps torch's SGD takes over, the attachment is not closed"""

    twin = SecondStage
    closes = False
    since = 4
    says = r"attached for it"

    def finish(self) -> None:
        if hasattr(self, "attachment"):
            self.attachment.close()


@habit
class FirstStageByTorch(SecondStageByTorch):
    """the first steps are torch's AdamW's, over the parameters that the method is attached for"""

    twin = None
    since = 1

    def second(self) -> Any:
        return self.kept

    def step(self) -> None:
        if self.t == 1:
            self.kept, self.opt = self.opt, torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        super().step()


class NewOptimizerWrapped(SecondStage):
    """The optimizer is a new one, and so is the model's wrapper."""

    def second(self) -> Any:
        opt = self.make_optimizer(self.trained())
        self.ddp = self.wrap(self.model)
        self.attach(self.ddp, opt)
        return opt

    def applies(self) -> bool:
        return not self.method.local  # DDP gives all ranks the model of rank 0


@habit
class NewOptimizer(NewOptimizerWrapped):
    """a new optimizer in mid-training for the same wrapped model; the old attachment is closed"""

    twin = NewOptimizerWrapped
    norm_tolerance = 1e-5

    def second(self) -> Any:
        opt = self.make_optimizer(self.trained())
        self.attach(self.ddp, opt)
        return opt


@habit
class NewOptimizerNotClosed(NewOptimizer):
    """the same, and the old attachment is not closed"""

    closes = False
    since = 4
    says = r"close"


class Surroundings(Script):
    """What is around a step."""

    accelerate = False
    twin = Plain

    def around(self) -> Any:
        raise NotImplementedError

    def step(self) -> None:
        g = self.gradients(self.t, self.rank)
        self.opt.zero_grad()
        loss = self.ddp(g)
        with self.around():
            loss.backward()
            self.update()


@habit
class DefaultDevice(Surroundings):
    """torch.set_default_device of another device than the model's"""

    def around(self) -> Any:
        return torch.device("meta")


@habit
class DefaultDtype(Surroundings):
    """torch.set_default_dtype(bfloat16), and the model is float32"""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@habit
class StepInBackward(Script):
    """p.register_post_accumulate_grad_hook calls step(): the optimizer in backward, to save the memory of gradients"""

    ways = DDP_ONLY
    says = "inside backward"
    refuses = True
    torch_fails = True  # DDP has not averaged the gradient yet

    def prepared(self) -> None:
        *_, last = self.model.first.parameters()
        last.register_post_accumulate_grad_hook(lambda _: self.opt.step())

    def update(self) -> None:
        """Has been made."""
