"""Birder in a plain DDP script.

    torchrun --nproc-per-node 2 examples/ddp.py

Ranks see different data, send one bit per parameter each way, and end with the same model. Rank 0 prints the loss and
the bytes sent per step; every rank prints the sum of its parameters, which must be equal.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from birder import Birder, attach

STEPS, BATCH = 200, 64


def data(rank: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, and whether they lie inside the unit circle."""
    x = torch.randn(STEPS * BATCH, 2, generator=torch.Generator().manual_seed(rank))
    return x, (x.square().sum(1) < 1).long()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same initial model on every rank
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    optimizer = Birder(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    attachment = attach(ddp, optimizer)

    for step, (x, y) in enumerate(zip(*(part.split(BATCH) for part in data(rank)), strict=True), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {attachment.counter.total / step:.0f} bytes sent per step")

    checksum = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    print(f"rank {rank}: sum of all parameters {checksum.item():.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
