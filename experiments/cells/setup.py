"""One method behind DDP on a replay model: what a cell runs, and what it took."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from birder.predict.timeline import Timeline
from experiments.cells.model import ReplayModel
from experiments.cells.nodes import FlatNode, HierarchicalNode, maker
from experiments.cells.suite import Method
from experiments.cells.timelines import BUCKET_MB, bucket_delay_ms
from experiments.training import step_profile
from experiments.training.torch_hooks import attach_hook
from experiments.training.traffic import NicMeter


class Setup:
    """Model, DDP, optimizer and communication of one method; each of `nodes` processes is a node of `gpus` GPUs."""

    def __init__(self, method: Method, model: ReplayModel, fraction: float, nodes: int, gpus: int) -> None:
        self.method, self.model, self.gpus = method, model, gpus
        options = {k: v for k, v in method.optimizer.items() if k != "_target_"}
        self.optimizer: Any = method.kind(model.parameters(), **options)
        mb = 1e4 if method.one_bucket else BUCKET_MB * fraction
        # All nodes start from zeros: DDP need not send rank 0's parameters over a link as slow as an emulated one.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True, init_sync=False)
        self.attachment = self._attach({"topology": Topology(nodes, 1), "unit_mb": mb})
        self._warm_up()

    def _attach(self, options: dict[str, Any]) -> Any:
        if self.method.hook:
            return attach_hook(self.ddp, self.optimizer, self.method.hook, rank=self.method.rank, **options)
        if self.gpus > 1:
            options["communicator"] = maker(self.model, self.method.hierarchical, self.gpus)
        sends = self.method.wire != "none"
        return birder.attach(self.ddp, self.optimizer, overlap=self.method.overlap, communicate=sends, **options)

    def _warm_up(self) -> None:
        """DDP's final buckets, compiled kernels, open connections: without waiting, and mostly without sending."""
        with self.attachment.paused():
            for _ in range(2):
                self._backward()
        if isinstance(self.optimizer, birder.OneBitAdam):  # on to the compression stage, past the dense one
            for unit in self.optimizer.units:
                unit.state["v"].fill_(1.0)
            self.optimizer.steps = self.optimizer.warmup_steps
        if self.optimizer.compressed:
            self.step()
        elif self.method.hook != "powersgd":
            self.optimizer.step()  # the first use of its state, with the gradients that the passes left
        if self.method.hook == "powersgd":
            self.attachment.begin_compressing()  # buckets are final: compressed from here on
            self.step()

    def follow(self, timeline: Timeline, dilation: float) -> None:
        """The next steps are `timeline`'s, `dilation` times as long."""
        dense = self.gpus > 1 and self.method.traffic in ("fp32", "bf16")
        self.model.follow(timeline, dilation, bucket_delay_ms(timeline) if dense else 0.0)

    def _backward(self) -> None:
        self.optimizer.zero_grad()
        trace, began = self.optimizer.pipeline.trace, time.perf_counter()
        self.ddp(torch.zeros(1)).sum().backward()
        trace.add("compute", None, began, time.perf_counter())

    def step(self) -> dict[str, float]:
        """One optimizer step, and what it took here in milliseconds of this machine's clock."""
        self._take()
        began = time.perf_counter()
        self._backward()
        self.optimizer.step()
        wall = time.perf_counter() - began
        spans = self.optimizer.pipeline.trace.last
        parts = {"encode": 0.0, "wire": 0.0, "exposed_wire": 0.0, **step_profile.split(spans)}
        if self.gpus > 1:  # what happens inside a node is a wait as well, and no work of this machine
            parts["encode"] = self._take()
        parts |= {"wall": wall, "update": sum(s.seconds for s in spans if s.kind == "apply")}
        return {f"{name}_ms": 1000 * seconds for name, seconds in parts.items()}

    def _take(self) -> float:
        """Seconds that exchanges took since the last call, without those in which they waited."""
        comm = self.optimizer.comm
        waited = comm.take_waited() if isinstance(comm, FlatNode | HierarchicalNode) else 0.0
        return max(0.0, self.optimizer.pipeline.take_busy() - waited)

    def turn(self, steps: int) -> dict[str, Any]:
        """Runs `steps` steps, beginning and ending when all nodes do; what this node found.

        steps: what `step` returns, for each; sent, collectives: of all steps; nic: (sent, received) or None; state: bytes
        that are kept between steps.
        """
        nic, counter = NicMeter(), self.attachment.counter
        dist.barrier()
        counter.reset()
        nic.resume()
        taken = [self._steps() for _ in range(steps)]
        began = time.perf_counter()
        self.optimizer.pipeline.wait()  # what the last step still sends is this method's
        taken[-1]["wall_ms"] += 1000 * (time.perf_counter() - began)
        dist.barrier()  # only now have all nodes what was sent to them
        nic.pause()
        state = int(self.optimizer.state_bytes() + self.attachment.state_bytes())
        share, passed = 1 / self.method.every, nic.total
        sent: dict[str, Any] = {"sent": share * counter.inter, "collectives": share * counter.collectives}
        sent["nic"] = None if passed is None else (share * passed[0], share * passed[1])
        return {"steps": taken, **sent, "state": state}

    def _steps(self) -> dict[str, float]:
        """A step; the mean of `every` steps of which one sends, from one of either kind."""
        first = self.step()
        if self.method.every == 1:
            return first
        talks = self.optimizer.plan(self.optimizer.steps) is not birder.Plan.SKIP
        second, share = self.step(), 1 / self.method.every
        weight = 1 - share if talks else share
        return {name: (1 - weight) * first[name] + weight * second[name] for name in first}

    def close(self) -> None:
        """Ends what the setup started."""
        self.attachment.close()
        for p in self.model.parameters():
            p.grad = None
