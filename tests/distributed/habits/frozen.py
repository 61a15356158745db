"""Parameters that are frozen, unfrozen or replaced: with no gradient on any rank they stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from birder.hooks.attachment import unwrap_optimizer
from tests.distributed.habits.base import (
    CHANGED,
    DDP_ONLY,
    EVERYWHERE,
    FIRST,
    Absent,
    Plain,
    elementwise,
    habit,
    others,
)
from tests.distributed.habits.script import DEVICE, Gradients, Script, Stop, drawn


@habit
class FreezeMidway(Absent):
    """requires_grad_(False) after some steps, gradients set to None"""

    def step(self) -> None:
        if self.t == 4:
            for p in self.of("first"):
                p.requires_grad_(False)
                p.grad = None
        super().step()


@habit
class FreezeMidwayDecay(FreezeMidway):
    """the same with weight decay"""

    def applies(self) -> bool:
        return "weight_decay" in self.method.options or self.method.cls in ("SGDM", "torch.AdamW")

    twin = None

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(params, weight_decay=0.1)


@habit
class FreezeStaleGradient(Absent):
    """requires_grad_(False) after some steps; zero_grad(set_to_none=True) does the rest"""

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=True)
        if self.t == 4:
            self.model.first.requires_grad_(False)
        self.backward()
        self.update()


@habit
class FreezeAndUnfreeze(Absent):
    """frozen in steps 4 to 6, trained again afterwards"""

    until = 6

    def step(self) -> None:
        if self.t in (4, 7):
            for p in self.of("first"):
                p.requires_grad_(self.t == 7)
                p.grad = None
        super().step()

    def finish(self) -> None:
        if np.array_equal(self.trace[7]["first.weight"], self.trace[6]["first.weight"]):
            raise Stop("unfrozen parameters do not move")


@habit
class FreezeAndUnfreezeMoments(Absent):
    """after three steps without a gradient the moments are what they were: SGD goes on as if these steps had not been"""

    until = 6
    twin = staticmethod(lambda m, w: None)
    ways = ("DDP", "DDP, overlap=False", "hierarchical", "one process", "FSDP2")

    def applies(self) -> bool:
        return not self.method.torch

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {n: v for n, v in g.items() if n not in FIRST} if self.absent(t) else g

    def kept(self) -> dict[str, Tensor]:
        """What the optimizer keeps for FIRST."""
        found = {}
        method = unwrap_optimizer(self.opt)
        method.pipeline.wait()
        params = self.of("first")
        for unit in method.units:
            whole_state = {k: s for k, s in unit.state.items() if s.numel() == unit.padded}
            for i, p in enumerate(unit.wholes):
                if any(p is q for q in params):
                    for k, s in whole_state.items():
                        if k not in ("tau", "chunk", "last", "common"):
                            found[f"{k} of {tuple(p.shape)}"] = unit.view(s, i).clone()
        return found

    def step(self) -> None:
        if self.absent(self.t):
            before = self.kept()
            super().step()
            for k, after in self.kept().items():
                if k in before and not torch.equal(after, before[k]):
                    by = float((after.float() - before[k].float()).abs().max())
                    raise Stop(f"step {self.t}: {k} changes by {by:.3g} without a gradient")
        else:
            super().step()


@habit
class FreezeByNone(Absent):
    """p.grad = None between backward and step ("cancel gradients of the last layer")"""

    since = 4
    says = CHANGED

    def between(self) -> None:
        if self.absent(self.t):
            for p in self.of("first"):
                p.grad = None


@habit
class FreezeByLr(Script):
    """the group's lr is 0 for some steps"""

    twin = None
    ways = EVERYWHERE

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        named = dict(self.model.named_parameters())
        return self.method.make(
            [{"params": [p for n, p in named.items() if n not in FIRST]}, {"params": [named[n] for n in FIRST]}]
        )

    def step(self) -> None:
        if self.t == 4:
            first = {id(p) for n, p in self.model.named_parameters() if n in FIRST}
            for group in self.opt.param_groups:
                if any(id(p) in first for p in group["params"]):
                    group["lr"] = 0.0
        super().step()

    def stays(self, t: int) -> tuple[str, ...]:
        # A sync brings ranks' models together, whatever lr is by then.
        return FIRST if t >= 4 and not self.method.local else ()


