"""A model that waits as long as a GPU computes.

Forward and backward are waits until the times of a timeline, `dilation` times as long; everything else is real: DDP and
its buckets, the optimizer, its pipeline, compression, collectives.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from birder.predict.timeline import Timeline


def pause_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` says `deadline`."""
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class ReplayModel(nn.Module):
    """Parameters of a timeline's names; its backward hands out each gradient when the timeline says so.

    delay_ms: added to every gradient's time.
    like:     a model of the same shapes whose memory is used again: parameters, which decide nothing, and gradients, which
              are only read.
    The input of `forward` decides nothing. Gradients are fixed values, none of them 0.
    """

    def __init__(
        self, timeline: Timeline, dilation: float, *, delay_ms: float = 0.0, like: ReplayModel | None = None
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self._flat: list[nn.Parameter] = []
        self._values: list[Tensor] = [] if like is None else like._values
        for i, g in enumerate(timeline.gradients):
            p = nn.Parameter(torch.zeros(g.shape) if like is None else like._flat[i].detach())
            _place(self, g.name, p)
            self._flat.append(p)
            if like is None:
                self._values.append(torch.empty(g.shape).normal_(std=1e-3, generator=random).add_(1e-9))
        self.elements = sum(p.numel() for p in self._flat)
        self.layers = timeline.layers
        self.follow(timeline, dilation, delay_ms)

    def follow(self, timeline: Timeline, dilation: float, delay_ms: float = 0.0) -> None:
        """From now on waits as `timeline` says, which must be of the same model. Dilation 0: does not wait at all."""
        if len(timeline.gradients) != len(self._flat):
            raise ValueError(f"timeline {timeline.name} is of another model")
        self.timeline, self.dilation, self.delay_ms = timeline, dilation, delay_ms
        # A layer's gradients come out together, also where another timeline of the model rounds them apart.
        self._ready = [max(timeline.gradients[i].ready_ms for i in layer) for layer in self.layers]
        self._began = 0.0

    def wait(self, ms: float) -> None:
        """Until `ms` of undilated time after the start of forward."""
        if self.dilation > 0:
            pause_until(self._began + self.dilation * ms / 1000)

    def forward(self, x: Tensor) -> Tensor:
        self._began = time.perf_counter()
        self.wait(self.timeline.forward_ms)
        for number in reversed(range(len(self.layers))):
            x = _Layer.apply(self, number, x, *(self._flat[i] for i in self.layers[number]))
        return x

    def hand_out(self, number: int) -> list[Tensor]:
        """The gradients of a layer, when it is time."""
        self.wait(self._ready[number] + self.delay_ms)
        return [self._values[i] for i in self.layers[number]]


class _Layer(torch.autograd.Function):
    """One link of the chain: its backward waits."""

    @staticmethod
    def forward(ctx, model, number, x, *params):  # type: ignore[no-untyped-def]
        ctx.model, ctx.number = model, number
        return x + 0.0

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, None, grad, *ctx.model.hand_out(ctx.number)


def _place(root: nn.Module, name: str, p: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    root.register_parameter(last, p)
