"""One method behind DDP on a replay model, what a cell runs and what it took; and as many of them as memory holds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from experiments.cells.model import ReplayModel
from experiments.cells.nodes import FlatNode, HierarchicalNode, maker
from experiments.cells.suite import Scaled, Suite, SuiteMethod
from experiments.cells.timelines import BUCKET_MB, bucket_delay_ms
from experiments.training import step_profile
from experiments.training.torch_hooks import attach_hook
from experiments.training.traffic import NicMeter
from experiments.training.world import gathered, memory_left


class Setup:
    """Model, DDP, optimizer and communication of one method; each process is a node of `gpus` GPUs."""

    def __init__(self, method: SuiteMethod, model: ReplayModel, fraction: float, gpus: int) -> None:
        self.method, self.model, self.gpus = method, model, gpus
        options = {k: v for k, v in method.optimizer.items() if k != "_target_"}
        self.optimizer: Any = method.kind(model.parameters(), **options)
        mb = 1e4 if method.one_bucket else BUCKET_MB * fraction
        # All nodes start from zeros: DDP need not send rank 0's parameters over a link as slow as an emulated one.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True, init_sync=False)
        self.attachment = self._attach({"topology": Topology(dist.get_world_size(), 1), "unit_mb": mb})
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

    def follow(self, scaled: Scaled) -> None:
        """The next steps are those of this cell."""
        dense = self.gpus > 1 and self.method.traffic in ("fp32", "bf16")
        self.model.follow(scaled.replayed, scaled.dilation, bucket_delay_ms(scaled.timeline) if dense else 0.0)

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

    def turn(self) -> dict[str, Any]:
        """A step that begins and ends when all nodes' do; what this node found.

        What `step` returns; sent, collectives: of one cycle of `every` steps; nic: the same, (sent, received) or None; state:
        bytes that are kept between steps.
        """
        nic, counter = NicMeter(), self.attachment.counter
        dist.barrier()
        counter.reset()
        nic.resume()
        taken = self._typical()
        began = time.perf_counter()
        self.optimizer.pipeline.wait()  # what the last step still sends is this method's
        taken["wall_ms"] += 1000 * (time.perf_counter() - began)
        dist.barrier()  # only now have all nodes what was sent to them
        nic.pause()
        state = int(self.optimizer.state_bytes() + self.attachment.state_bytes())
        return {**taken, "sent": counter.inter, "collectives": counter.collectives, "nic": nic.total, "state": state}

    def _typical(self) -> dict[str, float]:
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


# ---- memory of this process; Linux, elsewhere nothing is known --------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def tidy() -> None:
    """Gives what has been freed back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Memory:
    """The most memory that this process has held since the object was made, above what it held then."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = float(resident())
        except OSError:
            self.before = math.nan

    def peak(self) -> int | None:
        """Bytes; None where it cannot be measured."""
        if math.isnan(self.before):
            return None
        return round(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before)

    def grown(self) -> int:
        """Bytes that the process holds now above what it held then; 0 where that is not known."""
        return 0 if math.isnan(self.before) else round(resident() - self.before)


# ---- setups of one architecture: as many as memory holds are kept, the others are made again for every turn --------------


SHARE = 0.8
"""Share of the memory available that setups may take together."""
NEED = 48
"""Bytes for each element that a setup takes at most, about: 1-bit Adam's eager passes over one buffer of the whole model."""


class Setups:
    """Makes setups and keeps them while it is open. Every node does the same, and keeps the same ones.

    peaks: the most memory that a setup has taken in its making and its first turn, by the key of its cells.
    """

    def __init__(self, suite: Suite, cells: Sequence[Scaled]) -> None:
        self.suite = suite
        self.peaks: dict[tuple[str, float], int | None] = {}
        self._held: dict[tuple[str, float], Setup] = {}
        self._making: dict[tuple[str, float], tuple[int | None, int]] = {}
        self._memory: dict[tuple[float, bool, str], ReplayModel] = {}
        self._first: dict[tuple[str, float], Scaled] = {}
        """A cell of each setup, the small ones first: so most are held."""
        for s in sorted(cells, key=lambda s: s.replayed.elements):
            self._first.setdefault(s.key, s)

    def __enter__(self) -> Setups:
        budget, before = memory_left(SHARE), resident()
        waiting = list(self._first.values())
        spare = NEED * max(s.replayed.elements for s in waiting)  # where one that is not held is made
        while waiting:
            taken = max(gathered(resident() - before))
            if taken + NEED * waiting[0].replayed.elements + (spare if waiting[1:] else 0) > budget:
                break
            first = waiting.pop(0)
            self._held[first.key] = self._make(first)
        return self

    def __exit__(self, *_: object) -> None:
        for setup in self._held.values():
            setup.close()
        self._held.clear()
        self._memory.clear()
        tidy()

    def holds(self, scaled: Scaled) -> bool:
        """Whether the setup of a cell is kept."""
        return scaled.key in self._held

    @contextlib.contextmanager
    def use(self, scaled: Scaled) -> Iterator[Setup]:
        """The setup of a cell, for a turn."""
        key = scaled.key
        setup = self._held.get(key)
        if setup is None:
            setup = self._make(scaled)
            setup.step()  # without waiting: what others have is warm, too
        watched = None if key in self.peaks else Memory()
        yield setup
        if watched is not None:
            (peak, grown), later = self._making[key], watched.peak()
            self.peaks[key] = None if peak is None or later is None else max(peak, grown + later)
        if key not in self._held:
            setup.close()
            del setup
            tidy()

    def _make(self, scaled: Scaled) -> Setup:
        model = self._model(scaled)
        tidy()  # else what others have freed would be used again, and not be counted
        watched = Memory()
        setup = Setup(scaled.method, model, scaled.share, self.suite.gpus_per_node)
        self._making[scaled.key] = watched.peak(), watched.grown()
        return setup

    def _model(self, scaled: Scaled) -> ReplayModel:
        """A new model, which does not wait yet. Those of one share have their memory in common.

        But for a method whose ranks train alone: the steps of others would be changes that it has to see to.
        """
        alone = scaled.cell.method if scaled.method.kind.local_models else ""
        form = scaled.share, scaled.method.whole and scaled.share < 1, alone
        if form not in self._memory:
            first = ReplayModel(scaled.replayed, 0.0)
            for p in first.parameters():
                p.detach().fill_(0.0)  # memory that was only asked for is not there yet
            self._memory[form] = first
        return ReplayModel(scaled.replayed, 0.0, like=self._memory[form])
