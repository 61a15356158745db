"""How a rank joins the process group of its run, and leaves it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from experiments.training import heartbeat, machine, products
from experiments.workloads.base import Shard
from launch.errors import UserError
from launch.spec import RunSpec
from launch.words import say

_joined = itertools.count(1)
"""Counts the worlds that this process joins."""

# ---- what every rank has, known to all of them ------------------------------------------------------------------------

T = TypeVar("T")


def gathered(mine: T) -> list[T]:
    """`mine` of every rank, in the order of ranks, on all of them; it must be picklable. Called on every rank."""
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def memory_left(share: float, on_device: float = math.inf) -> float:
    """Bytes that each rank may take of this `share` of what is free, the same on all. on_device: free on this rank's GPU."""
    readings, rank = gathered(machine.read()), dist.get_rank()
    return share * min(gathered(min(readings[rank].free / machine.ranks_here(readings, rank), on_device)))


# ---- joining and leaving ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(backend: str, collective_timeout_s: float, heartbeat_timeout_s: float) -> Iterator[tuple[int, int]]:
    """This process as the rank that torchrun's environment names, in the process group of all: (rank, number of ranks)."""
    timeout = timedelta(seconds=collective_timeout_s)
    shared, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    # torchrun keeps one store for all jobs of run.py -m, with the addresses that ranks had in the job before.
    store = dist.PrefixStore(f"world{next(_joined)}", shared)
    heartbeat.start(store, rank, size, heartbeat_timeout_s=heartbeat_timeout_s, join_s=collective_timeout_s)
    _agree(store, rank, size, backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield rank, size
        dist.barrier()
        heartbeat.stop()
    finally:
        dist.destroy_process_group()


def _agree(store: dist.Store, rank: int, size: int, backend: str) -> None:
    """Raises UserError on every rank where back ends differ: ranks would wait for each other until a time limit."""
    keys = [f"backend/{r}" for r in range(size)]
    store.set(keys[rank], backend)
    every = [value.decode() for value in store.multi_get(keys)]
    if odd := [r for r in range(size) if every[r] != every[0]]:
        heartbeat.stop()
        store.set(f"{keys[rank]}/read", "")
        if rank == 0:  # which may hold the store
            store.wait([f"{key}/read" for key in keys])
        raise UserError(
            f"rank 0 takes {every[0]}, rank {odd[0]} {every[odd[0]]}: torch sees GPUs on some nodes only; mend those, or set "
            "cluster.backend=gloo"
        )


@contextlib.contextmanager
def world(spec: RunSpec) -> Iterator[Shard]:
    """The same with device and threads of a run. Raises UserError where its precision is not for that device."""
    cluster, threads = spec.config["cluster"], spec.config["train"]["threads"]
    backend, device = placed(cluster)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # What is refused first, so that a refusal leaves torch's settings as they were.
    products.check_device(spec.config["train"], device)
    allow_tf32(spec.config["train"]["precision"], device)
    if threads:
        torch.set_num_threads(int(threads))
    elif "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with joined(
        backend, float(cluster.get("collective_timeout_s", 300)), float(cluster.get("heartbeat_timeout_s", 30))
    ) as (rank, size):
        if rank == 0 and products.slow(spec.config["train"], device):
            say("this CPU has no instructions for bf16, which makes such runs very slow: add train.bf16_matmul=fp32")
        yield Shard(rank, size, device)


def placed(cluster: dict[str, Any]) -> tuple[str, torch.device]:
    """The back end and the device of this rank."""
    backend, asked = cluster.get("backend", "auto"), cluster.get("device", "auto")
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() and asked != "cpu" else "gloo"
    if backend != "nccl" and asked != "cuda":
        return backend, torch.device("cpu")
    # On gloo ranks may share a GPU: their messages are staged in host memory (birder/comm/staged.py).
    number = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    return backend, torch.device("cuda", number)


def allow_tf32(precision: str, device: torch.device) -> None:
    """Products in TF32 where that is asked for, and nowhere else: torch's own default differs between operations.

    Raises UserError on a CPU, which has no such format.
    """
    tf32 = precision == "tf32"
    if tf32 and device.type != "cuda":
        raise UserError("train.precision=tf32 is a GPU's format: use fp32 or bf16 on a CPU")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
