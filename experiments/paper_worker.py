"""A node of the paper's cluster: measures the cells of a plan, one after the other. torchrun starts it on every node.

The plan is `paper` in the configuration of the RunSpec that the worker is given (experiments/paper_table.py makes it).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer
from birder.comm import Communicator, Topology
from experiments import paper, presence, record, timelines, worker
from experiments.nic import NicMeter
from experiments.paper import Cell, Method
from experiments.replay import BUCKET_MB, FlatNode, HierarchicalNode, ReplayModel, bucket_delay_ms
from experiments.spec import RunSpec
from experiments.timelines import Timeline
from launch.network import GOODPUT

TIMEOUT_S, SILENCE_S = 300.0, 60.0
"""How long a collective may take, and how long a node may answer nobody."""


def train(spec: RunSpec) -> None:
    """Measures every cell of the plan; rank 0 writes a record for each as soon as it is there."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
    presence.start(store, rank, world, silence_s=SILENCE_S, join_s=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        _Node(spec).run()
        dist.barrier()
        presence.stop()
    finally:
        dist.destroy_process_group()


class _Node:
    """One process, standing for a node of GPUs."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.plan: dict[str, Any] = spec.config["paper"]
        self.cells = [Cell(**c) for c in self.plan["cells"]]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        # What the launcher measured is the rate that counts; where nothing crosses a link, what it should give.
        self.link: dict[str, Any] = json.loads((spec.path / record.LINK_FILE).read_text()) if self.size > 1 else {}
        self.goodput = float(self.link.get("mbit_per_s") or GOODPUT * float(self.plan["mbit"]))
        self.template: record.ResultRecord | None = None
        if self.rank == 0:
            self.template = record.from_spec(spec, device="cpu")

    def run(self) -> None:
        done = 0
        groups = itertools.groupby(self.cells, key=lambda c: (paper.architecture_of(c.model), c.method))
        for (_, name), group in groups:
            method, members = paper.METHODS[name], list(group)
            setup = _Setup(method, timelines.load(members[0].timeline), self.size)
            for cell in members:
                measured = self._measure(setup, cell, method)
                done += 1
                if self.rank == 0:
                    self._write(cell, method, measured)
                    self._say(cell, measured, done)
            setup.attachment.close()

    def _measure(self, setup: _Setup, cell: Cell, method: Method) -> dict[str, Any]:
        timeline = timelines.load(cell.timeline)
        dilation = paper.dilation(cell, self.goodput)
        setup.follow(timeline, dilation)
        nic = NicMeter()
        dist.barrier()
        setup.attachment.counter.reset()
        nic.resume()
        steps = [setup.step() for _ in range(int(self.plan.get("steps") or method.steps))]
        nic.pause()
        mine = {"steps": steps, "sent": setup.attachment.counter.inter, "nic": nic.total}
        mine["collectives"] = setup.attachment.counter.collectives
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return {"dilation": dilation, "timeline": timeline, "nodes": everyone, "elements": setup.model.elements}

    def _write(self, cell: Cell, method: Method, measured: dict[str, Any]) -> None:
        assert self.template is not None
        nodes, dilation, timeline = measured["nodes"], measured["dilation"], measured["timeline"]
        count = len(nodes[0]["steps"])
        # A step is as long as that of the slowest node.
        walls = sorted(max(n["steps"][i]["wall_ms"] for n in nodes) for i in range(count))
        median = (walls[(count - 1) // 2] + walls[count // 2]) / 2
        split = {
            key: round(sorted(max(n["steps"][i][key] for n in nodes) for i in range(count))[count // 2], 3)
            for key in ("encode_ms", "update_ms")
        }
        nics = [n["nic"] for n in nodes]
        known = all(nic is not None for nic in nics)
        samples = timeline.batch_per_gpu * timeline.gpus_per_node * self.size
        gbit = float(cell.link) if cell.link else None
        link = {**record.LINK, **self.link, "link_gbps": gbit, "dilation": round(dilation, 4)}
        config = {
            **self.spec.config,
            "paper": {
                **cell.as_dict(),
                "fraction": method.fraction,
                "elements": measured["elements"],
                "gpus": paper.GPUS,
            },
            "optimizer": method.optimizer,
            "workload": {**self.spec.config["workload"], "timeline": cell.timeline, "dilation": round(dilation, 4)},
            "comm": {"enabled": method.wire != "none", "overlap": method.overlap, "topology": method.traffic},
        }
        written = dataclasses.replace(
            self.template,
            id=cell.id,
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            config=config,
            optimizer=method.optimizer["_target_"].rpartition(".")[2],
            method=method.label,
            wire=method.wire,
            data={"name": f"replay of {timeline.name}", "synthetic": True},
            link=link,
            timing={
                "steps": count,
                "median_ms": round(median, 3),
                "p10_ms": round(walls[0], 3),
                "p90_ms": round(walls[-1], 3),
                "samples_per_s": round(1000 * samples / median, 3),
                "split": split,
            },
            bytes_per_step={
                "payload_intra": 0,
                "payload_inter": round(sum(n["sent"] for n in nodes) / count / len(nodes)),
                "nic_tx": round(sum(nic[0] for nic in nics) / count / len(nodes)) if known else None,
                "nic_rx": round(sum(nic[1] for nic in nics) / count / len(nodes)) if known else None,
            },
            collectives_per_step=round(nodes[0]["collectives"] / count, 2),
        )
        record.write(written, self.spec.config["results_dir"])

    def _say(self, cell: Cell, measured: dict[str, Any], done: int) -> None:
        worst = max(s["wall_ms"] for n in measured["nodes"] for s in n["steps"])
        where = f"{cell.model} {cell.rate}, {self.size} nodes, {cell.link or '-'} Gbit/s, {cell.method}"
        text = f"{worst / measured['dilation']:8.1f} ms a step ({worst:.0f} ms here)"
        print(f"[{done}/{len(self.cells)}] {where}: {text}", flush=True)


class _Setup:
    """Model, DDP, optimizer and hook of one method; used for all timelines and links of an architecture."""

    def __init__(self, method: Method, timeline: Timeline, nodes: int) -> None:
        self.method = method
        self.model = ReplayModel(timeline, 0.0, fraction=method.fraction)
        section = {k: v for k, v in method.optimizer.items() if k != "_target_"}
        self.optimizer: BucketOptimizer = getattr(birder, method.optimizer["_target_"].rpartition(".")[2])(
            self.model.parameters(), **section
        )
        mb = 1e4 if method.one_bucket else BUCKET_MB * method.fraction
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=mb, gradient_as_bucket_view=True)
        self.attachment = birder.attach(
            self.ddp,
            self.optimizer,
            communicator=self._communicator,
            topology=Topology(nodes, 1),
            overlap=method.overlap,
            communicate=method.wire != "none",
            unit_mb=mb,
        )
        self.update_s = 0.0
        self._time_updates()
        self._warm_up()

    def _communicator(self, group: dist.ProcessGroup, topology: Topology) -> Communicator:
        if self.method.traffic == "hierarchical":
            return HierarchicalNode(group, topology, self.model)
        return FlatNode(group, topology, self.model.timeline.gpus_per_node)

    def _time_updates(self) -> None:
        update = self.optimizer.update

        def timed(step: int, plan: birder.optimizers.base.Plan) -> None:
            began = time.perf_counter()
            update(step, plan)
            self.update_s += time.perf_counter() - began

        self.optimizer.update = timed  # type: ignore[method-assign]

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

    def follow(self, timeline: Timeline, dilation: float) -> None:
        """The next steps are `timeline`'s, `dilation` times as long."""
        dense = self.method.traffic in ("fp32", "bf16")
        self.model.follow(timeline, dilation, bucket_delay_ms(timeline) if dense else 0.0)

    def _backward(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(torch.zeros(1)).sum().backward()

    def step(self) -> dict[str, float]:
        """One optimizer step, and what it took here in milliseconds of this machine's clock."""
        self._take()
        self.update_s = 0.0
        began = time.perf_counter()
        self._backward()
        self.optimizer.step()
        wall = time.perf_counter() - began
        return {"wall_ms": 1000 * wall, "encode_ms": 1000 * self._take(), "update_ms": 1000 * self.update_s}

    def _take(self) -> float:
        """Seconds that exchanges took since the last call, without those in which they waited."""
        comm = self.optimizer.comm
        waited = comm.take_waited() if isinstance(comm, FlatNode | HierarchicalNode) else 0.0
        return max(0.0, self.optimizer.pipeline.take_busy() - waited)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.main(sys.argv[1], train)
