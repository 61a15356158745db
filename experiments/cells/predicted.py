"""A replayed cell, predicted: from its set-up and from what its machine costs, without any time of that cell. No torch.

A cell ran on one machine whose processes stand for nodes (docs/replay.md). What is predicted is the time there; divided
by the dilation it is the cluster's. `Machine` holds what is not in a cell's set-up: fitted to the cells of one model, it
predicts those of the other (results/published/predict/machines.json, made by `python experiments/predict.py --fit`).

    a node's work   kernels as in birder/predict/costs.py times k(N), for N processes share the machine's cores: k(1) =
    k(2) = 1 its link        the rate that was set, times 0.945 for headers (launch/emulated/network.py), times `rate`;
    loopback: `rate` / s(N) inside a node   constants of the timeline, as in the replay
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from birder.predict import METHODS, Cluster, Costs, Layout, Link, Method, Step, Timeline, simulate
from birder.predict.cluster import NOTHING, Transfer
from birder.predict.simulation import items_of
from experiments.cells import suite, timelines
from experiments.cells.selection import flattened, select
from experiments.cells.suite import Cell, Suite
from experiments.cells.traffic import BUCKET_MB, bucket_delay_ms
from experiments.records.record import ResultRecord
from launch.emulated.network import GOODPUT

BURST_BYTES = 80e3
"""The token bucket of an emulated link (docs/replay.md)."""
WHOLE = 1e4
"""MB of a bucket that holds everything."""
SAME = {"fp32_serial": "fp32", "bf16_hook": "bf16", "fp16_hook": "fp16"}
START: dict[str, dict[str, float]] = {
    "emulated": {"rate": 1.0, "unfair_ms": 10.0},
    "loopback": {"rate": 6.0, "s4": 2.5, "s8": 5.0, "half": 2.0, "m4": 2.5, "m8": 6.0},
}
COMMON = {
    "k4": 2.0,
    "k8": 4.5,
    "latency_ms": 0.1,
    "message_ms": 0.3,
    "call_us": 60.0,
    "tensor_us": 5.0,
    "fast": 1.2,
    "copy": 0.08,
    "scale": 0.1,
    "cast": 0.15,
    "sgdm": 0.06,
    "sgdm_tensor_us": 5.0,
    "eager": 0.03,
    "low_rank": 0.2,
    "low_rank_tensor_us": 60.0,
}
"""Where fits begin. Times of kernels in ns per byte, but `fast`, a factor on what the kernel benchmark measured."""
DENSE = ("sgdm",)
"""On loopback 4 and 8 processes share the cores by factors of its own, `m4` and `m8`: it uses the memory that all share."""
EAGER = ("eager", "unpack_rows")
"""There they share them as work that is only divided: 2 and 4 times as long."""


@dataclass(frozen=True)
class Machine:
    """The machine that cells ran on. values: `COMMON` and `START[link]`. kernels: ns per byte, from the kernel
    benchmark's record.

    latency_ms: of a hop of an all-reduce, message_ms: of a message of a pairwise exchange, both times k(N), being work
    of the CPU. call_us: to start a kernel; tensor_us: for each tensor that a kernel goes through. unfair_ms: as in `Link`.
    """

    link: str
    values: Mapping[str, float]
    kernels: Mapping[str, float]

    def shared(self, nodes: int, what: str = "k") -> float:
        """k(N) or s(N)."""
        return 1.0 if nodes <= 2 else self.values[f"{what}{nodes}"]

    def costs(self, nodes: int) -> Costs:
        """What kernels cost where `nodes` processes share the machine."""
        v, each = self.values, self.values["tensor_us"]
        rates = {name: ns * v["fast"] for name, ns in self.kernels.items()}
        rates |= dict.fromkeys(("move_adam", "owned", "assemble", "copy"), v["copy"] * v["fast"])
        rates |= {name: v[name] for name in ("sgdm", "eager", "low_rank", "cast", "scale")}
        rates["widen"] = v["cast"]
        tensors = {"sgdm": v["sgdm_tensor_us"], "low_rank": v["low_rank_tensor_us"]}
        tensors |= {"apply_bits": 2 * each, "move_adam": each, "copy": each, "eager": each}
        rates["unpack_rows"] = v["eager"]
        k = self.shared(nodes)
        if self.link == "loopback" and nodes > 2:
            rates |= {name: rates[name] * self.shared(nodes, "m") / k for name in DENSE}
            rates |= {name: rates[name] * nodes / 2 / k for name in EAGER}
        return Costs({**rates, "": 0.1}, v["call_us"], tensors).times(k)

    def cluster(self, of: Case) -> Nodes:
        """The nodes of a cell."""
        nodes, v, k = of.nodes, self.values, self.shared(of.nodes)
        hop, message = 1e3 * v["latency_ms"] * k, 1e3 * v["message_ms"] * k
        if of.set_mbit is None:
            # gloo adds up numbers of 16 bits one by one, which on loopback is most of what such an all-reduce takes.
            slower = v["half"] if of.method.name in ("bf16", "fp16") else 1.0
            link = Link(v["rate"] / self.shared(nodes, "s") / slower, hop, message)
        else:
            rate = of.set_mbit * GOODPUT * v["rate"] / 1e3
            link = Link(rate, hop, message, v["unfair_ms"], BURST_BYTES)
        return Nodes(nodes, 1, link, ring=False, copies=of.copies, inside_ms_per_byte=of.inside_ms_per_byte)


@dataclass(frozen=True)
class Nodes(Cluster):
    """Processes that stand for nodes: what `FlatNode` sends and `HierarchicalNode` waits for (experiments/cells/replay.py).

    copies: GPUs of a node where each sends its own bits. inside_ms_per_byte: of a reduce-scatter or an all-gather over
    NVLink.
    """

    copies: int = 1
    inside_ms_per_byte: float = 0.0

    def all_to_all(self, nbytes: float) -> Transfer:
        peers = self.nodes - 1
        return self.between.exchange(self.copies * peers / self.nodes * nbytes, peers, peers)

    def all_gather(self, nbytes: float) -> Transfer:
        peers, n = self.nodes - 1, self.copies * self.nodes
        return self.between.exchange((n - 1) / n * nbytes, peers, peers) if peers else NOTHING

    def inside_ms(self, nbytes: float, times: int = 1) -> float:
        return times * nbytes * self.inside_ms_per_byte


@dataclass(frozen=True)
class Case:
    """One cell's set-up, from its record: everything but its times. set_mbit: of an emulated link; the rest as in `Nodes`."""

    id: str
    suite: str
    model: str
    link: str
    nodes: int
    name: str
    timeline: Timeline
    method: Method
    layout: Layout
    set_mbit: float | None
    copies: int = 1
    inside_ms_per_byte: float = 0.0


