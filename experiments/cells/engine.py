"""The replay engine: a node's process, which torchrun starts, measures the cells of a plan.

experiments/replay.py makes the plan. It stands in the configuration of the RunSpec under the suite's name: {suite, mbit,
steps, profile, cells}. Cells that are compared take turns, in shuffled order: one step of each in every round. Rank 0
writes their records as soon as their rounds are over.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import statistics

import torch
import torch.distributed as dist

from experiments.cells import suite
from experiments.cells.model import ReplayModel
from experiments.cells.setups import Setup, Setups
from experiments.cells.suite import Measurement, Scaled, Suite
from experiments.cells.timelines import flattened
from experiments.records import record
from experiments.training import machine, step_profile, traffic, worker
from experiments.training.world import gathered, joined
from experiments.workloads.base import Shard
from launch import link_file
from launch.emulated.measure import TOLERANCE
from launch.emulated.network import GOODPUT
from launch.spec import RunSpec
from launch.words import say

TIMEOUT_S, SILENCE_S = 300.0, 60.0
"""How long a collective may take, and how long a node may answer nobody."""


def train(spec: RunSpec) -> None:
    """Measures every cell of the plan."""
    torch.set_num_threads(1)
    with joined("gloo", TIMEOUT_S, SILENCE_S):
        Node(spec).run()


def carried(link: dict[str, Any], mbit: float) -> float:
    """Mbit/s of TCP that links set to `mbit` carry. link: what the launcher knows of them; empty where nothing crosses one.

    That is what their token buckets let through: the launcher's short measurement is a few percent off, by the bucket's
    first burst or by a moment in which the machine was busy. Where it is further off this machine cannot carry so much,
    and what was measured counts.
    """
    nominal, measured = GOODPUT * mbit, float(link.get("mbit_per_s") or 0.0)
    return measured if measured and abs(measured / nominal - 1) > TOLERANCE else nominal


class Node:
    """One process, standing for a node of the suite's GPUs."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.plan = spec, spec.config[spec.exp]
        self.suite = Suite.model_validate(self.plan["suite"])
        self.cells = [Measurement(**c) for c in self.plan["cells"]]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.shard = Shard(self.rank, self.size)
        self.link = link_file.read(spec.path)
        self.rate = carried(self.link, float(self.plan["mbit"]))
        self.rounds = int(self.plan.get("steps") or self.suite.rounds_on(self.size))
        self._template = record.from_spec(spec, device="cpu") if self.rank == 0 else None
        self._done = 0

    def run(self) -> None:
        """Measures everything. Setups are kept for the cells of an architecture, as far as memory holds them."""
        self._begin()
        for _, group in itertools.groupby(self.cells, key=lambda c: self.suite.architecture(c.model)):
            cells = [suite.scale(self.suite, c, self.rate) for c in group]
            with Setups(self.suite, cells) as setups:
                for compared in suite.comparisons(cells):
                    self._measure(compared, setups)

    def _begin(self) -> None:
        """What happens once in a process and belongs to no cell: loading code, opening connections."""
        timeline = self.suite.timeline(self.cells[0].model, self.cells[0].rate)
        names = dict.fromkeys(c.method for c in self.cells if not self.suite.methods[c.method].hook)
        for method in {m.optimizer["_target_"]: m for m in map(self.suite.methods.__getitem__, names)}.values():
            model = ReplayModel(flattened(timeline, 1e-3), 0.0)
            setup = Setup(method, model, 1e-3, self.suite.gpus_per_node)
            setup.step()
            setup.close()

    def _measure(self, cells: Sequence[Scaled], setups: Setups) -> None:
        """The rounds of cells that are compared, and their records."""
        mine: dict[Measurement, list[dict[str, Any]]] = {s.cell: [] for s in cells}
        name = ", ".join(filter(None, [cells[0].cell.model, cells[0].cell.rate]))
        before, began = gathered(machine.read()), time.monotonic()
        for number in range(self.rounds):
            for same in self._order(cells, number):
                with setups.use(same[0]) as setup:
                    for s in same:
                        setup.follow(s)
                        mine[s.cell].append(setup.turn())
                        if number + 1 == self.rounds and self.plan.get("profile"):
                            self._profile(s, setup)
            if self.rank == 0:
                left = (time.monotonic() - began) * (self.rounds / (number + 1) - 1)
                say(f"{name}, {self.size} nodes: round {number + 1}/{self.rounds}, {left:.0f} s left")
        busy = machine.busy(before, gathered(machine.read()))
        about = {"world": f"{self.spec.id}, {name}", "seed": self.spec.seed, "busy": busy}
        for s in cells:
            held = {"held": "all" if setups.holds(s) else "one"}
            made = self._record(s, mine[s.cell], setups.peaks[s.key], {**about, **held})
            self._done += 1
            if made is not None:
                record.write(made, self.spec.config["results_dir"])
                where = filter(None, [s.cell.model, s.cell.rate, s.cell.link, f"{self.size} nodes", made.method])
                wall = made.timing["median_ms"]
                took = f"{wall / s.dilation:.1f} ms a step ({wall:.0f} here)"
                say(f"[{self._done}/{len(self.cells)}] {', '.join(where)}: {took}")

    def _order(self, cells: Sequence[Scaled], number: int) -> list[list[Scaled]]:
        """Whose turn it is in a round, shuffled, the same on every node. Cells that share a setup stand together."""
        draw = random.Random(f"{self.spec.seed} {cells[0].cell.model} {cells[0].cell.rate} {number} turns")
        found: dict[tuple[str, float], list[Scaled]] = {}
        for s in draw.sample(list(cells), len(cells)):
            found.setdefault(s.key, []).append(s)
        return list(found.values())

    def _profile(self, s: Scaled, setup: Setup) -> None:
        """One more step, as chrome trace and PNG."""
        kept, cell = step_profile.KeptSpans(1), s.cell
        dist.barrier()
        taken = setup.step()
        spans = setup.optimizer.pipeline.trace.last
        kept.keep(1, min(s.begin for s in spans), taken["wall_ms"] / 1000, spans)
        everyone = gathered(kept)
        if self.rank == 0:
            at = self.suite.links[cell.link].title if cell.link else "any link"
            model = self.suite.models[cell.model].title.partition(",")[0]
            title = f"{s.method.label}, {model}, {at}, {self.size} nodes"
            for path in step_profile.write(everyone, self.spec.path / "profile" / self.suite.id(cell), title):
                say(f"profile: {path}")

    def _record(
        self, s: Scaled, turns: Sequence[dict[str, Any]], peak: int | None, about: dict[str, Any]
    ) -> record.ResultRecord | None:
        """A cell's record, on rank 0. turns: what this node found. about: the rounds. Called on every node."""
        steps, nics = len(turns) * s.method.every, [t["nic"] for t in turns]
        nic = None if None in nics else (sum(tx for tx, _ in nics), sum(rx for _, rx in nics))
        sent = traffic.per_step((0, sum(t["sent"] for t in turns)), nic, self.size, steps, self.shard)
        slow = slowest(gathered(turns))
        if self._template is None:
            return None
        cell, method, gpus = s.cell, s.method, self.suite.gpus_per_node
        sends = {"enabled": method.wire != "none", "overlap": method.overlap}
        facts = {"fraction": s.sent, "share": s.share, "elements": s.replayed.elements, "peak": peak, "gpus": gpus}
        config = {
            **self._template.config,
            self.suite.name: {**cell._asdict(), **facts},
            "optimizer": method.optimizer,
            "workload": {**self.spec.config["workload"], "timeline": s.timeline.name, "dilation": s.dilation},
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
            data={"name": f"replay of {s.timeline.name}", "synthetic": True},
            link={**record.LINK, **self.link, "link_gbps": gbit, "dilation": s.dilation},
            timing=timing_of(slow, s.timeline.batch_per_gpu * gpus * self.size),
            bytes_per_step={**record.BYTES, **sent},
            collectives_per_step=round(sum(t["collectives"] for t in turns) / steps, 2),
            state_bytes_per_rank=turns[-1]["state"],
            turns={**about, "ms": [round(ms, 4) for ms in slow["wall_ms"]], "steps": [1] * len(turns)},
        )


# ---- from the turns of a cell to the fields of its record -------------------------------------------------------------

PARTS = ("encode_ms", "wire_ms", "exposed_wire_ms", "update_ms")


def slowest(nodes: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float]]:
    """Of every step and part of it what it took on the node where it took longest. nodes: the turns of each."""
    same = list(zip(*nodes, strict=True))
    return {key: [max(turn[key] for turn in turns) for turns in same] for key in ("wall_ms", *PARTS)}


def timing_of(slow: dict[str, list[float]], samples: int) -> dict[str, Any]:
    """The record's `timing`; slow: of `slowest`. samples: of all nodes.

    With so few steps there are no percentiles: min_ms and max_ms, and every step in steps_ms, in their order.
    """
    walls = slow["wall_ms"]
    median = statistics.median(walls)
    return {
        "steps": len(walls),
        "median_ms": round(median, 3),
        "min_ms": round(min(walls), 3),
        "max_ms": round(max(walls), 3),
        "steps_ms": [round(ms, 3) for ms in walls],
        "samples_per_s": round(1000 * samples / median, 3),
        "split": {key: round(statistics.median_high(slow[key]), 3) for key in PARTS},
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker.main(sys.argv[1], train)
