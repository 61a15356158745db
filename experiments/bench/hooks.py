"""What a hook costs where nothing is sent: one rank alone, the methods' steps interleaved, against DDP without a hook.

A step is a whole one of a real model on random data. The difference to DDP without any hook is what the method costs the
device: copies, kernels, launches, Python.
"""

from __future__ import annotations

import contextlib
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
WARMUP = 9
"""Steps that are not timed: dense ones, the first compressed one, compilation, those in which all gradients are watched."""
AT_ONCE = 3
"""How many models a GPU holds at a time, not counting that of the first method."""
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
    """A row for each method: its step in ms and what it is more than the first one's, medians over rounds in which AT_ONCE of
    them and the first have their turn. What a method meets becomes its row."""
    first, *others = (methods or METHODS).items()
    for k in range(0, max(len(others), 1), AT_ONCE):
        rows = _in_turns(device, model, batch, steps, dict([first, *others[k : k + AT_ONCE]]))
        yield from rows[min(k, 1) :]


def _in_turns(
    device: torch.device, model: str, batch: int, steps: int, methods: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    with _trained(device, model, batch, methods) as (rows, training):
        taken: dict[str, list[float]] = {name: [] for name in training}
        together = TOGETHER if device.type == "cuda" else 1
        for _ in range(max(1, steps // together)):
            for name in _good(rows):
                with _noted(rows[name]):
                    taken[name].append(_step_ms(training[name].step, device, together))
        good, first = _good(rows), next(iter(methods))
        for name in good:
            rows[name]["step_ms"] = statistics.median(taken[name])
            if first in good:  # what the others are compared with
                pairs = list(zip(taken[name], taken[first], strict=True))
                rows[name]["overhead_ms"] = statistics.median(mine - base for mine, base in pairs)
                rows[name]["overhead"] = statistics.median(mine / base - 1 for mine, base in pairs)
    return list(rows.values())


def count_model(
    device: torch.device, model: str, batch: int, methods: dict[str, dict[str, Any]] | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each method, on a GPU: launches and waits of the host in a step, and waits more than the first one's.

    After all that is timed: what torch's profiler has once watched is slower from then on.
    """
    without = _counted(lambda: torch.zeros(1, device=device)) if device.type == "cuda" else (0, 0)
    waits: float | None = None
    for name, options in (methods or METHODS).items():
        with _trained(device, model, batch, {name: options}) as (rows, training):
            for each in training.values():
                with _noted(rows[name]):
                    rows[name] |= each.queued(device, without)
        if "waits" in rows[name]:
            waits = rows[name]["waits"] if waits is None else waits
            rows[name]["more_waits"] = rows[name]["waits"] - waits
        yield rows[name]


def _good(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, row in rows.items() if "error" not in row]


@contextlib.contextmanager
def _trained(
    device: torch.device, model: str, batch: int, methods: dict[str, dict[str, Any]]
) -> Iterator[tuple[dict[str, dict[str, Any]], dict[str, Training]]]:
    """By method its row and what trains with it."""
    rows = {name: {"model": model, "batch": batch, "method": name} for name in methods}
    training: dict[str, Training] = {}
    for name, options in methods.items():
        with _noted(rows[name]):
            training[name] = Training(dict(options), device, model, batch)
    yield rows, training
    for each in training.values():
        each.close()


@contextlib.contextmanager
def _noted(row: dict[str, Any]) -> Iterator[None]:
    """What is met inside is noted in the row, and the next method has its turn."""
    try:
        yield
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"


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


class Training:
    """A model, an optimizer and what connects them, after its first steps."""

    def __init__(self, options: dict[str, Any], device: torch.device, model: str, batch: int) -> None:
        whole = Whole(*timeline_tools.build(model, batch, device.type))
        self.ddp = DistributedDataParallel(whole, gradient_as_bucket_view=True, init_sync=False)
        name, plain = options.pop("class", None), options.pop("plain", "SGDM")
        self.optimizer: Any = getattr(birder, name or plain)(whole.parameters(), lr=1e-3, **options)
        self.attachment = birder.attach(self.ddp, self.optimizer, topology=Topology(1, 1)) if name else None
        for _ in range(WARMUP):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp().backward()
        self.optimizer.step()

    def queued(self, device: torch.device, without: tuple[int, int], steps: int = 2) -> dict[str, Any]:
        """launches and waits of the host in a step; nothing on a CPU. without: those of the profiler itself."""
        if device.type != "cuda":
            return {}

        def several() -> None:
            for _ in range(steps):
                self.step()

        launches, waits = _counted(several)
        found = {"launches": max(0, launches - without[0]) / steps, "waits": max(0, waits - without[1]) / steps}
        if self.attachment is not None:  # Birder then waits once in a step: docs/gpu.md
            found["unseen"] = any("active" in unit.state for unit in self.optimizer.units)
        return found

    def close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()


def _step_ms(step: Callable[[], None], device: torch.device, together: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(together):
        step()
    _wait(device)
    return 1000 * (time.perf_counter() - began) / together


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
