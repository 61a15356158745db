"""What a world's prediction is made from beside its bound: kernels and exchanges, on all ranks at once and on open links.

Taken before the rounds, while nobody computes. The ranks of an emulated cluster share a machine's cores: what a kernel takes
here is what it takes with all of them at it, and an exchange on links that slow nothing down is what sending costs those
cores. experiments/cells/trained.py makes the prediction. One rank a node only: what a rank sends is then what its NIC sends.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from birder.comm import ByteCounter, Topology
from birder.comm import Link as Collectives
from birder.predict import measure_kernels
from birder.predict.costs import EXCHANGES
from experiments.timing.entries import Bound
from experiments.timing.shared_ddp import SharedDDP
from experiments.training.clock import Stopwatch
from experiments.training.together import gathered

TURNS = 2
"""Of each exchange; the median counts."""
MANY = 20
"""Exchanges of next to nothing, one after the other: a single one is a matter of chance."""
STEPS = 5
"""Of the bound with and without buffers, one after the other."""


def profile(bound: Bound, ddp: SharedDDP, watch: Stopwatch) -> dict[str, Any]:
    """What `exchanges` says, and what DDP's broadcast of the model's buffers costs a step: {buffers_ms, buffer_bytes}.

    Called on every rank, same result on all.
    """
    sizes = [b.numel() * b.element_size() for b in ddp.module.buffers()]
    found = exchanges(bound.buckets, ddp.process_group)
    if not sizes:
        return {**found, "buffers_ms": 0.0, "buffer_bytes": 0}
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(STEPS):
        for buffers, seconds in taken.items():
            seconds.append(_once(functools.partial(bound.turn, 1, watch, buffers=buffers)))
    bare, broadcast = (statistics.median(taken[buffers]) for buffers in (False, True))
    return {**found, "buffers_ms": round(1000 * max(0.0, broadcast - bare), 4), "buffer_bytes": sum(sizes)}


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
        EXCHANGES[size]: (2 * size * sent, _all_reduces(buckets, dtype, group))
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


def _all_reduces(buckets: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], Any]:
    def exchange() -> None:
        buffers = [torch.zeros(numel, dtype=dtype) for numel in buckets]
        for work in [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]:
            work.wait()

    return exchange


def _of_bits(sizes: Sequence[int], pairs: Collectives) -> Callable[[], Any]:
    """An all-to-all and an all-gather of so many bytes each, one after the other."""
    rows = [torch.zeros(pairs.size, max(1, size // pairs.size), dtype=torch.uint8) for size in sizes]

    def exchange() -> None:
        for row in rows:
            pairs.all_to_all(row)
            pairs.all_gather(row[0])

    return exchange


def _median(task: Callable[[], Any]) -> float:
    """Seconds, after a turn that does not count."""
    return statistics.median([_once(task) for _ in range(TURNS + 1)][1:])


def _once(task: Callable[[], Any]) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    task()
    return float(max(gathered(time.perf_counter() - began)))
