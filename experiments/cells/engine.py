"""The replay engine: a node's process, which torchrun starts, measures the cells of a plan one after the other.

experiments/replay.py makes the plan. It stands in the configuration of the RunSpec under the suite's name: {suite, mbit,
steps, profile, cells}. Rank 0 writes a record for each cell as soon as it is there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist

from birder.predict.timeline import Timeline
from experiments.cells.model import ReplayModel
from experiments.cells.selection import select, shares
from experiments.cells.setup import Memory, Setup, gathered
from experiments.cells.suite import Cell, Method, Suite
from experiments.records import record
from experiments.training import heartbeat, step_profile, worker
from launch.emulated.network import GOODPUT
from launch.spec import RunSpec

TIMEOUT_S, SILENCE_S = 300.0, 60.0
"""How long a collective may take, and how long a node may answer nobody."""
PARTS = ("encode_ms", "wire_ms", "exposed_wire_ms", "update_ms")


def train(spec: RunSpec) -> None:
    """Measures every cell of the plan."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    heartbeat.start(store, rank, size, silence_s=SILENCE_S, join_s=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        Node(spec).run()
        dist.barrier()
        heartbeat.stop()
    finally:
        dist.destroy_process_group()


class Node:
    """One process, standing for a node of the suite's GPUs."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.plan = spec, spec.config[spec.exp]
        self.suite = Suite.model_validate(self.plan["suite"])
        self.cells = [Cell(**c) for c in self.plan["cells"]]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        path = spec.path / record.LINK_FILE
        self.link: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        self.rate = float(self.link.get("mbit_per_s") or GOODPUT * float(self.plan["mbit"]))
        """Mbit/s of the links: what the launcher measured; where nothing crosses a link, what it should give."""
        self._template = record.from_spec(spec, device="cpu") if self.rank == 0 else None
        self._kept: tuple[Any, ReplayModel] | None = None
        self._done = 0

    def run(self) -> None:
        """Measures everything. Cells that share a model, a share of it and a method are measured with one setup."""
        self._begin()
        key = lambda c: (self.suite.architecture(c.model), c.method, self.suite.fraction(c))  # noqa: E731
        for (_, name, fraction), group in itertools.groupby(self.cells, key=key):
            cells, method = list(group), self.suite.methods[name]
            model = self._model(cells[0], method, fraction)
            memory = Memory()
            setup = Setup(method, model, fraction, self.size, self.suite.gpus_per_node)
            for cell in cells:
                self._measure(cell, method, setup, fraction, memory)
            setup.close()
            del setup

    def _begin(self) -> None:
        """What happens once in a process, and is no cell's: code is loaded, connections are opened."""
        timeline = self.suite.timeline(self.cells[0].model, self.cells[0].rate)
        names = dict.fromkeys(c.method for c in self.cells if not self.suite.methods[c.method].hook)
        for method in {m.optimizer["_target_"]: m for m in map(self.suite.methods.__getitem__, names)}.values():
            model = ReplayModel(timeline, 0.0, fraction=1e-3)
            setup = Setup(method, model, 1e-3, self.size, self.suite.gpus_per_node)
            setup.step()
            setup.close()

    def _model(self, cell: Cell, method: Method, fraction: float) -> ReplayModel:
        """The model of a cell, which does not wait yet."""
        key = (self.suite.architecture(cell.model), fraction, method.whole and fraction < 1)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # one at a time: a node has a fraction of this machine's memory
            model = ReplayModel(self._timeline(cell, fraction), 0.0, fraction=1.0 if method.whole else fraction)
            for p in model.parameters():
                p.detach().fill_(0.0)  # memory that was only asked for is not there yet
            self._kept = key, model
        self._kept[1].dilation = 0.0
        return self._kept[1]

    def _timeline(self, cell: Cell, fraction: float) -> Timeline:
        whole = self.suite.timeline(cell.model, cell.rate)
        return select(whole, fraction) if self.suite.methods[cell.method].whole else whole

    def _measure(self, cell: Cell, method: Method, setup: Setup, fraction: float, memory: Memory) -> None:
        whole, part = self.suite.timeline(cell.model, cell.rate), self._timeline(cell, fraction)
        sent = shares(whole, part, method.rank) if method.whole else setup.model.elements / whole.elements
        dilation = round(self.suite.dilation(cell, sent, self.rate), 6)
        setup.follow(part, dilation)
        nodes = setup.measure(int(self.plan.get("steps") or method.steps))
        facts = {"fraction": sent, "elements": setup.model.elements, "peak": memory.peak()}
        facts["gpus"] = self.suite.gpus_per_node
        state = int(setup.optimizer.state_bytes() + setup.attachment.state_bytes())
        if self.plan.get("profile"):
            self._profile(cell, method, setup)
        self._done += 1
        if self._template is None:
            return
        record.write(self._record(cell, method, whole, nodes, facts, dilation, state), self.spec.config["results_dir"])
        wall = max(s["wall_ms"] for n in nodes for s in n["steps"])
        where = ", ".join(filter(None, [cell.model, cell.rate, cell.link, f"{self.size} nodes", method.label]))
        print(
            f"[{self._done}/{len(self.cells)}] {where}: {wall / dilation:8.1f} ms a step ({wall:.0f} here)", flush=True
        )

    def _profile(self, cell: Cell, method: Method, setup: Setup) -> None:
        """One more step, as chrome trace and PNG."""
        kept = step_profile.Kept(1)
        dist.barrier()
        taken = setup.step()
        spans = setup.optimizer.pipeline.trace.last
        kept.keep(1, min(s.begin for s in spans), taken["wall_ms"] / 1000, spans)
        everyone = gathered(kept)
        if self.rank == 0:
            at = self.suite.links[cell.link].title if cell.link else "any link"
            title = f"{method.label}, {cell.model}, {at}, {self.size} nodes"
            for path in step_profile.write(everyone, self.spec.path / "profile" / self.suite.id(cell), title):
                print(f"profile {path}", flush=True)

    def _record(
        self,
        cell: Cell,
        method: Method,
        timeline: Timeline,
        measured: list[dict[str, Any]],
        facts: dict[str, Any],
        dilation: float,
        state: int,
    ) -> record.ResultRecord:
        assert self._template is not None
        samples = timeline.batch_per_gpu * self.suite.gpus_per_node * self.size
        sends = {"enabled": method.wire != "none", "overlap": method.overlap}
        config = {
            **self._template.config,
            self.suite.name: {**cell.as_dict(), **facts},
            "optimizer": method.optimizer,
            "workload": {**self.spec.config["workload"], "timeline": timeline.name, "dilation": dilation},
            "comm": {**sends, "topology": "hierarchical" if method.hierarchical else "flat", "hook": method.hook},
        }
        gbit = self.suite.links[cell.link].gbit if cell.link else None
        return dataclasses.replace(
            self._template,
            id=self.suite.id(cell),
            time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            config=config,
            optimizer=method.optimizer["_target_"].rpartition(".")[2],
            method=method.label,
            wire=method.wire,
            data={"name": f"replay of {timeline.name}", "synthetic": True},
            link={**record.LINK, **self.link, "link_gbps": gbit, "dilation": dilation},
            timing=timing(measured, samples),
            bytes_per_step=sent_bytes(measured),
            collectives_per_step=round(measured[0]["collectives"] / len(measured[0]["steps"]), 2),
            state_bytes_per_rank=state,
        )


