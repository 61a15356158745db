"""Memory formats, and options of DDP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from tests.distributed.habits.base import (
    DDP_ONLY,
    Plain,
    habit,
)
from tests.distributed.habits.methods import Method
from tests.distributed.habits.script import DEVICE, Gradients, Script, Way, drawn

DENSE_AT_FIRST = ("OneBitAdam",)
"""Methods that take what DDP averages in some steps."""


@habit
class ChannelsLast(Script):
    """model.to(memory_format=torch.channels_last), a transposed parameter, and one with gaps between its elements"""

    twin = Plain
    norm_tolerance = 1e-5

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model = model.to(memory_format=torch.channels_last)
        w = model.first.weight
        model.first.weight = nn.Parameter(w.detach().t().contiguous().t())
        w = model.second.weight.detach()
        spaced = torch.zeros(5, 74, device=DEVICE)
        spaced[:, ::2] = w
        model.second.weight = nn.Parameter(spaced[:, ::2])
        return model


@habit
class ChannelsLastViews(ChannelsLast):
    """the same with gradient_as_bucket_view=True"""

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


@habit
class ChannelsLastAfterWrapping(Script):
    """ddp.to(memory_format=torch.channels_last), before attach"""

    torch_fails = True  # DDP keeps views in the old layout, and gives gradients in another order

    def applies(self) -> bool:
        return self.way.alone or (self.way.overlap and self.method.cls not in DENSE_AT_FIRST and self.method.compressed)

    twin = Plain
    norm_tolerance = 1e-5

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(model).to(memory_format=torch.channels_last)


@habit
class ChannelsLastMidway(Script):
    """model.to(memory_format=torch.channels_last) after some steps"""

    torch_fails = True

    def applies(self) -> bool:
        return self.way.alone or (self.way.overlap and self.method.cls not in DENSE_AT_FIRST and self.method.compressed)

    twin = Plain
    norm_tolerance = 1e-5
    since = 4
    says = r"layout|memory_format|stride"

    def step(self) -> None:
        if self.t == 4:
            self.model.to(memory_format=torch.channels_last)
        super().step()


@habit
class GradientsAsViews(Script):
    """gradient_as_bucket_view=True"""

    ways = DDP_ONLY
    twin = Plain
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


@habit
class StaticGraph(Script):
    """static_graph=True"""

    ways = DDP_ONLY
    twin = Plain
    ddp_options: ClassVar[dict[str, Any]] = {"static_graph": True}


@habit
class StaticGraphAccumulation(Script):
    """static_graph=True and no_sync"""

    accelerate = False

    ways = DDP_ONLY
    ddp_options: ClassVar[dict[str, Any]] = {"static_graph": True}

    @staticmethod
    def twin(m: Method, w: Way) -> Any:
        return TwoBatches

    def backward(self) -> None:
        if self.t > 1:
            with self.ddp.no_sync():
                self.ddp(drawn(self.rank, self.t)).backward()
        else:
            self.ddp(self.gradients(self.t, self.rank)).backward()
            return
        self.ddp(drawn(self.rank, self.t, 1)).backward()

    def gradients(self, t: int, rank: int) -> Gradients:
        return drawn(rank, t) if t == 1 else drawn(rank, t, 1)


class TwoBatches(Script):
    """From step 2 on the gradient of two batches."""

    def gradients(self, t: int, rank: int) -> Gradients:
        a, b = drawn(rank, t), drawn(rank, t, 1)
        return a if t == 1 else {n: a[n] + b[n] for n in a}


@habit
class FindUnusedWithoutAny(Script):
    """find_unused_parameters=True, and every parameter is used"""

    ways = DDP_ONLY
    twin = Plain
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


@habit
class OneBucket(Script):
    """bucket_cap_mb=25, broadcast_buffers=False"""

    accelerate = False

    ways = DDP_ONLY
    twin = Plain
    ddp_options: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 25, "broadcast_buffers": False}
    tolerance = 2e-6

    def applies(self) -> bool:
        return self.method.cls not in ("BertAdam",)
