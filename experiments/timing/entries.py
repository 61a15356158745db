"""Who takes turns: methods, which train separately on a shared model, and the bound that nobody can beat."""

from __future__ import annotations

import copy
import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from birder.comm import ByteCounter
from birder.hooks.virtual import random_state, restore_random_state
from experiments.records import labels
from experiments.timing import cycles
from experiments.timing.shared_ddp import Ready, SharedDDP
from experiments.training import method
from experiments.training.clock import StepClock, Stopwatch
from experiments.training.loop import LOST
from experiments.training.method import AttachedMethod, Length
from experiments.training.traffic import NicMeter, StepTraffic, past_the_counters
from experiments.workloads.base import Batch, Shard, Workload
from launch.errors import UserError

MOST_COPIES = 7
"""How often the size of the model a training takes at most: the model, four tensors of state (1-bit Adam: m, v and two
errors), and twice its size while an exchange is under way."""


class Own:
    """What a method's training has for itself on the shared model: tensors, random state, the workload's own state."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.tensors = [t.clone() for t in shared.initial]
        self.workload = copy.deepcopy(shared.workload_state)
        self.rng = shared.rng

    def enter(self) -> None:
        """Puts it in the place of what is there."""
        for tensor, mine in zip(self.shared.tensors, self.tensors, strict=True):
            tensor.data = mine  # no copy: model, DDP and optimizer know the tensor, not its memory
        self.shared.workload.load_state_dict(self.workload)
        restore_random_state(self.rng, self.shared.shard.device)

    def leave(self) -> None:
        """Keeps what has become of it."""
        self.workload = copy.deepcopy(self.shared.workload.state_dict())
        self.rng = random_state(self.shared.shard.device)


@dataclass
class Shared:
    """What all methods of a world share on one rank. Made when the model is new: that is where each begins."""

    workload: Workload
    ddp: SharedDDP
    shard: Shard
    length: Length
    seed: int
    tensors: list[torch.Tensor] = field(init=False)
    initial: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [*self.ddp.module.parameters(), *self.ddp.module.buffers()]
        self.initial = [t.detach() for t in self.tensors]  # their memory, which no training uses
        self.workload_state = copy.deepcopy(self.workload.state_dict())
        self.rng = random_state(self.shard.device)


class Entry(ABC):
    """One that takes turns. failed: why it takes none any more; None while it does."""

    id = ""
    label = labels.NO_COMMUNICATION
    planned: list[int] | None = None
    """Steps of each round, where a method has planned its own."""
    state_bytes = 0
    """What a method keeps on this rank between steps."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.failed: str | None = None
        self.forget()

    def forget(self) -> None:
        """Drops what has been measured."""
        self.seconds: list[float] = []
        self.steps: list[int] = []
        self.open: list[float] = []
        """Seconds a step of each turn on unthrottled links (`experiments/timing/opened.py`), on the slowest rank."""
        self.nic = NicMeter(blind=past_the_counters(dist.get_backend()))
        self.sent = [0, 0, 0]  # bytes within the node, between nodes, collectives
        self.traffic = StepTraffic(ByteCounter())
        self.updates = [0.0]  # seconds
        self.clock = StepClock(0, self.shared.shard.device, every=10**9)

    def per_step(self) -> list[float]:
        """Seconds a step of each round, on the slowest rank."""
        return [seconds / steps for seconds, steps in zip(self.seconds, self.steps, strict=True)]

    def lengths(self, rounds: int, steps: int) -> list[int]:
        """How many steps each round has."""
        return self.planned or [steps] * rounds

    def begin(self, timed: bool) -> None:
        """Before a turn, when all ranks are there."""
        if timed:
            self.nic.resume()

    def end(self, timed: bool) -> None:
        """After a turn, when all ranks have had theirs."""
        if timed:
            self.nic.pause()

    def free(self) -> None:  # noqa: B027 the bound has nothing to give
        """Gives back the memory, where it is wanted for others."""

    @abstractmethod
    def turn(self, steps: int, watch: Stopwatch, timed: bool = False) -> float:
        """Runs so many steps; the seconds that they took on this rank."""


class Bound(Entry):
    """Forward and backward, through DDP as every method's. Nothing is sent, nothing updated: nobody can be faster."""

    def __init__(self, config: dict[str, Any], shared: Shared) -> None:
        super().__init__(shared)
        self.settings = config["train"]
        self.own = Own(shared)
        self.stream = method.batches(config, shared.workload, shared.shard, shared.length, 0)
        self.passed: list[Ready] = []
        """DDP's buckets in the last step."""

    def forget(self) -> None:
        super().forget()
        self.ready: list[list[tuple[int, float]]] = []
        """Of each timed step DDP's buckets: elements, and seconds after the step's begin until its gradients were ready."""

    def turn(
        self,
        steps: int,
        watch: Stopwatch,
        timed: bool = False,
        optimizer_and_hook: tuple[torch.optim.Optimizer, Any] | None = None,
    ) -> float:
        """optimizer_and_hook: an optimizer that takes its steps, and its hook; without one nothing is sent."""
        ddp, shard = self.shared.ddp, self.shared.shard
        self.own.enter()
        ready, begins = ddp.send_nothing(), [(0, 0.0)] * steps
        if optimizer_and_hook is not None:
            ddp.use(optimizer_and_hook[1])
            ddp.broadcast_buffers = False
        watch.start()
        for number in range(steps):
            begins[number] = (len(ready), time.perf_counter())
            ddp.zero_grad(set_to_none=True)
            method.forward_backward(self.shared.workload, ddp, self.stream, self.settings, shard.device)
            if optimizer_and_hook is not None:
                optimizer_and_hook[0].step()
        seconds = watch.stop()
        self.passed = ready[begins[-1][0] :] or self.passed if steps else []
        if timed and watch.device.type != "cuda":  # there the host only queues work
            ends = [*(place for place, _ in begins[1:]), len(ready)]
            for (place, began), end in zip(begins, ends, strict=True):
                self.ready.append([(b.elements, b.seconds - began) for b in ready[place:end]])
        ddp.use(None)
        self.own.leave()
        return seconds


