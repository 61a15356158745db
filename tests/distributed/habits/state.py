"""Round trips of the state, at any moment."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.distributed.habits.base import (
    EVERYWHERE,
    Plain,
    habit,
)
from tests.distributed.habits.script import SCRIPTS, Script, Stop, drawn


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class RoundTrip(Script):
    """state_dict and load_state_dict of it at once: changes nothing."""

    accelerate = False

    ways = EVERYWHERE
    twin: ClassVar[Any] = Plain

    def trip(self) -> None:
        self.opt.load_state_dict(through_file(self.opt.state_dict()))


@habit
class RoundTripAfterStep(RoundTrip):
    """state_dict through a file and back after every step"""

    def after(self) -> None:
        self.trip()


@habit
class RoundTripBeforeFirstStep(RoundTrip):
    """the same before the first step"""

    def prepared(self) -> None:
        self.trip()


@habit
class RoundTripBeforeAttach(RoundTrip):
    """the same before attach"""

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        self.opt = super().make_optimizer(params)
        self.trip()
        return self.opt


@habit
class RoundTripBetween(RoundTrip):
    """the same between backward and step"""

    since = 4  # in the steps of a dense warm-up there is nothing to refuse
    says = r"backward|step|load"

    def between(self) -> None:
        self.trip()


@habit
class StateReadBetween(RoundTrip):
    """state_dict is read between backward and step, and before backward"""

    says = r"state_dict\(\) between"
    since = 4  # in the steps of a dense warm-up there is nothing to refuse

    def between(self) -> None:
        copy.deepcopy(self.opt.state_dict())

    def loss(self) -> Tensor:
        copy.deepcopy(self.opt.state_dict())
        return super().loss()


@habit
class StateBetweenIsTheLastSteps(Script):
    """a state that is read between backward and step, and loaded later, is that of the step before"""

    accelerate = False

    ways = EVERYWHERE
    twin = Plain
    since = 5
    says = r"backward|state_dict|step"

    def step(self) -> None:
        if self.t == 5:
            self.opt.zero_grad()
            self.ddp(drawn(self.rank, 77)).backward()
            kept = copy.deepcopy(self.opt.state_dict())
            weights = copy.deepcopy(self.model.state_dict())
            self.opt.step()
            with torch.no_grad():
                self.model.load_state_dict(weights)
            self.opt.load_state_dict(kept)
        super().step()


@habit
class RollBack(Script):
    """model and optimizer are kept at step 3, some bad steps are made, both are loaded again"""

    accelerate = False

    ways = EVERYWHERE
    twin = Plain

    def step(self) -> None:
        if self.t == 4:
            weights, kept = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.opt.state_dict())
            for bad in (81, 82, 83, 84):
                self.opt.zero_grad()
                self.ddp(drawn(self.rank, bad)).backward()
                self.opt.step()
            self.model.load_state_dict(weights)
            self.opt.load_state_dict(kept)
        super().step()


@habit
class RollBackOptimizerFirst(RollBack):
    """the same, the optimizer's state loaded before the model's"""

    def step(self) -> None:
        if self.t == 4:
            weights, kept = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.opt.state_dict())
            for bad in (81, 82, 83, 84):
                self.opt.zero_grad()
                self.ddp(drawn(self.rank, bad)).backward()
                self.opt.step()
            self.opt.load_state_dict(kept)
            self.model.load_state_dict(weights)
        Script.step(self)


class Reset(Script):
    """Steps are made (a range test), then model and optimizer get their state of before the first step again."""

    accelerate = False

    ways = EVERYWHERE
    twin: ClassVar[Any] = Plain

    def prepared(self) -> None:
        if not hasattr(self, "kept"):
            self.kept = copy.deepcopy(self.opt.state_dict())
        weights = copy.deepcopy(self.model.state_dict())
        for bad in (81, 82, 83, 84, 85):
            self.opt.zero_grad()
            self.ddp(drawn(self.rank, bad)).backward()
            self.opt.step()
        self.model.load_state_dict(weights)
        self.opt.load_state_dict(self.kept)
        self.opt.zero_grad()


@habit
class ResetAfterAttach(Reset):
    """a range test, then the state of before the first step (kept after attach) is loaded again"""


@habit
class ResetBeforeAttach(Reset):
    """the same, kept before attach"""

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        opt = super().make_optimizer(params)
        self.kept = copy.deepcopy(opt.state_dict())
        return opt


@habit
class ResetThroughFile(Reset):
    """the same, through a file"""

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        opt = super().make_optimizer(params)
        self.kept = through_file(opt.state_dict())
        return opt


@habit
class Resume(Script):
    """a new model, DDP and optimizer in mid-training, with the state of the old ones"""

    accelerate = False

    twin: ClassVar[Any] = Plain

    def step(self) -> None:
        if self.t == 5:
            weights, kept = through_file(self.model.state_dict()), through_file(self.opt.state_dict())
            if not self.way.alone and not self.method.torch:
                self.attachment.close()
            self.model = self.make_model()
            self.opt = self.make_optimizer(self.trained())
            self.ddp = self.wrap(self.model)
            self.attach(self.ddp, self.opt)
            self.model.load_state_dict(weights)
            self.load(kept)
        super().step()

    def load(self, state: dict[str, Any]) -> None:
        self.opt.load_state_dict(state)


@habit
class ResumeByOneRank(Resume):
    """the same, rank 0 alone loads the optimizer's state: other ranks were refused it, and went on"""

    ways = ("DDP",)
    twin = None
    since = 5
    says = r"different steps.*checkpoint"
    apart = "dense"
    torch_fails = True

    def load(self, state: dict[str, Any]) -> None:
        if self.rank == 0:
            super().load(state)


