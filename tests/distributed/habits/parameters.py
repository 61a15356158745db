"""Shared and empty parameters, groups."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.distributed.habits.base import (
    EVERYWHERE,
    SECOND,
    Plain,
    habit,
)
from tests.distributed.habits.script import DEVICE, Gradients, Script, Stop, drawn


@habit
class Tied(Script):
    """two modules share a parameter"""

    twin = staticmethod(lambda m, w: TiedTwin)

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.again = copy.deepcopy(model.first)
        model.again.weight = model.first.weight
        del model.again.bias
        model.again.bias = None
        model.again.prefix = "again"
        model.again.forward = lambda g: (model.first.weight * g["again.weight"]).sum()
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {**g, "again.weight": drawn(rank, t, 1)["first.weight"]}


class TiedTwin(Script):
    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        g["first.weight"] = g["first.weight"] + drawn(rank, t, 1)["first.weight"]
        return g


@habit
class ZeroSized(Script):
    """a parameter of no elements"""

    twin = Plain
    tolerance = 0.0

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.embed.none = nn.Parameter(torch.zeros(0, 4, device=DEVICE))
        return model

    def gradients(self, t: int, rank: int) -> Gradients:
        return {**drawn(rank, t), "embed.none": torch.zeros(0, 4, device=DEVICE)}


@habit
class ParameterGroups(Script):
    """two groups with their own lr, by named_parameters; a generator; an empty group would be refused by torch too"""

    twin = staticmethod(lambda m, w: GroupsTwin)

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        named = dict(self.model.named_parameters())
        head = {"params": (named[n] for n in SECOND), "lr": 3e-3}
        body = {"params": [p for n, p in named.items() if n not in SECOND]}
        return self.method.make([body, head])


class GroupsTwin(Script):
    def make_optimizer(self, params: Any, **options: Any) -> Any:
        named = dict(self.model.named_parameters())
        head = {"params": [named[n] for n in SECOND]}
        body = {"params": [p for n, p in named.items() if n not in SECOND]}
        opt = self.method.make([body, head])
        for group in opt.param_groups[len(opt.param_groups) // 2 :]:
            group["lr"] = 3e-3
        return opt


@habit
class NamedParameters(Script):
    """the optimizer is built from model.named_parameters()"""

    ways = EVERYWHERE
    twin = Plain

    def trained(self) -> Any:
        return self.model.named_parameters()


@habit
class AddGroupBeforeAttach(Script):
    """add_param_group before attach"""

    accelerate = False

    twin = staticmethod(lambda m, w: BodyThenHead)

    def build(self) -> None:
        self.model = self.make_model()
        self.opt = self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])
        self.method.add(self.opt, self.of("second"))
        self.ddp = self.wrap(self.model)
        self.attach(self.ddp, self.opt)


class BodyThenHead(Script):
    def make_optimizer(self, params: Any, **options: Any) -> Any:
        named = dict(self.model.named_parameters())
        return self.method.make(
            [{"params": [p for n, p in named.items() if n not in SECOND]}, {"params": [named[n] for n in SECOND]}]
        )


@habit
class AddGroupMidway(Script):
    """add_param_group after some steps, of parameters that DDP has had from the start"""

    accelerate = False

    since = 4
    says = r"attach|warm-up"
    twin = staticmethod(lambda m, w: AddGroupTwin if m.cls == "torch.SGD" else None)

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make([p for n, p in self.model.named_parameters() if n not in SECOND])

    def step(self) -> None:
        if self.t == 4:
            self.method.add(self.opt, self.of("second"))
        super().step()

    def stays(self, t: int) -> tuple[str, ...]:
        return SECOND if t < 4 else ()

    def finish(self) -> None:
        if np.array_equal(self.trace[-1]["second.weight"], self.trace[0]["second.weight"]):
            raise Stop("the group that was added is not trained")


class AddGroupTwin(AddGroupMidway):
    pass
