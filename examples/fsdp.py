"""Birder between replicas that FSDP2 shards.

    torchrun --nproc-per-node 4 examples/fsdp.py

Two replicas of two ranks. Inside a replica, FSDP gathers parameters and reduce-scatters gradients in full precision.
Between replicas, each rank sends one bit for each parameter of its shard, each way. Rank 0 prints the loss and the
bytes sent per step; every rank prints the sum of all parameters, which must be equal.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from birder import Birder, attach

STEPS, BATCH, REPLICAS = 200, 64, 2


def data(rank: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, and whether they lie inside the unit circle."""
    x = torch.randn(STEPS * BATCH, 2, generator=torch.Generator().manual_seed(rank))
    return x, (x.square().sum(1) < 1).long()


def main() -> None:
    if int(os.environ["WORLD_SIZE"]) % REPLICAS:
        sys.exit(f"error: {REPLICAS} replicas of equal size need a multiple of {REPLICAS} ranks: --nproc-per-node 4")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])  # the second dimension alone
    fully_shard(model, mesh=mesh["shard"])

    optimizer = Birder(model.parameters(), lr=1e-3)
    attachment = attach(model, optimizer, mesh=mesh)  # gives all replicas the first one's parameters

    for step, (x, y) in enumerate(zip(*(part.split(BATCH) for part in data(rank)), strict=True), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == 1 or step % 50 == 0):
            print(f"step {step}: loss {loss.item():.3f}, {attachment.counter.total / step:.0f} bytes sent per step")

    checksum = torch.stack([p.full_tensor().double().sum() for p in model.parameters()]).sum()  # type: ignore[attr-defined]
    print(f"rank {rank}: sum of all parameters {checksum.item():.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
