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
from torch import nn

import birder
from birder.comm import ByteCounter, Topology
from birder.comm import Link as Collectives
from birder.predict import measure_kernels
from birder.predict.costs import EXCHANGES
from experiments.timing.opened import all_reduce
from experiments.timing.shared_ddp import SharedDDP
from experiments.training.together import gathered

TURNS = 2
"""Of each exchange; the median counts."""
PARAMETERS, SMALL_STEPS = 200, 5
"""Of the model of tiny parameters, and its steps in a turn."""
MANY = 20
"""Exchanges of next to nothing, one after the other: a single one is a matter of chance."""


def profile(buckets: Sequence[int], ddp: SharedDDP) -> dict[str, Any]:
    """What `exchanges` says, and of the model {parameters, python_us, buffer_bytes}.

    parameters: how many tensors, each of which costs python_us in the hook and update of a compressed method.
    buffer_bytes: of what DDP broadcasts in every step. buckets: elements of DDP's buckets. Called on every rank, same result
    on all.
    """
    found = exchanges(buckets, ddp.process_group)
    return {
        **found,
        "parameters": sum(p.requires_grad for p in ddp.module.parameters()),
        "python_us": round(python_us(ddp.process_group, found["small_ms"]), 3),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in ddp.module.buffers()),
    }


def python_us(group: dist.ProcessGroup, small_ms: float) -> float:
    """Microseconds a parameter of what Birder's hook and update do beside their kernels: in a model of tiny parameters.

    Called on every rank, same result on all.
    """
    n, model = dist.get_world_size(group), _Tiny()
    ddp = SharedDDP(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
    ddp.send_nothing()
    bare = _median(functools.partial(_steps, ddp, None))
    optimizer = birder.Birder(model.parameters(), lr=1e-6)
    attachment = birder.attach(ddp, optimizer, topology=Topology(n, 1))
    _steps(ddp, optimizer)  # past its first steps, in which coordinates get their first gradient
    compressed = _median(functools.partial(_steps, ddp, optimizer))
    attachment.close()
    return max(0.0, 1e6 * (compressed - bare) / SMALL_STEPS - 2e3 * small_ms) / PARAMETERS


class _Tiny(nn.Module):
    """As many parameters as a model of layers has, of next to no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.ParameterList(torch.ones(32) for _ in range(PARAMETERS))

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.tiny)).sum()


def _steps(ddp: SharedDDP, optimizer: torch.optim.Optimizer | None) -> None:
    for _ in range(SMALL_STEPS):
        ddp.zero_grad(set_to_none=True)
        ddp().backward()
        if optimizer is not None:
            optimizer.step()


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
            pairs.all_to_all(row)
            pairs.all_gather(row[0])

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
