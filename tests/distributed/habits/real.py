"""Real modules: convolution, batch norm, LSTM, checkpointing, double backward."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.habits.base import (
    DDP_ONLY,
    HABITS,
    habit,
)
from tests.distributed.habits.methods import Method
from tests.distributed.habits.script import DEVICE, Script, Stop, Way


class RealNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 4)
        self.how = "plain"

    def trunk(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            x = checkpoint(self.trunk, x, use_reentrant=False)
        elif self.how == "reentrant":
            x = checkpoint(self.trunk, x.requires_grad_(), use_reentrant=True)
        else:
            x = self.trunk(x)
        x, _ = self.lstm(x.flatten(2).transpose(1, 2))
        return self.head(x.mean(1))


class Real(Script):
    """Convolution, batch norm, LSTM, a linear head; images of 6 x 6."""

    how: ClassVar[str] = "plain"

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = RealNet()
        model.how = self.how
        return model.to(DEVICE)

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        gen = torch.Generator().manual_seed(100 * t + self.rank)
        y = torch.randint(4, (6,), generator=gen)
        return (torch.randn(6, 3, 6, 6, generator=gen) + y.view(-1, 1, 1, 1) - 1.5).to(DEVICE), y.to(DEVICE)

    def loss(self) -> Tensor:
        x, y = self.batch(self.t)
        return nn.functional.cross_entropy(self.ddp(x), y)

    names = tuple(n for n, _ in RealNet().named_parameters() if n != "conv.bias")  # batch norm takes its gradient away


@habit
class RealPlain(Real):
    """convolution, batch norm, LSTM: overlap or not, the same"""

    @staticmethod
    def twin(m: Method, w: Way) -> Any:
        return RealWithoutOverlap


class RealWithoutOverlap(Real):
    def attach(self, model: nn.Module, opt: Any) -> Any:
        self.way = type(self.way)(self.way.name, self.way.ranks, self.way.local, {**self.way.options, "overlap": False})
        return super().attach(model, opt)


@habit
class RealViews(Real):
    """the same with gradient_as_bucket_view"""

    ways = DDP_ONLY
    twin = Real
    ddp_options: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


@habit
class RealAutocast(Real):
    """bf16 autocast"""

    twin = staticmethod(lambda m, w: RealAutocastWithoutOverlap)

    def loss(self) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return super().loss()


class RealAutocastWithoutOverlap(RealWithoutOverlap):
    def loss(self) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return super().loss()


@habit
class RealCheckpoint(Real):
    """activation checkpointing, use_reentrant=False"""

    accelerate = False

    twin = Real
    how = "checkpoint"


@habit
class RealReentrant(Real):
    """activation checkpointing, use_reentrant=True, static graph"""

    accelerate = False

    ways = DDP_ONLY
    twin = Real
    how = "reentrant"
    ddp_options: ClassVar[dict[str, Any]] = {"static_graph": True}


@habit
class RealChannelsLast(Real):
    """a real channels_last convolution: the contiguous model's values up to rounding"""

    smooth: ClassVar[tuple[str, ...]] = ("torch.SGD", "torch.AdamW", "SGDM", "CSER", "EFSGD", "QSparseLocalSGD")
    twin = staticmethod(lambda m, w: Real if m.cls in RealChannelsLast.smooth else None)
    tolerance = 2e-3
    steps = 5

    def applies(self) -> bool:
        return self.method.options.get("compressor") != "top_k"

    def make_model(self) -> nn.Module:
        return super().make_model().to(memory_format=torch.channels_last)

    def loss(self) -> Tensor:
        x, y = self.batch(self.t)
        return nn.functional.cross_entropy(self.ddp(x.contiguous(memory_format=torch.channels_last)), y)


@habit
class RealCompiled(Real):
    """torch.compile(ddp), backend aot_eager"""

    twin = Real
    tolerance = 1e-5
    slow: ClassVar[bool] = True

    def applies(self) -> bool:
        return self.method.elementwise or self.method.torch

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.lstm = None
        model.head = nn.Linear(8, 4)
        return model


HABITS.pop("RealCompiled")


@habit
class GradientPenalty(Real):
    """a gradient penalty: double backward through the wrapped model"""

    twin = staticmethod(lambda m, w: GradientPenaltyWithoutOverlap)
    says = r"double|twice|create_graph"

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4)).to(DEVICE)

    names = ("0.weight", "0.bias", "3.weight", "3.bias")

    def loss(self) -> Tensor:
        x, y = self.batch(self.t)
        x.requires_grad_()
        out = self.ddp(x)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return nn.functional.cross_entropy(out, y) + 0.1 * g.square().mean()


class GradientPenaltyWithoutOverlap(GradientPenalty, RealWithoutOverlap):
    twin = None


@habit
class GradientPenaltySeparate(GradientPenalty):
    """the penalty on a second forward pass, both losses in one backward"""

    twin = staticmethod(lambda m, w: GradientPenaltySeparateWithoutOverlap)

    def loss(self) -> Tensor:
        x, y = self.batch(self.t)
        z = self.batch(self.t + 50)[0].requires_grad_()
        (g,) = torch.autograd.grad(self.ddp(z).square().sum(), z, create_graph=True)
        return nn.functional.cross_entropy(self.ddp(x), y) + 0.1 * g.square().mean()


class GradientPenaltySeparateWithoutOverlap(GradientPenaltySeparate, RealWithoutOverlap):
    twin = None


@habit
class RetainedGraph(Script):
    """loss.backward(retain_graph=True), then backward again"""

    ways = ("DDP", "hierarchical")
    twin = None
    apart = "dense"  # torch's DDP averages the first of them alone
    says = r"twice|no_sync|retain|changed"

    def finish(self) -> None:
        if self.method.compressed:
            raise Stop("not a word")

    def backward(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()
