"""The kernel part of the benchmark: every 1-bit kernel against its definition in eager torch, and against a plain copy.

For each kernel, interleaved: the kernel, a copy that moves as many bytes (reads half, writes half) and the reference.
Ratios are taken within a round and their median is reported, so that what slows down the whole machine slows all three.
Everything runs on one thread on a CPU, as in a rank, and on the current stream of a GPU. Bytes are those that have to be
moved (docs/kernels.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birder import kernels
from birder.kernels import reference

WORKERS = 4
"""Workers whose bits the server's kernels take."""
ELEMENTS = {"cpu": 2**24, "cuda": 100_000_000}
ROUNDS = {"cpu": 9, "cuda": 20}
HEAD_START = 2_000_000
"""Cycles, about a millisecond, for which a GPU is kept busy while the host queues what is measured. Launching a kernel that
moves 60 MB takes the host longer than running it takes the GPU: without this the host would be measured."""
DRAW: dict[str, Any] = {"seed": 1, "step": 7, "start": 0}


@dataclass(frozen=True)
class BenchKernel:
    """bytes: moved per element. run: one call, by the functions of the given module, on prepared tensors."""

    name: str
    bytes: float
    run: Callable[[Any, dict[str, Tensor]], object]


KERNELS = (
    BenchKernel(
        "encode",
        20.125,
        lambda k, t: k.encode(t["g"], t["m"], t["b"], beta=0.95, eps=0.0, hold=False, worker=1, **DRAW),
    ),
    BenchKernel("reduce_bits", (WORKERS + 1) / 8, lambda k, t: k.reduce_bits(t["rows"], **DRAW)),
    BenchKernel(
        "apply_bits", 8.125, lambda k, t: k.apply_bits([t["p"]], [0], t["bits"], lr=1e-3, decay=0.0, active=None)
    ),
    BenchKernel("add_momentum", 16.0, lambda k, t: k.add_momentum(t["e"], t["g"], t["m"], beta=0.9, mask=None)),
    BenchKernel("add_message", 12.0, lambda k, t: k.add_message(t["e"], t["g"], None)),
    BenchKernel("split_signs", 8.125, lambda k, t: k.split_signs(t["e"], t["scale"], None)),
    BenchKernel("add_average", WORKERS / 8 + 8, lambda k, t: k.add_average(t["e"], t["messages"], None)),
    BenchKernel("write_signs", 4.125, lambda k, t: k.write_signs(t["e"], t["results"], None)),
)


def tensors(elements: int, device: torch.device) -> dict[str, Tensor]:
    """What the kernels work on. elements: a multiple of 8 WORKERS."""
    random = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(elements, generator=random, device=device)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=random, device=device, dtype=torch.uint8)

    made = {"g": normal(), "m": normal().mul_(0.1), "p": normal(), "e": normal()}
    made["b"] = made["m"].abs() + 0.1
    made |= {"rows": bits(WORKERS, elements // 8), "bits": bits(elements // 8)}
    made["scale"] = torch.ones((), device=device)
    for name, each in (("messages", elements), ("results", elements // WORKERS)):
        made[name] = bits(WORKERS, kernels.message_bytes(each))
        kernels.scales_of(made[name]).fill_(1.0)
    return made


def measure(device: torch.device, elements: int | None = None, rounds: int | None = None) -> list[dict[str, Any]]:
    """One row for each kernel: ns_per_element, gb_per_s, against_reference and of_copy, bytes_per_element, elements."""
    return list(measured(device, elements, rounds))


def measured(device: torch.device, elements: int | None = None, rounds: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `measure` as they come."""
    elements = elements or ELEMENTS[device.type]
    elements -= elements % (8 * WORKERS)
    rounds = rounds or ROUNDS[device.type]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = tensors(elements, device)
        for kernel in KERNELS:
            yield _measure(kernel, made, elements, rounds, device)
    finally:
        torch.set_num_threads(threads)


def _measure(
    kernel: BenchKernel, made: dict[str, Tensor], elements: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    half = round(kernel.bytes * elements / 2)
    source = torch.zeros(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(0)
    tasks: list[Callable[[], object]] = [
        lambda: kernel.run(kernels, made),
        lambda: target.copy_(source),
        lambda: kernel.run(reference, made),
    ]
    for task in tasks[:2]:  # compiled and warm; the reference has nothing to compile
        _seconds(task, device)
    seconds = [[_seconds(task, device) for task in tasks] for _ in range(rounds)]
    own = statistics.median(s[0] for s in seconds)
    return {
        "kernel": kernel.name,
        "bytes_per_element": kernel.bytes,
        "elements": elements,
        "ns_per_element": 1e9 * own / elements,
        "gb_per_s": kernel.bytes * elements / own / 1e9,
        "against_reference": statistics.median(s[2] / s[0] for s in seconds),
        "of_copy": statistics.median(s[1] / s[0] for s in seconds),
    }


def _seconds(task: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        begin.record()
        task()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def backend_name(device: torch.device) -> str:
    """The module that serves the device: reference where the fused ones cannot run."""
    return kernels.backend(device).__name__.rpartition(".")[2]