def timing(nodes: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """The record's `timing`; a step is as long as that of the slowest node. samples: of all nodes.

    With so few steps there are no percentiles: min_ms and max_ms, and every step in steps_ms, in their order.
    """
    count = len(nodes[0]["steps"])

    def slowest(key: str) -> list[float]:
        return [max(n["steps"][i][key] for n in nodes) for i in range(count)]

    walls = slowest("wall_ms")
    median = statistics.median(walls)
    return {
        "steps": count,
        "median_ms": round(median, 3),
        "min_ms": round(min(walls), 3),
        "max_ms": round(max(walls), 3),
        "steps_ms": [round(ms, 3) for ms in walls],
        "samples_per_s": round(1000 * samples / median, 3),
        "split": {key: round(statistics.median_high(slowest(key)), 3) for key in PARTS},
    }


def sent_bytes(nodes: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The record's `bytes_per_step`: per node and step."""
    per = len(nodes[0]["steps"]) * len(nodes)
    nics = [n["nic"] for n in nodes]
    known = all(nic is not None for nic in nics)
    return {
        "payload_intra": 0,
        "payload_inter": round(sum(n["sent"] for n in nodes) / per),
        "nic_tx": round(sum(nic[0] for nic in nics) / per) if known else None,
        "nic_rx": round(sum(nic[1] for nic in nics) / per) if known else None,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.main(sys.argv[1], train)
