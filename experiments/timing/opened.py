"""What the exchange of fp32 and bf16 DDP costs on this machine itself, and whether emulated links carry what they should.

All nodes share this machine's cores, so that what sends, receives, adds up and casts takes them from backward. On a cluster
of GPUs it would not. To tell it from the link, next to some of the rounds

    unthrottled  dense methods take a turn on links that slow nothing down: what a step takes with the exchange's own work
    alone        the same buckets, all-reduced as in a step, on the links as set, while nobody computes

and the bound's timed turns say when each of DDP's buckets is ready. experiments/report/arithmetic.py makes the check of them.
Only where the ranks set the links' rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.records import labels
from experiments.timing.entries import Bound
from experiments.timing.shared_ddp import SharedDDP
from experiments.training.clock import Stopwatch
from experiments.training.world import gathered

EVERY = 4
"""After every so many rounds, the first among them: some 10 % of a comparison's time."""
PAUSE_S = 0.1
"""Before an exchange alone: links' token buckets fill up, as between the exchanges of two steps."""
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def due(number: int, held: bool = True) -> bool:
    """Whether the turns of this module come before round `number`, from 0. held: memory holds all methods; else once."""
    return number % EVERY == 0 if held else number == 0


def dense(config: dict[str, Any]) -> bool:
    """Whether a method of this resolved configuration all-reduces DDP's buckets, in fp32 or cast."""
    plain = labels.class_name(config["optimizer"]) in labels.DENSE
    return plain and bool(config["comm"]["enabled"]) and labels.wire(config) in WIRES


def ready(bound: Bound) -> list[list[float]]:
    """[elements, ms after the step's begin] of each bucket, when it is ready on the slowest rank: the median step's.

    Empty where nothing was reported. Called on every rank, same result on all.
    """
    everyone: list[list[list[tuple[int, float]]]] = gathered(bound.ready)
    steps = list(zip(*everyone, strict=True))
    if not steps or not steps[0][0]:
        return []
    found = []
    for place, (elements, _) in enumerate(steps[0][0]):
        slowest = [max(mine[place][1] for mine in step) for step in steps]
        found.append([float(elements), round(1000 * statistics.median(slowest), 4)])
    return found


def all_reduce(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All of them, started one after the other without waiting, as DDP does."""
    for work in [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]:
        work.wait()


class Exchange:
    """The all-reduces of a step, without the step. configs: of the methods that take turns."""

    def __init__(self, ddp: SharedDDP, configs: list[dict[str, Any]]) -> None:
        self.group = ddp.process_group
        self.wires = sorted({labels.wire(config) for config in configs if dense(config)})
        self.forget()

    def forget(self) -> None:
        """Drops what has been measured."""
        self.ms: dict[str, list[float]] = {wire: [] for wire in self.wires}
        self.mbit: list[float] = []

    def turns(self, bound: Bound, watch: Stopwatch, mbit: float | None) -> None:
        """One exchange in each wire's numbers. mbit: what the links are set to."""
        if mbit is None:
            return
        self.mbit.append(mbit)
        for number, wire in enumerate(self.wires):
            buffers = [torch.zeros(b.elements, dtype=WIRES[wire], device=watch.device) for b in bound.passed]
            if number == 0:  # links that have just got their rate, and connections that do not know it yet
                dist.all_reduce(buffers[0], group=self.group)
            time.sleep(PAUSE_S)
            dist.barrier()
            watch.start()
            all_reduce(buffers, self.group)
            self.ms[wire].append(1000 * max(gathered(watch.stop())))

    def of_wire(self, wire: str) -> dict[str, Any]:
        """What records say: {exchange_ms, exchange_mbit_per_s}, of each turn its time and what the links were set to."""
        if not self.ms.get(wire):
            return {}
        return {
            "exchange_ms": [round(ms, 4) for ms in self.ms[wire]],
            "exchange_mbit_per_s": [round(mbit, 3) for mbit in self.mbit],
        }