@habit
class ResumeBeforeAttach(Resume):
    """the same, the optimizer's state is loaded before attach"""

    accelerate = False

    ways = Script.ways
    since = 5
    says = r"attach"

    def step(self) -> None:
        if self.t == 5:
            weights, kept = through_file(self.model.state_dict()), through_file(self.opt.state_dict())
            if not self.way.alone and not self.method.torch:
                self.attachment.close()
            self.model = self.make_model()
            self.opt = self.make_optimizer(self.trained())
            self.opt.load_state_dict(kept)
            self.ddp = self.wrap(self.model)
            self.attach(self.ddp, self.opt)
            self.model.load_state_dict(weights)
        Script.step(self)


@habit
class StateHooks(Script):
    """register_state_dict_post_hook and register_load_state_dict_pre_hook, as torch calls them"""

    accelerate = False

    ways = EVERYWHERE
    twin = Plain

    def prepared(self) -> None:
        self.got: list[bool] = []

        def post(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
            state["extra"] = 1
            return state

        self.opt.register_state_dict_post_hook(post)
        self.opt.register_load_state_dict_pre_hook(lambda opt, state: self.got.append("extra" in state))

    def after(self) -> None:
        if self.t in (1, 4):
            state = copy.deepcopy(self.opt.state_dict())
            self.opt.load_state_dict(state)
            if "extra" not in state or not self.got[-1]:
                raise Stop("hooks of the state are not called")


@habit
class StepHooks(Script):
    """register_step_pre_hook and register_step_post_hook"""

    accelerate = False

    ways = EVERYWHERE
    twin = Plain

    def prepared(self) -> None:
        self.calls: list[str] = []
        self.opt.register_step_pre_hook(lambda *_: self.calls.append("pre"))
        self.opt.register_step_post_hook(lambda *_: self.calls.append("post"))

    def finish(self) -> None:
        if self.calls != ["pre", "post"] * self.steps:
            raise Stop(f"hooks of step were called {len(self.calls)} times")


@habit
class StateEmptied(Script):
    """optimizer.state = defaultdict(dict): moments are thrown away, parameters stay (warm restarts)"""

    ways = Script.ways
    since = 5
    says = r"state"
    twin = staticmethod(lambda m, w: NewOptimizerMidway if m.torch else None)

    def empty(self) -> None:
        self.opt.state = defaultdict(dict)

    def step(self) -> None:
        if self.t == 5:
            self.empty()
        super().step()

    def finish(self) -> None:
        if not self.method.torch and len(self.trace) > 5:
            kept = PlainValues(self)
            if kept.same():
                raise Stop("optimizer.state was emptied, nothing came of it, and nothing is said")


class PlainValues:
    """Whether a script has gone as the plain one."""

    def __init__(self, script: Script) -> None:
        plain = SCRIPTS["Plain"](script.method, script.way, script.rank)
        plain.build()
        plain.record()
        plain.train()
        self.traces = script.trace, plain.trace
        if hasattr(plain, "attachment"):
            plain.attachment.close()

    def same(self) -> bool:
        mine, plain = self.traces
        return all(np.array_equal(mine[-1][n], plain[-1][n]) for n in mine[-1])


@habit
class StateCleared(StateEmptied):
    """optimizer.state.clear()"""

    def empty(self) -> None:
        self.opt.state.clear()


class NewOptimizerMidway(Script):
    def step(self) -> None:
        if self.t == 5:
            self.opt = self.make_optimizer(self.trained())
        super().step()
