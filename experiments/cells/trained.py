"""Methods that took turns in one world on emulated links, predicted from its bound, its links and its machine. No torch.

What is known of a world before any method has its turn (experiments/timing): when the bound comes to each of DDP's buckets,
the rate that the links were set to, what kernels and exchanges cost the cores that the ranks share, and what messages that
mean nothing cost on top of the bound (experiments/timing/profiled.py). No time of a method's own is used, but what the update
of dense methods takes: it is the user's optimizer, and has nothing to do with communication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from birder.predict import METHODS, Cluster, Costs, Layout, Link, Timeline, simulate
from birder.predict.timeline import Gradient, IntraNode
from experiments.records.record import ResultRecord
from launch.emulated.network import GOODPUT, burst_bytes

NAMES = {
    **{(optimizer, wire): wire for optimizer in ("SGDM", "AdamW", "BertAdam") for wire in ("fp32", "bf16")},
    ("Birder", "1bit"): "birder",
    ("1-bit Adam", "1bit"): "onebit_adam",
}
"""Rows that are predicted, by optimizer and wire."""
PIECES = Layout(0.0, 0.0, 0.0, gpu=False, shared=True)
"""Every gradient of `timeline` is a bucket of DDP's, or a unit of optimizers, by itself."""

BITS = dataclasses.replace(
    METHODS["birder"],
    name="bits",
    rounds=(dataclasses.replace(METHODS["birder"].rounds[0], encode=(), serve=()),),
    update=(),
)
"""What `bits_ms` of a profile measured, above the bound: bits that are sent, and nothing else."""
OPEN_MBIT = 1e6
"""Of links that are open: what they cost is what sending costs the cores."""


@dataclass(frozen=True)
class Trained:
    """One row. Times in ms of the machine's clock."""

    record: ResultRecord
    predicted_ms: float

    @property
    def measured_ms(self) -> float:
        return float(self.record.timing["median_ms"])

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1


def of_world(records: Sequence[ResultRecord]) -> list[Trained]:
    """The rows of one world, in the order of its records: those for which it measured what the prediction needs."""
    bound = next((r for r in records if r.wire == "none" and r.status == "completed"), None)
    profile = bound.turns.get("profile") if bound else None
    if bound is None or not profile or not bound.turns.get("ready"):
        return []
    costs = Costs(profile["kernels"], profile["call_us"], sending_ns=profile["sending"], source="measured")
    updates = [r.timing.get("update_ms") for r in records if r.wire == "fp32" and r.status == "completed"]
    update = min((ms for ms in updates if ms), default=0.0)
    buffers = profile["buffer_bytes"]
    hops = math.ceil(math.log2(bound.nodes))  # of a broadcast, in a tree
    by_wire = {"dense": timeline(bound), "onebit": timeline(bound, profile.get("units"))}
    besides = besides_ms(bound, by_wire["onebit"], costs)
    found = []
    for r in records:
        name = NAMES.get((r.method.removesuffix(f" {r.wire}"), r.wire))
        rate = r.link.get("set_mbit_per_s")
        if name is None or r.status != "completed" or not rate:
            continue
        more = 0.0 if METHODS[name].dense else besides
        if more is None:
            continue
        link = link_at(rate, r.nodes, profile["small_ms"])
        step = simulate(
            by_wire[METHODS[name].rounds[0].wire], Cluster(r.nodes, 1, link, ring=False), METHODS[name], costs, PIECES
        )
        ms = step.ms + (hops * (8e-6 * buffers / link.gbps + profile["small_ms"]) if buffers else 0.0)
        ms += more + (update - step.update_ms if METHODS[name].dense else 0.0)
        found.append(Trained(r, ms))
    return found


def besides_ms(bound: ResultRecord, step: Timeline, costs: Costs) -> float | None:
    """What a step of a compressed method takes besides its kernels and its wire; None where the world did not measure it.

    As measured with bits that mean nothing, less what the simulation knows of it.
    """
    profile = bound.turns["profile"]
    if "bits_ms" not in profile:
        return None
    opened = link_at(OPEN_MBIT, bound.nodes, profile["small_ms"])
    known = simulate(step, Cluster(bound.nodes, 1, opened, ring=False), BITS, costs, PIECES).ms - step.step_ms
    return max(0.0, float(profile["bits_ms"]) - known)


def link_at(mbit: float, nodes: int, small_ms: float) -> Link:
    """An emulated link of a set rate. small_ms: of an exchange of next to nothing, a message of each rank to every other."""
    peers = nodes - 1
    hop = small_ms / peers
    return Link(mbit * GOODPUT / 1e3, 1e3 * hop, 1e3 * (small_ms - hop) / peers, burst_bytes=burst_bytes(mbit))


def paced(ready: Sequence[Sequence[float]], step_ms: float) -> list[tuple[float, float]]:
    """[elements, ms] of each bucket, at the pace of a bound's step that takes so long.

    Buckets are timed on the slowest rank of each step, the bound on that of each turn: the last may come after its end.
    """
    pace = min(1.0, step_ms / ready[-1][1])
    return [(elements, pace * at) for elements, at in ready]


def timeline(bound: ResultRecord, units: Sequence[Sequence[int]] | None = None) -> Timeline:
    """A step of the bound: a gradient for each of DDP's buckets, or of `units`, [elements, bucket] each.

    Older records do not hold units. They are about the buckets: both are cut at 25 MB.
    """
    step_ms = float(bound.timing["median_ms"])
    ready = paced(bound.turns["ready"], step_ms)
    if units:
        ready = [(numel, ready[bucket][1]) for numel, bucket in units]
    gradients = tuple(Gradient(f"piece {k}", (int(numel),), at) for k, (numel, at) in enumerate(ready))
    return Timeline(
        name=bound.group or bound.id,
        model=bound.workload,
        gpu="cpu",
        precision="fp32",
        batch_per_gpu=1,
        gpus_per_node=1,
        forward_ms=gradients[0].ready_ms,
        step_ms=step_ms,
        gradients=gradients[::-1],
        intra_node=IntraNode.of(1, 1),
        command=bound.command,
    )
