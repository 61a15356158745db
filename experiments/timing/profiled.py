"""What a world's prediction is made from besides its bound: kernels and exchanges, on all ranks at once, unthrottled.

Taken before the rounds, while nobody computes. The ranks of an emulated cluster share a machine's cores: what a kernel takes
here is what it takes with all of them at it, and an exchange on links that slow nothing down is what sending costs those
cores. What messages cost while a model computes: `bits_ms`. experiments/cells/trained.py makes the prediction. One rank
a node only: what a rank sends is then what its NIC sends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import birder
from birder.comm import AllGather, AllToAll, ByteCounter, Collectives, Requests, Topology, finish
from birder.optim import BucketOptimizer
from birder.optim.contract import Plan
from birder.optim.layout import Unit, make_units
from birder.predict import measure_kernels
from birder.predict.costs import EXCHANGES
from experiments.timing.entries import Bound
from experiments.timing.opened import all_reduce
from experiments.timing.shared_ddp import Ready, SharedDDP
from experiments.training.clock import Stopwatch
from experiments.training.world import gathered

TURNS = 2
"""Of each exchange; the median counts."""
MANY = 20
"""Exchanges of next to nothing, one after the other: a single one is a matter of chance."""


def profile(
    buckets: Sequence[Ready], ddp: SharedDDP, groups: Sequence[dict[str, Any]], unit_mb: float
) -> dict[str, Any]:
    """What `exchanges` says, and of the model {units, buffer_bytes}.

    units: as `units` says. buffer_bytes: of what DDP broadcasts in every step. buckets: DDP's. groups: parameter groups of
    an optimizer. unit_mb: as in `birder.attach`. Called on every rank, same result on all.
    """
    return {
        **exchanges([b.elements for b in buckets], ddp.process_group),
        "units": units(buckets, groups, unit_mb),
        "buffer_bytes": sum(b.nbytes for b in ddp.module.buffers()),
    }


def units(buckets: Sequence[Ready], groups: Sequence[dict[str, Any]], unit_mb: float) -> list[list[int]]:
    """[elements, bucket] of each unit that compressed methods send as one: the bucket with the last of its gradients."""
    within = {id(p): number for number, b in enumerate(buckets) for p in b.parameters}
    cut = make_units(groups, int(unit_mb * 2**20))
    return [[sum(p.numel() for p in u.params), max(within.get(id(p), 0) for p in u.params)] for u in cut]


def exchanges(buckets: Sequence[int], group: dist.ProcessGroup) -> dict[str, Any]:
    """{kernels: ns per byte, call_us, sending: ns per byte sent, small_ms: of an exchange of next to nothing}.

    buckets: elements of DDP's buckets. Called on every rank, same result on all.
    """
    n = dist.get_world_size(group)
    dist.barrier()
    everyone = gathered(measure_kernels("cpu", elements=max(2**20, sum(buckets) // len(buckets)), rounds=3))
    kernels = {name: statistics.median(c.ns_per_byte[name] for c in everyone) for name in everyone[0].ns_per_byte}
    pairs = Collectives(group, Topology(n, 1), ByteCounter())
    sent = (n - 1) / n * sum(buckets)
    tasks: dict[str, tuple[float, Callable[[], Any]]] = {
        EXCHANGES[size]: (
            2 * size * sent,
            lambda dtype=dtype: all_reduce([torch.zeros(numel, dtype=dtype) for numel in buckets], group),  # type: ignore[misc]
        )
        for size, dtype in ((4, torch.float32), (2, torch.bfloat16))
    }
    tasks[EXCHANGES[0]] = (2 * sent / 8, _of_bits([numel // 8 for numel in buckets], pairs))
    small = 1000 * _median(_of_bits([8 * n] * MANY, pairs)) / (2 * MANY)
    sending = {name: max(0.0, 1e9 * _median(task) / nbytes) for name, (nbytes, task) in tasks.items()}
    return {
        "kernels": {name: round(ns, 6) for name, ns in kernels.items()},
        "call_us": round(statistics.median(c.call_us for c in everyone), 3),
        "sending": {name: round(ns, 5) for name, ns in sending.items()},
        "small_ms": round(small, 4),
    }


def _of_bits(sizes: Sequence[int], pairs: Collectives) -> Callable[[], Any]:
    """An all-to-all and an all-gather of so many bytes each, one after the other."""
    rows = [torch.zeros(pairs.size, max(1, size // pairs.size), dtype=torch.uint8) for size in sizes]

    def exchange() -> None:
        for row in rows:
            finish(pairs.all_to_all(row))
            finish(pairs.all_gather(row[0]))

    return exchange


def _median(task: Callable[[], Any]) -> float:
    """Seconds on the slowest rank, after a turn that does not count."""
    taken = []
    for _ in range(TURNS + 1):
        dist.barrier()
        began = time.perf_counter()
        task()
        taken.append(max(gathered(time.perf_counter() - began)))
    return float(statistics.median(taken[1:]))


# ---- messages next to a model that computes: bits that mean nothing ----------------------------------------------------


class Bits(BucketOptimizer):
    """An optimizer that sends a bit of each gradient, always the same, and learns nothing.

    Messages are of the size and in the order of a 1-bit method's, taken from gradients during backward and waited for in
    `step`; nothing is encoded, read or updated. What a step of it takes above the bound's is what remains when kernels are
    left out: threads that share a core with backward, ranks that wait for each other in every unit, Python.
    """

    compressed = True

    def plan(self, step: int) -> Plan:
        return Plan.COMPRESSED

    def init_unit(self, unit: Unit) -> None:
        size = unit.padded // self.comm.shards // 8
        unit.buffers = {
            "bits": unit.bytes(size).zero_(),
            "rows": unit.bytes(size),
            "result": unit.bytes(unit.padded // 8),
        }

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        bits, rows, result = unit.buffers["bits"], unit.buffers["rows"], unit.buffers["result"]
        yield AllToAll(bits, rows)
        unit.result = yield AllGather(bits[: len(bits) // self.comm.workers], result)

    def update(self, step: int, plan: Plan) -> None:
        pass


def bits_ms(bound: Bound, groups: Sequence[dict[str, Any]], unit_mb: float, turns: int) -> float:
    """Milliseconds that a step with bits takes longer than the bound's, on the slowest rank. The links are open.

    groups: parameter groups of an optimizer. unit_mb: as in `birder.attach`. turns: of the bound, and of the bound with bits,
    one step each; the medians count. Called on every rank, same result on all.
    """
    ddp = bound.shared.ddp
    n, watch = dist.get_world_size(ddp.process_group), Stopwatch(bound.shared.shard.device)
    optimizer = Bits([{"params": g["params"], "lr": 0.0} for g in groups], {"lr": 0.0, "weight_decay": 0.0})
    attachment = birder.attach(ddp, optimizer, topology=Topology(n, 1), unit_mb=unit_mb)
    optimizer_and_hook = optimizer, ddp.hook
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns + 1):
        for sending in taken:
            dist.barrier()
            seconds = bound.turn(1, watch, optimizer_and_hook=optimizer_and_hook if sending else None)
            taken[sending].append(max(gathered(seconds)))
    attachment.close()
    ddp.use(None)
    bare, both = (statistics.median(taken[sending][1:]) for sending in (False, True))
    return 1000 * (both - bare)
