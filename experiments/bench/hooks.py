"""What a hook costs where nothing is sent: one rank alone, a model's parameters, each method's step after another.

A step is a backward pass that does nothing but hand out gradients (experiments/cells/model.py, without waiting), the hook
and the update. The difference to DDP without any hook is what the method costs the device: copies, kernels, launches, Python.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from experiments.cells import timelines
from experiments.cells.model import ReplayModel

METHODS: dict[str, dict[str, Any]] = {
    "DDP without a hook, SGDM": {},
    "SGDM": {"class": "SGDM"},
    "AdamW": {"class": "AdamW"},
    "1-bit Adam": {"class": "OneBitAdam", "warmup_steps": 1},
    "Birder": {"class": "Birder"},
    "Birder one-phase": {"class": "Birder", "reduce": "one_phase"},
}


def measure(device: torch.device, timeline: str, steps: int = 20) -> list[dict[str, Any]]:
    """One row for each method: its step, and what it is more than the first one, in ms; medians."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            rows = [_measure(label, dict(options), device, timeline, steps) for label, options in METHODS.items()]
        finally:
            dist.destroy_process_group()
    for row in rows:
        row["overhead_ms"] = row["step_ms"] - rows[0]["step_ms"]
    return rows


def _measure(label: str, options: dict[str, Any], device: torch.device, timeline: str, steps: int) -> dict[str, Any]:
    model = ReplayModel(timelines.load(timeline), 0.0).to(device)
    model._values = [v.to(device) for v in model._values]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
    name = options.pop("class", None)
    optimizer: Any = getattr(birder, name or "SGDM")(model.parameters(), lr=1e-3, **options)
    attachment = birder.attach(ddp, optimizer, topology=Topology(1, 1)) if name else None
    x = torch.zeros(1, device=device)
    taken = []
    for number_ in range(steps + 4):
        optimizer.zero_grad()
        _wait(device)
        began = time.perf_counter()
        ddp(x).sum().backward()
        optimizer.step()
        _wait(device)
        if number_ >= 4:  # dense steps, the first compressed one, compilation
            taken.append(1000 * (time.perf_counter() - began))
    if attachment is not None:
        attachment.close()
    return {"method": label, "step_ms": statistics.median(taken)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
