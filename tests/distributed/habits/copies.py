"""Moving averages, deep copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch.optim.swa_utils import AveragedModel

from tests.distributed.habits.base import (
    EVERYWHERE,
    Plain,
    habit,
)
from tests.distributed.habits.script import NAMES, Script, Stop, drawn


@habit
class Ema(Script):
    """AveragedModel of the wrapped model, updated after every step"""

    accelerate = False

    twin = Plain

    def prepared(self) -> None:
        self.ema = AveragedModel(self.ddp)

    def after(self) -> None:
        self.ema.update_parameters(self.ddp)
        copy.deepcopy(self.ema)


@habit
class EmaOfModule(Script):
    """a moving average of the bare model, by hand; its values are put in for an evaluation and taken out again"""

    ways = EVERYWHERE
    twin = Plain

    def prepared(self) -> None:
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def after(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 0.1)
            kept = [p.detach().clone() for p in self.model.parameters()]
            for p, a in zip(self.model.parameters(), self.average, strict=True):
                p.copy_(a)
            self.model.eval()
            self.model.train()
            for p, k in zip(self.model.parameters(), kept, strict=True):
                p.copy_(k)


@habit
class EmaByData(Script):
    """the same by p.data = average.data, and back"""

    twin = Plain

    def after(self) -> None:
        kept = [p.data for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data = torch.zeros_like(p)
        for p, k in zip(self.model.parameters(), kept, strict=True):
            p.data = k


@habit
class DeepcopyDdp(Script):
    """copy.deepcopy(ddp), torch.save(ddp) and pickle, in the middle of training and between backward and step"""

    accelerate = False

    twin = Plain
    ways = Script.ways

    def between(self) -> None:
        if self.t in (2, 5):
            copy.deepcopy(self.ddp)

    def after(self) -> None:
        if self.t in (1, 4):
            copied = copy.deepcopy(self.ddp)
            with torch.no_grad():
                for p in copied.parameters():
                    p.zero_()
            torch.save(self.ddp, io.BytesIO())
            pickle.dumps(self.ddp)


@habit
class DeepcopyTrains(Script):
    """the deep copy of ddp goes on training, with an optimizer of its own"""

    accelerate = False

    ways = ("DDP", "hierarchical", "one process")
    twin = Plain
    since = 4
    says = r"attach|copy|optimizer"
    names = tuple(NAMES)

    def applies(self) -> bool:
        return not self.method.local

    def step(self) -> None:
        if self.t == 4:
            self.copied = copy.deepcopy(self.ddp)
            self.other = torch.optim.SGD(self.copied.parameters(), lr=0.1)
        if self.t >= 4:
            self.other.zero_grad()
            self.copied(drawn(self.rank, self.t, 3)).backward()
            if self.way.ranks > 1:
                for n, p in self.copied.module.named_parameters():
                    mean = sum(drawn(r, self.t, 3)[n] for r in range(self.way.ranks)) / self.way.ranks
                    if not torch.allclose(p.grad, mean, atol=1e-5):
                        raise Stop(f"gradients of {n} in a deep copy of ddp are not averaged")
            self.other.step()
        super().step()


@habit
class DeepcopyOptimizer(Script):
    """copy.deepcopy(optimizer) and pickle of it, kept as a snapshot; the original goes on"""

    says = r"state_dict\(\) between"
    since = 5  # in the steps of a dense warm-up there is nothing to refuse

    accelerate = False

    ways = EVERYWHERE
    twin = Plain

    def between(self) -> None:
        if self.t in (2, 5):
            copy.deepcopy(self.opt.state_dict())

    def after(self) -> None:
        if self.t in (1, 4) and not self.way.sharded:
            copy.deepcopy(self.opt)
            pickle.dumps(self.opt)


@habit
class Teacher(Script):
    """a frozen deep copy of the model as a teacher, whose forward pass runs in every step"""

    twin = Plain

    def prepared(self) -> None:
        self.teacher = copy.deepcopy(self.model).eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)

    def backward(self) -> None:
        with torch.no_grad():
            self.teacher(self.gradients(self.t, self.rank))
        super().backward()
