"""What a hook costs where nothing is sent: one rank alone, each method's step after another, against DDP without a hook.

A step is a whole one of a real model on random data. The difference to DDP without any hook is what the method costs the
device: copies, kernels, launches, Python.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from experiments.cells import timeline_tools

METHODS: dict[str, dict[str, Any]] = {
    "DDP without a hook, SGDM": {},
    "SGDM": {"class": "SGDM"},
    "AdamW": {"class": "AdamW"},
    "1-bit Adam": {"class": "OneBitAdam", "warmup_steps": 1},
    "Birder": {"class": "Birder"},
    "Birder one-phase": {"class": "Birder", "reduce": "one_phase"},
    "Sigma-delta Adam, local form": {"class": "SigmaDeltaAdam", "variance": "local"},
    "DDP without a hook, AdamW": {"plain": "AdamW"},
    "1-bit LAMB": {"class": "OneBitLAMB", "warmup_steps": 1},
    "0/1 Adam": {"class": "ZeroOneAdam", "warmup_steps": 1000},
    "CSER": {"class": "CSER"},
    "SLAMB": {"class": "SLAMB"},
}
WARMUP = 4
"""Steps that are not timed: dense ones, the first compressed one, compilation."""
TOGETHER = 5
"""Steps for which a GPU is waited for together: in training nobody waits for each, and the host queues the next meanwhile."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""What torch's profiler calls the runtime's functions that queue work, and those for which the host waits."""


class Whole(nn.Module):
    """A model together with the loss on its batch, as DDP wants it."""

    def __init__(self, net: nn.Module, loss: Callable[[], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def forward(self) -> Tensor:
        return self._loss()


def measure_model(
    device: torch.device, model: str, batch: int, steps: int = 20, methods: dict[str, dict[str, Any]] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each method, as they come: its step and what it is more than the first one, in ms, medians; and for each step
    launches and waits of the host (on a GPU)."""
    asked = (methods or METHODS).items()
    rows = _against_the_first(_attempt(name, dict(options), device, model, batch, steps) for name, options in asked)
    yield from ({"model": model, "batch": batch, **row} for row in rows)


def _attempt(
    label: str, options: dict[str, Any], device: torch.device, model: str, batch: int, steps: int
) -> dict[str, Any]:
    """As `_measure`; what it meets becomes its row, and the next method has its turn."""
    try:
        return _measure(label, options, device, model, batch, steps)
    except Exception as error:
        return {"method": label, "error": f"{type(error).__name__}: {str(error).strip()[:300]}"}


@contextlib.contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """A process group of this rank alone."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _against_the_first(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """With what each is more than the first; one that has failed is passed on as it is."""
    first: dict[str, Any] | None = None
    for row in rows:
        gc.collect()  # the model of the method before
        if "error" in row:
            yield row
            continue
        first = first or row
        more = {"overhead_ms": row["step_ms"] - first["step_ms"], "overhead": row["step_ms"] / first["step_ms"] - 1}
        if "waits" in row:
            more["more_waits"] = row["waits"] - first["waits"]
        yield {**row, **more}


def _measure(
    label: str, options: dict[str, Any], device: torch.device, model: str, batch: int, steps: int
) -> dict[str, Any]:
    whole = Whole(*timeline_tools.build(model, batch, device.type))
    ddp = DistributedDataParallel(whole, gradient_as_bucket_view=True, init_sync=False)
    name, plain = options.pop("class", None), options.pop("plain", "SGDM")
    optimizer: Any = getattr(birder, name or plain)(whole.parameters(), lr=1e-3, **options)
    attachment = birder.attach(ddp, optimizer, topology=Topology(1, 1)) if name else None

    def step() -> None:
        optimizer.zero_grad()
        ddp().backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    taken = []
    together = TOGETHER if device.type == "cuda" else 1
    for _ in range(max(1, steps // together)):
        _wait(device)
        began = time.perf_counter()
        for _ in range(together):
            step()
        _wait(device)
        taken.append(1000 * (time.perf_counter() - began) / together)
    row = {"method": label, "step_ms": statistics.median(taken), **_queued(step, device)}
    if attachment is not None:
        attachment.close()
        # Birder then waits once in a step: docs/gpu.md
        row["unseen"] = any("active" in unit.state for unit in optimizer.units)
    return row


def _queued(step: Callable[[], None], device: torch.device, steps: int = 3) -> dict[str, Any]:
    """launches and waits of the host in a step; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    # The profiler itself waits for the device: what it counts where next to nothing is done is its own.
    without = _counted(lambda: torch.zeros(1, device=device))

    def several() -> None:
        for _ in range(steps):
            step()

    launches, waits = _counted(several)
    return {"launches": max(0, launches - without[0]) / steps, "waits": max(0, waits - without[1]) / steps}


def _counted(work: Callable[[], object]) -> tuple[int, int]:
    """Launches and waits of the host that torch's profiler sees."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
    counts = [(event.key, event.count) for event in seen.key_averages()]
    launches = sum(count for key, count in counts if key.startswith(LAUNCHES))
    return launches, sum(count for key, count in counts if key in WAITS)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