class FrozenAtFirst(Script):
    """FIRST has requires_grad=False until step 4."""

    accelerate = False

    ways = EVERYWHERE
    since = 4
    says = r"requires_grad|frozen|unfroze|attach|warm-up"
    names = others(*FIRST)
    twin = None
    apart = "dense"  # under DDP it trains what DDP does not know on every rank by itself

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.first.requires_grad_(False)
        return model

    def unfreeze(self) -> None:
        self.model.first.requires_grad_(True)

    def step(self) -> None:
        if self.t == 4:
            self.unfreeze()
        super().step()

    def stays(self, t: int) -> tuple[str, ...]:
        return FIRST if t < 4 else ()

    def finish(self) -> None:
        for n in FIRST:
            if np.array_equal(self.trace[-1][n], self.trace[3][n]):
                raise Stop(f"{n} was unfrozen and is not trained, and nothing is said")


@habit
class UnfreezeMidway(FrozenAtFirst):
    """frozen when DDP and attach are made, requires_grad_(True) after some steps"""

    ways = ("DDP", "DDP, overlap=False", "hierarchical", "hierarchical, overlap=False", "one process", "FSDP2")


@habit
class UnfreezeAndWrapAgain(FrozenAtFirst):
    """the same, with a new DistributedDataParallel and attach; the old attachment is closed"""

    ways = ("DDP", "DDP, overlap=False", "hierarchical", "hierarchical, overlap=False")
    apart = ""
    says = r"warm-up"

    def unfreeze(self) -> None:
        super().unfreeze()
        self.ddp = self.wrap(self.model)
        if not self.method.torch:
            self.attachment.close()
            self.attach(self.ddp, self.opt)


@habit
class UnfreezeByNewOptimizer(FrozenAtFirst):
    """the same, with a new optimizer as well"""

    ways = ("DDP", "hierarchical")
    apart = ""
    says = r"warm-up"
    twin = None

    def unfreeze(self) -> None:
        super().unfreeze()
        self.ddp = self.wrap(self.model)
        if not self.method.torch:
            self.attachment.close()
        self.opt = self.make_optimizer(self.trained())
        self.attach(self.ddp, self.opt)


@habit
class WrapAgain(Script):
    """a new DistributedDataParallel and attach in the middle of the run (each epoch), nothing else changed"""

    accelerate = False

    ways = DDP_ONLY
    twin = Plain

    def step(self) -> None:
        if self.t == 5:
            if not self.method.torch:
                self.attachment.close()
            self.ddp = self.wrap(self.model)
            self.attach(self.ddp, self.opt)
        super().step()

    def applies(self) -> bool:
        return not self.method.local  # DDP gives all ranks the model of rank 0


@habit
class AddGroupAndAttachAgain(FrozenAtFirst):
    """add_param_group of a layer that was frozen at first, then DDP and attach again"""

    ways = ("DDP", "DDP, overlap=False", "hierarchical")
    apart = ""
    says = r"warm-up"

    def trained(self) -> Any:
        return [p for p in self.model.parameters() if p.requires_grad]

    def unfreeze(self) -> None:
        super().unfreeze()
        self.method.add(self.opt, self.of("first"))
        self.ddp = self.wrap(self.model)
        if not self.method.torch:
            self.attachment.close()
            self.attach(self.ddp, self.opt)


@habit
class ReplacedParameter(Script):
    """a parameter is replaced by another in the optimizer's group (densification)"""

    ways = ("one process",)
    since = 4
    says = r"warm-up"
    twin = elementwise(Plain)
    names = others(*FIRST)

    def step(self) -> None:
        if self.t == 4:
            self.opt.zero_grad()
            new = nn.Parameter(torch.zeros(37, 9, device=DEVICE))
            params = self.opt.param_groups[0]["params"]
            at = next(i for i, p in enumerate(params) if p is self.model.first.weight)
            self.model.first.weight = params[at] = new
        super().step()

    def finish(self) -> None:
        if not self.trace[-1]["first.weight"].any():
            raise Stop("a parameter that was put in another's place is not trained")
