"""A node of the paper's cluster: measures the cells of a plan, one after the other. torchrun starts it on every node.

The plan is `paper` in the configuration of the RunSpec that the worker is given (experiments/paper_table.py makes it).
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer
from birder.comm import Communicator, Topology
from experiments.cells import cells, paper, timelines
from experiments.cells.paper import Cell, Method
from experiments.cells.replay import BUCKET_MB, FlatNode, HierarchicalNode, ReplayModel, bucket_delay_ms
from experiments.cells.timelines import Timeline
from experiments.training import worker
from launch.spec import RunSpec


def train(spec: RunSpec) -> None:
    """Measures every cell of the plan; rank 0 writes a record for each as soon as it is there."""
    with cells.world():
        _Node(spec).run()


class _Node(cells.Node):
    """One process, standing for a node of GPUs."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec, paper.EXP)
        self.all = [Cell(**c) for c in self.plan["cells"]]

    def run(self) -> None:
        done = 0
        groups = itertools.groupby(self.all, key=lambda c: (paper.architecture_of(c.model), c.method))
        for (_, name), group in groups:
            method, members = paper.METHODS[name], list(group)
            setup = _Setup(method, timelines.load(members[0].timeline), self.size)
            for cell in members:
                measured = self._measure(setup, cell, method)
                done += 1
                if self.rank == 0:
                    self._write(cell, method, measured)
                    self._say(cell, measured, done)
            setup.close()

    def _measure(self, setup: _Setup, cell: Cell, method: Method) -> dict[str, Any]:
        timeline = timelines.load(cell.timeline)
        dilation = paper.dilation(cell, self.rate)
        setup.follow(timeline, dilation)
        everyone = cells.measure(setup, int(self.plan.get("steps") or method.steps))
        return {"dilation": dilation, "timeline": timeline, "nodes": everyone, "elements": setup.model.elements}

    def _write(self, cell: Cell, method: Method, measured: dict[str, Any]) -> None:
        elements = {"fraction": method.fraction, "elements": measured["elements"], "gpus": paper.GPUS}
        self.write(
            cell.id,
            method,
            measured["timeline"],
            measured["nodes"],
            gpus=measured["timeline"].gpus_per_node,
            about={**cell.as_dict(), **elements},
            dilation=measured["dilation"],
            gbit=float(cell.link) if cell.link else None,
            comm={"topology": method.traffic},
            split=("encode_ms", "update_ms"),
        )

    def _say(self, cell: Cell, measured: dict[str, Any], done: int) -> None:
        worst = max(s["wall_ms"] for n in measured["nodes"] for s in n["steps"])
        where = f"{cell.model} {cell.rate}, {self.size} nodes, {cell.link or '-'} Gbit/s, {cell.method}"
        text = f"{worst / measured['dilation']:8.1f} ms a step ({worst:.0f} ms here)"
        print(f"[{done}/{len(self.all)}] {where}: {text}", flush=True)


class _Setup(cells.Setup):
    """A setup that is used for all timelines and links of an architecture."""

    def __init__(self, method: Method, timeline: Timeline, nodes: int) -> None:
        self.method, self.nodes = method, nodes
        model = ReplayModel(timeline, 0.0, fraction=method.fraction)
        section = {k: v for k, v in method.optimizer.items() if k != "_target_"}
        optimizer: BucketOptimizer = getattr(birder, method.optimizer["_target_"].rpartition(".")[2])(
            model.parameters(), **section
        )
        super().__init__(model, optimizer, self._connect, 1e4 if method.one_bucket else BUCKET_MB * method.fraction)

    def _connect(self, ddp: DistributedDataParallel, optimizer: BucketOptimizer, mb: float) -> birder.Attachment:
        return birder.attach(
            ddp,
            optimizer,
            communicator=self._communicator,
            topology=Topology(self.nodes, 1),
            overlap=self.method.overlap,
            communicate=self.method.wire != "none",
            unit_mb=mb,
        )

    def _communicator(self, group: dist.ProcessGroup, topology: Topology) -> Communicator:
        if self.method.traffic == "hierarchical":
            return HierarchicalNode(group, topology, self.model)
        return FlatNode(group, topology, self.model.timeline.gpus_per_node)

    def follow(self, timeline: Timeline, dilation: float) -> None:
        """The next steps are `timeline`'s, `dilation` times as long."""
        dense = self.method.traffic in ("fp32", "bf16")
        self.model.follow(timeline, dilation, bucket_delay_ms(timeline) if dense else 0.0)

    def step(self) -> dict[str, float]:
        self._take()
        parts = super().step()
        # What happens inside a node is a wait as well, and no work of this machine.
        return {**parts, "encode_ms": 1000 * self._take()}

    def _take(self) -> float:
        """Seconds that exchanges took since the last call, without those in which they waited."""
        comm = self.optimizer.comm
        waited = comm.take_waited() if isinstance(comm, FlatNode | HierarchicalNode) else 0.0
        return max(0.0, self.optimizer.pipeline.take_busy() - waited)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.main(sys.argv[1], train)
