"""`record`: the timeline of a user's own training step, on any device, under torchrun."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from birder.comm import Topology, launcher
from birder.predict.timeline import Gradient, IntraNode, Timeline

WARMUP = 3
"""Steps before the measured ones: DDP rebuilds its buckets after the first."""
BEGIN, FORWARD, UPDATE, UPDATED, END = "<begin>", "<forward>", "<update>", "<updated>", "<end>"


def topology_of(group: dist.ProcessGroup) -> Topology:
    """Of a group's ranks, which may be a part of the world: what the launcher says is about all of it.

    Raises ValueError where they do not lie on nodes of as many each.
    """
    local = launcher.ranks_per_node(dist.get_world_size())
    return Topology.of_ranks(dist.get_process_group_ranks(group), local or dist.get_world_size())


class Clock:
    """Moments on a CPU, where work is done when the call returns."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, start: Any, end: Any) -> float:
        return 1000 * (end - start)


class CudaClock(Clock):
    """Moments in the current stream, read after the device has come to them."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else Clock()


class Watch:
    """Hooks that note when a model's gradients are ready, and when the optimizer works."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        """model: where forward ends. Of a DistributedDataParallel the parameters are its module's."""
        self.clock = clock
        self.batch = 0
        self.marks: dict[str, Any] = {}
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self.shapes = {name: tuple(p.shape) for name, p in trained.items()}
        self.frozen = tuple(p.numel() for p in inner.parameters() if not p.requires_grad)
        self.handles = [
            *(p.register_post_accumulate_grad_hook(lambda _, n=name: self.mark(n)) for name, p in trained.items()),
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(lambda *_: self.mark(FORWARD)),
            register_optimizer_step_pre_hook(self._update),
            register_optimizer_step_post_hook(lambda *_: self.mark(UPDATED)),
        ]

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
        self.batch = max(self.batch, tensors[0].shape[0] if tensors else 0)

    def _update(self, *_: Any) -> None:
        if UPDATE not in self.marks:  # of several optimizers the first
            self.mark(UPDATE)

    def mark(self, name: str) -> None:
        """Now, under this name; the last call counts, so that of accumulated gradients the last backward does."""
        self.marks[name] = self.clock.mark()


def measured(watch: Watch, step: Callable[[], Any], steps: int, warmup: int = WARMUP) -> dict[str, float]:
    """Runs `warmup` + `steps` steps and removes the hooks; medians in ms after each step's start, by name."""
    found: list[dict[str, float]] = []
    try:
        for number in range(warmup + steps):
            watch.marks.clear()
            watch.mark(BEGIN)
            step()
            watch.mark(END)
            if number >= warmup:
                begin = watch.marks[BEGIN]
                found.append({name: watch.clock.ms(begin, at) for name, at in watch.marks.items()})
    finally:
        for handle in watch.handles:
            handle.remove()
    names = set().union(*found)
    return {name: statistics.median(f[name] for f in found if name in f) for name in names}


def assemble(times: dict[str, float], shapes: dict[str, tuple[int, ...]], **about: Any) -> Timeline:
    """A timeline from `measured`'s medians. Parameters that got no gradient are left out, and the note says so.

    Raises ValueError where no parameter got one, or no forward was seen.
    """
    ready = {name: times[name] for name in shapes if name in times}
    if not ready:
        raise ValueError("the step gave no parameter a gradient: it must run forward, backward and the optimizer")
    if FORWARD not in times:
        raise ValueError("the step did not call the model's forward: call the model that was given to record()")
    last = max(ready.values())
    forward = round(max(min(times[FORWARD], *ready.values()), 1e-4), 4)
    lost = len(shapes) - len(ready)
    note = f"{lost} parameters got no gradient and are left out" if lost else ""
    gradients = tuple(Gradient(n, shape, max(round(ready[n], 4), forward)) for n, shape in shapes.items() if n in ready)
    update = times[UPDATED] - times[UPDATE] if UPDATE in times and UPDATED in times else None
    elements = sum(g.numel for g in gradients)
    return Timeline(
        forward_ms=forward,
        step_ms=max(round(last, 4), forward),
        gradients=gradients,
        intra_node=IntraNode.of(elements, about["gpus_per_node"]),
        note="; ".join(filter(None, [note, about.pop("note", "")])),
        update_ms=None if update is None else round(update, 4),
        wall_ms=round(times[END], 4),
        **about,
    )


def record(
    ddp_model: DistributedDataParallel, step: Callable[[], Any], steps: int = 20, *, name: str | None = None
) -> Timeline:
    """Measures a training step: when each gradient is ready, what the optimizer's step costs, the whole step.

    ddp_model: the model that `step` trains. step: one whole training step: zero_grad, forward, backward, the optimizer's
    step. It is called `WARMUP` + `steps` times on every rank, and trains; nothing else changes. The times are the
    medians of the rank whose gradients are ready last, the same on every rank. On CUDA by events, on a CPU by the clock.

    Backward is measured with the communication that there is: on a GPU they hardly touch, on a CPU they share its cores.

    Raises TypeError for another kind of model, ValueError for `steps` < 1 and for a step that trains nothing.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"record needs a DistributedDataParallel model, got {type(ddp_model).__name__}: wrap it first")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    device = next(ddp_model.parameters()).device
    watch = Watch(ddp_model, clock_of(device))
    times = measured(watch, step, steps)
    group = ddp_model.process_group
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, times, group=group)
    slowest = max(everyone, key=lambda t: max((t[n] for n in watch.shapes if n in t), default=0.0))
    slowest = {**slowest, END: max(t[END] for t in everyone)}
    inner = type(ddp_model.module).__name__
    return assemble(
        slowest,
        watch.shapes,
        name=name or inner,
        model=inner,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=str(next(ddp_model.parameters()).dtype).rpartition(".")[2],
        batch_per_gpu=max(1, watch.batch),
        gpus_per_node=topology_of(group).ranks_per_node,
        frozen=watch.frozen,
        command=" ".join(Path(a).name if i == 0 else a for i, a in enumerate(sys.argv)) or "python",
    )
