"""A node of the benchmark: measures the cells of a plan, one after the other. torchrun starts it on every node.

The plan is `bench` in the configuration of the RunSpec that the worker is given (experiments/bench_suite.py makes it).
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import os
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import hydra.utils
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer
from birder.comm import Topology
from experiments.cells import bench_plan, cells, timelines
from experiments.cells.bench_plan import METHODS, Cell, Method
from experiments.cells.replay import BUCKET_MB, ReplayModel
from experiments.cells.timelines import Gradient, Timeline
from experiments.training import step_profile, worker
from experiments.training.torch_hooks import attach_hook, low_rank_numbers
from launch.emulated.network import GOODPUT
from launch.spec import RunSpec

PARTS = ("encode_ms", "wire_ms", "exposed_wire_ms", "update_ms")
LARGE = 1 / 8
"""A matrix with more than this share of the model's elements is cut by rows where whole tensors are selected."""


def train(spec: RunSpec) -> None:
    """Measures every cell of the plan; rank 0 writes a record for each as soon as it is there."""
    with cells.world():
        _Node(spec).run()


def select(timeline: Timeline, fraction: float) -> Timeline:
    """A timeline with about `fraction` of the elements in whole tensors: every k-th by size, of matrices and of vectors.

    Tensors of more than `LARGE` of all elements are kept with a fraction of their rows: they have no like.
    """
    if fraction >= 1:
        return timeline
    step = round(1 / fraction)
    kept: list[Gradient] = []
    for vectors in (True, False):
        kind = [g for g in timeline.gradients if (len(g.shape) < 2) is vectors]
        large = [g for g in kind if g.numel > LARGE * timeline.elements]
        others = sorted((g for g in kind if g not in large), key=lambda g: (g.numel, g.name))
        kept += others[step // 2 :: step] or others[-1:]
        kept += [dataclasses.replace(g, shape=(max(1, round(g.shape[0] * fraction)), *g.shape[1:])) for g in large]
    # The step must not end earlier than the model's: a tensor that is ready last is there in any case.
    last = max(timeline.gradients, key=lambda g: (g.ready_ms, -g.numel))
    names = {g.name: g for g in (last, *kept)}
    chosen = tuple(names[g.name] for g in timeline.gradients if g.name in names)
    return dataclasses.replace(timeline, gradients=chosen)


def shares(timeline: Timeline, part: Timeline, rank: int) -> float:
    """Share of the numbers that PowerSGD sends for the whole model which it sends for a selection."""
    sizes = [sum(low_rank_numbers((g.shape for g in t.gradients), rank)) for t in (part, timeline)]
    return sizes[0] / sizes[1]


class _Setup(cells.Setup):
    def __init__(self, model: ReplayModel, method: Method, nodes: int, fraction: float) -> None:
        self.method, self.nodes = method, nodes
        section = {k: v for k, v in method.optimizer.items() if k != "_target_"}
        optimizer = hydra.utils.get_class(method.optimizer["_target_"])(model.parameters(), **section)
        super().__init__(model, optimizer, self._connect, 1e4 if method.one_bucket else BUCKET_MB * fraction)

    def _connect(self, ddp: DistributedDataParallel, optimizer: BucketOptimizer, mb: float) -> Any:
        topology = Topology(self.nodes, 1)
        if self.method.hook:
            return attach_hook(ddp, optimizer, self.method.hook, rank=self.method.rank, topology=topology, unit_mb=mb)
        return birder.attach(
            ddp,
            optimizer,
            topology=topology,
            overlap=self.method.overlap,
            communicate=self.method.wire != "none",
            unit_mb=mb,
        )

    def _warm_up(self) -> None:
        super()._warm_up()
        if self.method.hook == "powersgd":
            self.attachment.begin_compressing()  # buckets are final: compressed from here on
            self.step()

    def state_bytes(self) -> int:
        return int(self.optimizer.state_bytes() + self.attachment.state_bytes())


class _Node(cells.Node):
    """One process, standing for a node of one GPU."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec, bench_plan.EXP)
        self.all = [Cell(**c) for c in self.plan["cells"]]
        self.models: dict[tuple[str, float, bool], ReplayModel] = {}

    def run(self) -> None:
        self._begin()
        for done, cell in enumerate(self.all, start=1):
            method = METHODS[cell.method]
            timeline = timelines.load(self.plan["timelines"][cell.model])
            model, sent = self._model(cell, method, timeline)
            dilation = bench_plan.dilation(cell, sent, self.rate, GOODPUT * 1000 * bench_plan.GBIT)
            memory = Memory()
            model.dilation = 0.0
            setup = _Setup(model, method, self.size, cell.fraction)
            model.dilation = dilation
            nodes = cells.measure(setup, int(self.plan.get("steps") or method.steps))
            facts = {
                "fraction": sent,
                "elements": model.elements,
                "dilation": dilation,
                "state": setup.state_bytes(),
                "peak": memory.peak(),
            }
            if self.plan.get("profile"):
                self._profile(cell, method, setup)
            setup.close()
            del setup
            for p in model.parameters():
                p.grad = None
            if self.rank == 0:
                self._write(cell, method, nodes, facts)
                wall = max(s["wall_ms"] for n in nodes for s in n["steps"])
                where = f"{cell.model}, {cell.link}, {self.size} nodes, {method.label}"
                print(
                    f"[{done}/{len(self.all)}] {where}: {wall / dilation:8.1f} ms a step ({wall:.0f} here)", flush=True
                )

    def _begin(self) -> None:
        """What happens once in a process, and is no cell's: code is loaded, connections are opened."""
        timeline = timelines.load(self.plan["timelines"][self.all[0].model])
        for name in ("fp32", "birder", "onebit_adam"):
            model = ReplayModel(timeline, 0.0, fraction=1e-3)
            setup = _Setup(model, METHODS[name], self.size, 1e-3)
            setup.step()
            setup.close()

    def _model(self, cell: Cell, method: Method, timeline: Timeline) -> tuple[ReplayModel, float]:
        """The model of a cell, and the share of the bytes that it stands for."""
        key = (cell.model, cell.fraction, method.whole and cell.fraction < 1)
        if key not in self.models:
            self.models.clear()  # one at a time: a node has a fraction of this machine's memory
            whole = select(timeline, cell.fraction) if method.whole else timeline
            self.models[key] = ReplayModel(whole, 0.0, fraction=1.0 if method.whole else cell.fraction)
            for p in self.models[key].parameters():
                p.detach().fill_(0.0)  # memory that was only asked for is not there yet
        model = self.models[key]
        if method.whole:
            return model, shares(timeline, model.timeline, method.rank)
        return model, model.elements / timeline.elements

    def _profile(self, cell: Cell, method: Method, setup: _Setup) -> None:
        """One more step, as chrome trace and PNG."""
        kept = step_profile.Kept(1)
        dist.barrier()
        taken = setup.step()
        spans = setup.optimizer.pipeline.trace.last
        kept.keep(1, min(s.begin for s in spans), taken["wall_ms"] / 1000, spans)
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, kept)
        if self.rank == 0:
            title = f"{method.label}, {cell.model}, {bench_plan.LINKS[cell.link]}, {self.size} nodes"
            for path in step_profile.write(everyone, self.spec.path / "profile" / cell.id, title):
                print(f"profile {path}", flush=True)

    def _write(self, cell: Cell, method: Method, nodes: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        self.write(
            cell.id,
            method,
            timelines.load(self.plan["timelines"][cell.model]),
            nodes,
            gpus=1,
            about={**cell.as_dict(), **{k: facts[k] for k in ("fraction", "elements", "peak")}},
            dilation=facts["dilation"],
            gbit=bench_plan.GBIT if cell.link == "emulated" else None,
            comm={"hook": method.hook},
            split=PARTS,
            nodes=cell.nodes,
            ranks_per_node=1,
            state_bytes_per_rank=facts["state"],
        )


class Memory:
    """The most memory that this process has held since the object was made, above what it held then. Linux only."""

    def __init__(self) -> None:
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier cells have freed goes back to the system
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = _status("VmRSS")
        except (OSError, AttributeError):
            self.before = math.nan

    def peak(self) -> int | None:
        """Bytes; None where it cannot be measured."""
        if math.isnan(self.before):
            return None
        return round(_status("VmHWM") - self.before)


def _status(key: str) -> float:
    """A size from /proc/self/status in bytes; NaN where there is none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024.0 * int(value.split()[0])
    return math.nan


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.main(sys.argv[1], train)
