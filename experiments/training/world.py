"""How a rank joins the process group of its run, and leaves it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from experiments.training import presence
from experiments.workloads.base import Shard
from launch.spec import RunSpec


@contextlib.contextmanager
def world(spec: RunSpec) -> Iterator[Shard]:
    """This process as the rank that torchrun's environment names: process group, device and threads of the run."""
    shard = _join(spec)
    try:
        yield shard
        dist.barrier()
        presence.stop()
    finally:
        dist.destroy_process_group()


def _join(spec: RunSpec) -> Shard:
    cluster, threads = spec.config["cluster"], spec.config["train"]["threads"]
    backend = cluster.get("backend", "auto")
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if threads:
        torch.set_num_threads(int(threads))
    elif "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    timeout = timedelta(seconds=float(cluster.get("timeout_s", 300)))
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    silence_s = float(cluster.get("silence_s", 30))
    presence.start(store, rank, size, silence_s=silence_s, join_s=timeout.total_seconds())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Shard(rank, size, device)
