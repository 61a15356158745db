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

from experiments.cells import scaling
from experiments.cells.held import Setups
from experiments.cells.model import ReplayModel
from experiments.cells.scaling import Scaled
from experiments.cells.setup import Setup
from experiments.cells.suite import Cell, Suite
from experiments.records import record
from experiments.training import machine, step_profile, worker
from experiments.training.world import gathered, joined
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
        self.cells = [Cell(**c) for c in self.plan["cells"]]
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.link = link_file.read(spec.path)
        self.rate = carried(self.link, float(self.plan["mbit"]))
        self.rounds = int(self.plan.get("steps") or self.suite.rounds_on(self.size))
        self._template = record.from_spec(spec, device="cpu") if self.rank == 0 else None
        self._done = 0

    def run(self) -> None:
        """Measures everything. Setups are kept for the cells of an architecture, as far as memory holds them."""
        self._begin()
        for _, group in itertools.groupby(self.cells, key=lambda c: self.suite.architecture(c.model)):
            cells = [scaling.scale(self.suite, c, self.rate) for c in group]
            with Setups(self.suite, cells) as setups:
                for compared in scaling.comparisons(cells):
                    self._measure(compared, setups)

    def _begin(self) -> None:
        """What happens once in a process and belongs to no cell: loading code, opening connections."""
        timeline = self.suite.timeline(self.cells[0].model, self.cells[0].rate)
        names = dict.fromkeys(c.method for c in self.cells if not self.suite.methods[c.method].hook)
        for method in {m.optimizer["_target_"]: m for m in map(self.suite.methods.__getitem__, names)}.values():
            model = ReplayModel(timeline, 0.0, fraction=1e-3)
            setup = Setup(method, model, 1e-3, self.size, self.suite.gpus_per_node)
            setup.step()
            setup.close()

    def _measure(self, cells: Sequence[Scaled], setups: Setups) -> None:
        """The rounds of cells that are compared, and their records."""
        mine: dict[Cell, list[dict[str, Any]]] = {s.cell: [] for s in cells}
        name = ", ".join(filter(None, [cells[0].cell.model, cells[0].cell.rate]))
        before, began = gathered(machine.read()), time.monotonic()
        for number in range(self.rounds):
            for same in self._order(cells, number):
                with setups.use(same[0]) as setup:
                    for s in same:
                        setup.follow(s.replayed, s.dilation)
                        mine[s.cell].append(setup.turn(1))
                        if number + 1 == self.rounds and self.plan.get("profile"):
                            self._profile(s, setup)
            if self.rank == 0:
                left = (time.monotonic() - began) * (self.rounds / (number + 1) - 1)
                say(f"{name}, {self.size} nodes: round {number + 1}/{self.rounds}, {left:.0f} s left")
        busy = machine.busy(before, gathered(machine.read()))
        everyone = gathered({cell: together(turns) for cell, turns in mine.items()})
        about = {"world": f"{self.spec.id}, {name}"}
        for s in cells:
            nodes = [of[s.cell] for of in everyone]
            self._done += 1
            if self._template is None:
                continue
            steps = [round(ms, 4) for ms in slowest_ms(nodes, "wall_ms")]
            held = "all" if setups.holds(s) else "one"
            turns = {
                **about,
                "seed": self.spec.seed,
                "held": held,
                "ms": steps,
                "steps": [1] * len(steps),
                "busy": busy,
            }
            made = self._record(s, nodes, setups.peaks[s.key], turns)
            record.write(made, self.spec.config["results_dir"])
            self._say(s, made.timing["median_ms"])

    def _order(self, cells: Sequence[Scaled], number: int) -> list[list[Scaled]]:
        """Whose turn it is in a round, shuffled, the same on every node. Cells that share a setup stand together."""
        draw = random.Random(f"{self.spec.seed} {cells[0].cell.model} {cells[0].cell.rate} {number} turns")
        found: dict[tuple[str, float], list[Scaled]] = {}
        for s in draw.sample(list(cells), len(cells)):
            found.setdefault(s.key, []).append(s)
        return list(found.values())

    def _say(self, s: Scaled, wall: float) -> None:
        cell = s.cell
        where = ", ".join(filter(None, [cell.model, cell.rate, cell.link, f"{self.size} nodes", s.method.label]))
        done = f"[{self._done}/{len(self.cells)}]"
        say(f"{done} {where}: {wall / s.dilation:.1f} ms a step ({wall:.0f} here)")

    def _profile(self, s: Scaled, setup: Setup) -> None:
        """One more step, as chrome trace and PNG."""
        kept, cell = step_profile.Kept(1), s.cell
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
        self, s: Scaled, nodes: Sequence[dict[str, Any]], peak: int | None, turns: dict[str, Any]
    ) -> record.ResultRecord:
        assert self._template is not None
        cell, method, gpus = s.cell, s.method, self.suite.gpus_per_node
        sends = {"enabled": method.wire != "none", "overlap": method.overlap}
        facts = {"fraction": s.sent, "share": s.share, "elements": s.elements, "peak": peak, "gpus": gpus}
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
            timing=timing_of(nodes, s.timeline.batch_per_gpu * gpus * self.size),
            bytes_per_step=sent_bytes(nodes),
            collectives_per_step=round(nodes[0]["collectives"] / len(nodes[0]["steps"]), 2),
            state_bytes_per_rank=nodes[0]["state"],
            turns=turns,
        )


# ---- from the turns of a cell to the fields of its record -------------------------------------------------------------

PARTS = ("encode_ms", "wire_ms", "exposed_wire_ms", "update_ms")


def together(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One node's turns (`Setup.turn`) as one: steps in their order, the state at the end, sums of the rest."""
    nics = [t["nic"] for t in turns]
    return {
        "steps": [s for t in turns for s in t["steps"]],
        "sent": sum(t["sent"] for t in turns),
        "collectives": sum(t["collectives"] for t in turns),
        "state": turns[-1]["state"],
        "nic": None if None in nics else (sum(nic[0] for nic in nics), sum(nic[1] for nic in nics)),
    }


def slowest_ms(nodes: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Of every step what it took on the node where it took longest. nodes: what `together` returned on each."""
    return [max(n["steps"][i][key] for n in nodes) for i in range(len(nodes[0]["steps"]))]


def timing_of(nodes: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """The record's `timing`; a step is as long as that of the slowest node. samples: of all nodes.

    With so few steps there are no percentiles: min_ms and max_ms, and every step in steps_ms, in their order.
    """
    walls = slowest_ms(nodes, "wall_ms")
    median = statistics.median(walls)
    return {
        "steps": len(walls),
        "median_ms": round(median, 3),
        "min_ms": round(min(walls), 3),
        "max_ms": round(max(walls), 3),
        "steps_ms": [round(ms, 3) for ms in walls],
        "samples_per_s": round(1000 * samples / median, 3),
        "split": {key: round(statistics.median_high(slowest_ms(nodes, key)), 3) for key in PARTS},
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
