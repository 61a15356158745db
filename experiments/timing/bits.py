"""What 1-bit messages cost a step beside any method: the bound, with bits that mean nothing on links that are open.

Part of a world's profile. Messages are of the size and in the order of a 1-bit method's, taken from gradients during backward
and waited for in `step`; nothing is encoded, read or updated. What a step of it takes above the bound's is what remains when
kernels are left out: threads that share a core with backward, ranks that wait for each other in every unit, Python.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

import birder
from birder.comm import AllGather, AllToAll, Requests, Topology
from birder.optim import BucketOptimizer
from birder.optim.contract import Plan
from birder.optim.layout import Unit
from experiments.timing.entries import Bound
from experiments.training.clock import Stopwatch
from experiments.training.together import gathered


class Bits(BucketOptimizer):
    """An optimizer that sends a bit of each gradient, always the same, and learns nothing."""

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
    beside = optimizer, ddp.hook
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns + 1):
        for sending in taken:
            dist.barrier()
            seconds = bound.turn(1, watch, beside=beside if sending else None)
            taken[sending].append(max(gathered(seconds)))
    attachment.close()
    ddp.use(None)
    bare, both = (statistics.median(taken[sending][1:]) for sending in (False, True))
    return 1000 * (both - bare)
