"""Every optimizer on a GPU against itself on the CPU: the same gradients, to the bit, the same number of ranks.

The model's loss is the sum of parameters times given numbers, so that its gradients are those numbers on any device. What
then differs comes from the method: none of it where the arithmetic is this project's own, rounding where it is torch's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology

METHODS: dict[str, dict[str, Any]] = {  # in the order of their worth
    "Birder": {},
    "Birder one-phase": {"reduce": "one_phase"},
    "Birder hierarchical": {"hierarchical": True},
    "Birder, u inside nodes": {"hierarchical": True, "intra": "u"},
    "SigmaDeltaAdam": {},
    "SigmaDeltaAdam local": {"variance": "local", "errors": "int8"},
    "SigmaDeltaAdam one-phase": {"reduce": "one_phase"},
    "Lion": {},
    "EfficientAdam": {},
    "SGDM": {"lr": 0.01},
    "AdamW": {},
    "BertAdam": {},
    "LAMB": {"lr": 0.01},
    "OneBitAdam": {"warmup_steps": 10},
    "OneBitLAMB": {"lr": 0.01, "warmup_steps": 12},
    "ZeroOneAdam": {"warmup_steps": 10, "local_doubling": 20},
    "CSER": {"lr": 0.01, "gradient_ratio": 4, "reset_every": 8, "block": 64},
    "QSparseLocalSGD": {"lr": 0.01, "block": 64},
    "EFSGD": {"lr": 0.01, "ratio": 4, "block": 64},
    "EF21SGDM": {"lr": 0.1, "ratio": 4, "block": 64},
    "SparseLoCo": {"sync_every": 8, "top_k": 4, "chunk": 32},
    "SparseLoCo int4": {"sync_every": 8, "message": "int4"},
    "SLAMB": {"dense_below": 100, "sync_every": 20},
}
EXACT = ("Birder", "Birder one-phase", "Birder hierarchical")
"""Kernels of this project from the gradient to the parameter: equal in every bit."""
NORMS = ("BertAdam", "LAMB", "OneBitLAMB", "SLAMB")
"""These take norms of tensors, which torch adds up in an order that depends on addresses: others after a resumption."""
CLOSE = 1e-2
"""Of other methods: |x_gpu - x_cpu| / |x_cpu - x_0| at most. torch contracts products and sums on one device and not on the
other; a sign at the edge then falls the other way, once in some thousand times."""
STALL_S = 60.0
"""Seconds after which a collective has failed; twice as long without a word from any rank is a failure too."""
GRACE_S = 10.0
"""Seconds that ranks have to end."""
SHAPES = ((64, 3, 3, 3), (64,), (300, 37), (300,), (1,), (128, 64, 3, 3), (1000, 17))
IDLE = 5
"""Rows of the last parameter that never have a gradient, as tokens that are not in the data."""


class Given(nn.Module):
    """Its gradients are `values`, whatever the device. One parameter is channels-last in memory."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        tensors = [torch.randn(shape, generator=random) for shape in SHAPES]
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
        self.tensors = nn.ParameterList([nn.Parameter(t) for t in tensors])
        self.values: list[Tensor] = []

    def draw(self, rank: int, step: int) -> None:
        """The gradients of one step on one rank: multiples of 1/256, whose sums are exact in any order. DDP's buckets, and
        with them the order in which ranks are added up, differ after a resumption."""
        random = torch.Generator().manual_seed(1000 * step + rank)
        drawn = [torch.randn(shape, generator=random).mul_(256).round_().div_(256) for shape in SHAPES]
        drawn[-1][-IDLE:] = 0.0
        self.values = [d.to(p.device) for d, p in zip(drawn, self.tensors, strict=True)]

    def forward(self) -> Tensor:
        return sum(((p * v).sum() for p, v in zip(self.tensors, self.values, strict=True)), torch.zeros(()).sum())  # type: ignore[return-value]