class Variant(Entry):
    """A method of the comparison, described as {id, command, overrides, config}."""

    def __init__(self, described: dict[str, Any], shared: Shared) -> None:
        self.described, self.config = described, described["config"]
        self.id, self.label = described["id"], labels.method(self.config)
        self.method: AttachedMethod | None = None
        self.stream: Iterator[Batch] | None = None
        self.warm_up = 0
        super().__init__(shared)

    def forget(self) -> None:
        super().forget()
        self.updates = []

    def make(self) -> None:
        """Begins the training. Sets `failed` where that cannot be."""
        if self.method is not None:
            return
        self.own = Own(self.shared)
        shared = self.shared
        try:
            self.method = AttachedMethod(
                self.config, shared.workload, shared.ddp, shared.shard, shared.length, shared.seed
            )
        except (UserError, ValueError, TypeError, RuntimeError) as error:
            self.failed = " ".join(str(error).split())
            return
        self.hook = shared.ddp.hook
        self.stream = method.batches(self.config, shared.workload, shared.shard, shared.length, 0)
        self.done = 0
        self.state_bytes = self.method.state_bytes()

    def plan(self, rounds: int, steps: int, held: bool) -> None:
        """Decides, when the training has begun, how long warm-up and rounds are. held: as of `cycles.lengths`.

        Sets `failed` where the warm-up is too long.
        """
        assert self.method is not None
        optimizer = self.method.optimizer
        try:
            self.warm_up = cycles.warm_up(optimizer, max(1, int(self.config["train"]["timing_warmup"])))
        except UserError as error:
            self.failed = str(error)
            return
        # One step more is run before the first round.
        period = cycles.cycle(optimizer, optimizer.steps + self.warm_up + 2)
        self.planned = cycles.lengths(period, rounds, steps, held)

    def most_memory(self) -> int:
        """Bytes that the training may hold on this rank, known before it is made."""
        return MOST_COPIES * sum(t.nbytes for t in self.shared.initial)

    def memory(self) -> int:
        """Bytes that the training holds on this rank, about: model, state, and what an exchange keeps of the gradient."""
        assert self.method is not None
        model = sum(t.nbytes for t in self.own.tensors)
        return model + self.state_bytes + (2 * model if self.method.optimizer.compressed else 0)

    def free(self) -> None:
        if self.method is not None:
            self.method.close()
        self.shared.ddp.use(None)
        self.method = self.stream = self.hook = None  # type: ignore[assignment]
        self.own = None  # type: ignore[assignment]
        gc.collect()
        if self.shared.shard.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self, timed: bool) -> None:
        if timed and self.method is not None:
            counter = self.method.attachment.counter
            counter.reset()
            self.traffic.follow(counter)
        super().begin(timed)

    def end(self, timed: bool) -> None:
        super().end(timed)
        if timed and self.method is not None:
            counter = self.method.attachment.counter
            for place, value in enumerate((counter.intra, counter.inter, counter.collectives)):
                self.sent[place] += value

    def warm(self, watch: Stopwatch) -> None:
        """Runs the warm-up. Steps that a GradScaler skips, as its scale begins too high, are none of the method's."""
        assert self.method is not None
        optimizer, scaled = self.method.optimizer, self.method.scaler is not None
        end = optimizer.steps + self.warm_up
        self.turn(self.warm_up, watch)
        for _ in range(LOST):
            if scaled and optimizer.steps < end:
                self.turn(1, watch)
        if scaled and optimizer.steps < end:
            self.failed = f"the loss is NaN or inf in {LOST} steps at every loss scale: lower optimizer.lr"

    def turn(self, steps: int, watch: Stopwatch, timed: bool = False) -> float:
        assert self.method is not None
        assert self.stream is not None
        self.own.enter()
        self.shared.ddp.use(self.hook)
        losses, sampled = [], []
        watch.start()
        for _ in range(steps):
            self.done += 1
            self.method.set_lr(self.done)
            self.clock.start()
            losses.append(self.method.step(self.stream, *([self.clock.part] if timed else [])))
            if timed:
                self.clock.stop()
                self.traffic.end_step()
                sampled += [] if watch.device.type == "cuda" else self.method.update_seconds()
        self.method.optimizer.pipeline.wait()  # what the last step still sends is this method's
        seconds = watch.stop()
        if watch.device.type == "cuda":
            sampled = self.method.update_seconds()
        if timed:
            self.clock.settle()
            self.updates += sampled
            self.state_bytes = self.method.state_bytes()  # hooks make theirs in the first steps
        self.own.leave()
        if self.method.scaler is None:
            for back, loss in enumerate(reversed(losses)):
                if not math.isfinite(value := float(loss)):
                    self.failed = f"the loss is {value} at step {self.done - back}: lower optimizer.lr"
        return seconds
