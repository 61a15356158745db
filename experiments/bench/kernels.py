"""The kernel part of the benchmark: every 1-bit kernel against its definition in eager torch, and against a plain copy.

For each kernel, interleaved: the kernel, a copy that moves as many bytes (reads half, writes half) and the reference.
Ratios are taken within a round and their median is reported, so that what slows down the whole machine slows all three.
Everything runs on one thread on a CPU, as in a rank, and on the current stream of a GPU. Bytes are those that have to be
moved (docs/kernels.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from birder import kernels
from birder.kernels import reference
from birder.predict.costs import BYTES
from birder.predict.measuring import KERNELS, ms_of, tensors
from birder.predict.measuring import WORKERS as WORKERS

ELEMENTS = {"cpu": 2**24, "cuda": 100_000_000}
ROUNDS = {"cpu": 9, "cuda": 20}
HEAD_START = 2_000_000
"""Cycles, about a millisecond, for which a GPU is kept busy while the host queues what is measured. Launching a kernel that
moves 60 MB takes the host longer than running it takes the GPU: without this the host would be measured."""
NAMES = (
    "encode",
    "reduce_bits",
    "apply_bits",
    "add_momentum",
    "add_message",
    "split_signs",
    "add_average",
    "write_signs",
)
"""Those of `birder.predict.measuring.KERNELS` that are compared."""


def measure(device: torch.device, elements: int | None = None, rounds: int | None = None) -> Iterator[dict[str, Any]]:
    """One row for each kernel: ns_per_element, gb_per_s, against_reference and of_copy, bytes_per_element, elements."""
    elements = elements or ELEMENTS[device.type]
    elements -= elements % (8 * WORKERS)
    rounds = rounds or ROUNDS[device.type]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = tensors(elements, device)
        for name in NAMES:
            yield _measure(name, made, elements, rounds, device)
    finally:
        torch.set_num_threads(threads)


def _measure(name: str, made: dict[str, Tensor], elements: int, rounds: int, device: torch.device) -> dict[str, Any]:
    run, nbytes = KERNELS[name], BYTES[name](WORKERS)
    half = round(nbytes * elements / 2)
    source = torch.zeros(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(0)
    tasks: list[Callable[[], object]] = [
        lambda: run(kernels, made),
        lambda: target.copy_(source),
        lambda: run(reference, made),
    ]
    for task in tasks[:2]:  # compiled and warm; the reference has nothing to compile
        _seconds(task, device)
    seconds = [[_seconds(task, device) for task in tasks] for _ in range(rounds)]
    own = statistics.median(s[0] for s in seconds)
    return {
        "kernel": name,
        "bytes_per_element": nbytes,
        "elements": elements,
        "ns_per_element": 1e9 * own / elements,
        "gb_per_s": nbytes * elements / own / 1e9,
        "against_reference": statistics.median(s[2] / s[0] for s in seconds),
        "of_copy": statistics.median(s[1] / s[0] for s in seconds),
    }


def _seconds(task: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda._sleep(HEAD_START)
    return ms_of(task, device) / 1000


def backend_name(device: torch.device) -> str:
    """The module that serves the device: reference where the fused ones cannot run."""
    return kernels.backend(device).__name__.rpartition(".")[2]