def train(name: str, device: torch.device, steps: int, resume: bool = False) -> Tensor:
    """All parameters after so many steps, on the CPU. `resume`: half-way everything is saved, made again and loaded."""
    world = dist.get_world_size()
    topology = Topology(world, 1) if world % 2 else Topology(world // 2, 2)

    def make() -> tuple[Given, DistributedDataParallel, Any, Any]:
        model = Given().to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        options = dict(METHODS[name])
        nodes = {"hierarchical": options.pop("hierarchical", False), "topology": topology}
        optimizer = getattr(birder, name.partition(" ")[0].rstrip(","))(model.parameters(), **options)
        return model, ddp, optimizer, birder.attach(ddp, optimizer, unit_mb=0.05, **nodes)

    model, ddp, optimizer, attachment = make()
    for step in range(1, steps + 1):
        if resume and step == steps // 2:
            saved = optimizer.state_dict(), [p.detach().clone() for p in model.tensors]
            attachment.close()
            model, ddp, optimizer, attachment = make()
            optimizer.load_state_dict(saved[0])
            with torch.no_grad():
                for p, value in zip(model.tensors, saved[1], strict=True):
                    p.copy_(value)
        model.draw(dist.get_rank(), step)
        optimizer.zero_grad()
        ddp().backward()
        optimizer.step()
    attachment.close()
    return torch.cat([p.detach().cpu().flatten() for p in model.tensors])


def compare(name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """One row: whether the device's parameters are the CPU's, and those of a resumed run the uninterrupted one's."""
    start = torch.cat([p.detach().flatten() for p in Given().tensors])
    cpu = train(name, torch.device("cpu"), steps)
    own = cpu if device.type == "cpu" else train(name, device, steps)  # a rehearsal compares no devices
    resumed = train(name, device, steps, True)
    distance = float((own - cpu).norm() / (cpu - start).norm())
    equal, again = torch.equal(own, cpu), torch.equal(own, resumed)
    near = again or (name in NORMS and float((own - resumed).norm() / (cpu - start).norm()) < CLOSE)
    ok = near and (equal if name in EXACT else distance < CLOSE) and bool(own.isfinite().all())
    return {"method": name, "equal": equal, "distance": distance, "resume_equal": again, "ok": ok}


def amp(device: torch.device, half: torch.dtype, steps: int) -> dict[str, Any]:
    """A small network with autocast; in fp16 with a GradScaler, and an overflow on one rank which all must skip."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    ddp = DistributedDataParallel(net)
    optimizer = birder.Birder(net.parameters(), lr=1e-3)
    scaled = half is torch.float16
    attachment = birder.attach(ddp, optimizer, overlap=not scaled)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10) if scaled else None
    random = torch.Generator().manual_seed(dist.get_rank())
    labels = torch.arange(64) % 10
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(7))
    losses = []
    for step in range(steps):
        x = (centres[labels] + 0.3 * torch.randn(64, 32, generator=random)).to(device)
        if scaled and step == steps // 2 and dist.get_rank() == 0:
            x = x * float("inf")
        optimizer.zero_grad()
        with torch.autocast(device.type, half):
            loss = nn.functional.cross_entropy(ddp(x), labels.to(device))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(loss.detach()))
    flat = torch.cat([p.detach().cpu().flatten() for p in net.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    attachment.close()
    taken = steps - 1 if scaled else steps
    same = all(torch.equal(other, flat) for other in everyone)
    ok = same and optimizer.steps == taken and losses[-1] < losses[0] and bool(flat.isfinite().all())
    return {
        "method": f"Birder, autocast {half}".replace("torch.", ""),
        "ranks_equal": same,
        "loss": losses[-1],
        "ok": ok,
    }


def tasks(world: int, kind: str) -> list[tuple[str, str]]:
    """What is run, in this order: (kind of task, what of it)."""
    names = [("method", n) for n in METHODS if world > 1 or not METHODS[n].get("hierarchical")]
    return names + [("autocast", half) for half in (["bfloat16", "float16"] if kind == "cuda" else ["bfloat16"])]


def _rank(
    rank: int, world: int, backend: str, kind: str, store: str, steps: int, first: int, wrong: str, pipe: Connection
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    device = torch.device("cpu")
    number = first
    try:
        if kind == "cuda":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        limit = timedelta(seconds=STALL_S)
        dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
        for number, (task, name) in list(enumerate(tasks(world, kind)))[first:]:
            if name == wrong and rank == world - 1:
                raise RuntimeError("on purpose")
            row = compare(name, device, steps) if task == "method" else amp(device, getattr(torch, name), steps)
            if rank == 0:
                pipe.send((number, row))
    except BaseException as error:
        pipe.send((number, {"ok": False, "error": f"rank {rank}: {type(error).__name__}: {str(error).strip()[:300]}"}))
        os._exit(1)  # the other ranks wait for this one, and what a GPU has failed at once it fails at again
    if rank == 0:
        pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()


def measure(
    world: int, backend: str, kind: str, steps: int = 60, only: range | None = None, wrong: str = ""
) -> Iterator[dict[str, Any]]:
    """Rows as they come, from `world` ranks on that back end, on "cuda" or "cpu".

    After a failure of any rank all are ended, and new ones continue with the next task: a kernel that reads where it must not
    spoils its process, and ranks that have lost one wait for it. only: numbers of tasks. wrong: a task that fails on the
    last rank.
    """
    every = tasks(world, kind)
    first, end = (0, len(every)) if only is None else (only.start, only.stop)
    while first < end:
        for number, row in _started(world, backend, kind, steps, first, wrong):
            yield {"ranks": world, "backend": backend, "method": " ".join(every[number]).removeprefix("method "), **row}
            first = number + 1
            if first >= end:
                break


def _started(
    world: int, backend: str, kind: str, steps: int, first: int, wrong: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of a task, its row) from task `first` on, until all are done or one has failed."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = mp.get_context("spawn").Pipe(duplex=False)
        args = (world, backend, kind, f"{folder}/store", steps, first, wrong, theirs)
        running = mp.spawn(_rank, args=args, nprocs=world, join=False).processes
        at, heard, ended = first, time.monotonic(), False
        try:
            while not ended:
                silent = time.monotonic() - heard > 2 * STALL_S
                codes = [process.exitcode for process in running]
                if ours.poll(0.5):
                    if (message := ours.recv()) is None:
                        ended = True
                        continue
                    yield message
                    if "error" in message[1]:
                        return
                    at, heard = message[0] + 1, time.monotonic()
                elif silent or codes != [None] * world:
                    yield at, {"ok": False, "error": f"nothing heard of it; exit status of the ranks: {codes}"}
                    return
        finally:
            for process in running:
                process.join(GRACE_S if ended else 0)
                if process.is_alive():
                    process.kill()
                    process.join(GRACE_S)
