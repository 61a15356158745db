"""Small models under FSDP2, and the same under DDP, for the tests of birder/hooks/fsdp.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer, attach
from birder.hooks.attachment import Attachment
from tests.helpers import toy

Loss = Callable[[nn.Module, int, int], Tensor]


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shards over the mesh's second dimension, each linear layer a group of its own."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(model, mesh=mesh["shard"], **options)


def full(model: nn.Module) -> Tensor:
    """All parameters, whole, in one vector. Every rank of the replica calls it."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


class Even(nn.Module):
    """Sizes that every number of ranks here divides, so that FSDP and hierarchical DDP cut in the same places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 192, bias=False)
        self.second = nn.Linear(192, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_even() -> nn.Module:
    torch.manual_seed(5)
    return Even()


def even_loss(model: nn.Module, worker: int, step: int) -> Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * step + worker))
    return F.cross_entropy(model(x), (x.abs().sum(1) * 10).long() % 512)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "toy": (toy.make, toy.loss),
    "even": (make_even, even_loss),
}


def hsdp(
    problem: str, mesh: DeviceMesh, method: str, options: dict[str, Any], **how: Any
) -> tuple[nn.Module, BucketOptimizer, Attachment]:
    """A model, attached."""
    model = shard(PROBLEMS[problem][0](), mesh)
    optimizer = getattr(birder, method)(model.parameters(), **options)
    return model, optimizer, attach(model, optimizer, mesh=mesh, **how)


def ddp(
    problem: str, method: str, options: dict[str, Any], **how: Any
) -> tuple[nn.Module, BucketOptimizer, Attachment]:
    """The same under DDP, hierarchical where the method compresses."""
    model = DistributedDataParallel(PROBLEMS[problem][0](), bucket_cap_mb=0.0005)
    optimizer = getattr(birder, method)(model.module.parameters(), **options)
    return model, optimizer, attach(model, optimizer, hierarchical=optimizer.compressed, **how)


def train(model: nn.Module, optimizer: BucketOptimizer, loss: Loss, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