@functools.cache
def _suite(name: str) -> Suite:
    return suite.load(name)


def case(record: ResultRecord) -> Case | None:
    """The set-up of a cell's record; None for any other record, the kernel benchmark's too, for an unknown method, and
    where the suite has changed since, so that no share that is known gives the number of elements that were there."""
    about = record.config.get(record.exp, {}) if record.exp in suite.names() else {}
    if record.status != "completed" or not {"method", "elements"} <= set(about) or "workload" not in record.config:
        return None
    plan = _suite(record.exp)
    cell = Cell(about["model"], about.get("rate"), int(about["nodes"]), about.get("link"), about["method"])
    setup = plan.methods.get(cell.method)
    if setup is None or cell.model not in plan.models:
        return None
    fused = setup.one_bucket and cell.method == "onebit_adam"
    method = METHODS.get("onebit_adam_fused" if fused else SAME.get(cell.method, cell.method))
    if method is None:
        return None
    gpus, dilation = plan.gpus_per_node, float(record.link["dilation"])
    whole = timelines.load(record.config["workload"]["timeline"])
    # Older records do not hold the share; then a method's own was all there was.
    tried = [about["share"]] if "share" in about else [plan.fraction(cell), setup.fraction]
    parts = [(share, select(whole, share) if setup.whole else flattened(whole, share)) for share in tried]
    fraction, part = next(((f, p) for f, p in parts if p.elements == about["elements"]), (None, None))
    if fraction is None or part is None:
        return None
    delay = bucket_delay_ms(whole) if gpus > 1 and setup.wire in ("fp32", "bf16") else 0.0
    mb = WHOLE if setup.one_bucket else BUCKET_MB * fraction
    moved, layout = later(part, dilation, delay), Layout(mb, mb, mb)
    shaped = cell.link is None or plan.links[cell.link].goodput_mbit is not None
    return Case(
        id=record.id,
        suite=plan.name,
        model=plan.architecture(cell.model),
        link="emulated" if shaped else "loopback",
        nodes=cell.nodes,
        name=cell.method,
        timeline=moved,
        method=as_it_ran(method, len(items_of(method.rounds[0], moved, layout)), record.collectives_per_step),
        layout=layout,
        set_mbit=float(record.link.get("set_mbit_per_s") or plan.mbit) if shaped else None,
        copies=gpus if setup.traffic == "flat" else 1,
        inside_ms_per_byte=dilation * whole.intra_node.reduce_scatter_ms / (4 * part.elements)
        if setup.hierarchical
        else 0.0,
    )


def as_it_ran(method: Method, units: int, collectives: float | None) -> Method:
    """The method of a cell whose record counts so many collectives in a step.

    Scales once travelled as collectives of their own, two more for each unit. Such cells are kept, and predicted as they ran.
    """
    first = method.rounds[0]
    apart = "split_signs" in first.serve and not first.small and (collectives or 0.0) >= 4 * units
    return dataclasses.replace(method, rounds=(dataclasses.replace(first, small=2),)) if apart else method


def later(timeline: Timeline, dilation: float, delay_ms: float) -> Timeline:
    """`timeline` with every gradient `delay_ms` later, on a clock that runs `dilation` times slower."""
    moved = (dataclasses.replace(g, ready_ms=dilation * (g.ready_ms + delay_ms)) for g in timeline.gradients)
    return dataclasses.replace(
        timeline,
        gradients=tuple(moved),
        forward_ms=dilation * timeline.forward_ms,
        step_ms=dilation * (timeline.step_ms + delay_ms),
    )


def step(of: Case, machine: Machine) -> Step:
    """The cell's step, in ms of the machine that replayed it."""
    return simulate(of.timeline, machine.cluster(of), of.method, machine.costs(of.nodes), of.layout)


def kernel_rates(records: list[ResultRecord]) -> dict[str, float]:
    """ns per byte of every kernel, from the kernel benchmark's record on a CPU. Empty where there is none."""
    for r in records:
        rows = r.config.get("bench", {}).get("kernels") if r.hardware["device"] == "cpu" else None
        if rows:
            return {row["kernel"]: row["ns_per_element"] / row["bytes_per_element"] for row in rows}
    return {}


@functools.cache
def names(link: str) -> tuple[str, ...]:
    """The values of a machine, in the order in which a fit has them."""
    return (*COMMON, *START[link])


def start(link: str, kernels: Mapping[str, float]) -> Machine:
    """Where a fit begins."""
    return Machine(link, {**COMMON, **START[link]}, kernels)
