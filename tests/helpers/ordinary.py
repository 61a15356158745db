"""A small model, methods, and the loop of an ordinary training script, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import birder

METHODS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda p: birder.AdamW(p, lr=1e-2),
    "Birder": lambda p: birder.Birder(p, lr=1e-2, weight_decay=0.1),
    "OneBitAdam": lambda p: birder.OneBitAdam(p, lr=1e-2, warmup_steps=3, eps=1e-4),
    "OneBitLAMB": lambda p: birder.OneBitLAMB(p, lr=1e-2, warmup_steps=3),
    "ZeroOneAdam": lambda p: birder.ZeroOneAdam(p, lr=1e-2, warmup_steps=3),
    "CSER": lambda p: birder.CSER(p, lr=1e-2, gradient_ratio=2, model_ratio=2, reset_every=3, block=8),
    "EFSGD": lambda p: birder.EFSGD(p, lr=1e-2, ratio=2, block=8),
    "SLAMB": lambda p: birder.SLAMB(p, lr=1e-2, fraction=0.5, dense_below=1, sync_every=4),
}
LOCAL: dict[str, Callable[..., Any]] = {
    "QSparse": lambda p: birder.QSparseLocalSGD(p, lr=1e-2, ratio=2, sync_every=4, block=8),
    "SparseLoCo": lambda p: birder.SparseLoCo(p, lr=1e-2, sync_every=4, chunk=32, top_k=32),
    "ZeroOneAdam with local steps": lambda p: birder.ZeroOneAdam(
        p, lr=1e-2, warmup_steps=2, local_doubling=1, local_limit=4
    ),
}
"""Methods whose ranks' models differ between synchronisations."""


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.aux, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor, aux: bool = True) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + self.aux(h) if aux else h)


def batches(rank: int, count: int, seed: int = 0) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        yield torch.randn(4, 6, generator=g)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def apart(tensor: Tensor) -> float:
    """The largest difference from rank 0's."""
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    gap = (tensor.detach() - first).abs().max().reshape(1)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)


def said(run: Callable[[], Any]) -> str:
    """The one line with which `run` is refused; '' where it is not."""
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def train(ddp: nn.Module, optimizer: Optimizer, rank: int, count: int, seed: int = 0, **options: Any) -> None:
    for x in batches(rank, count, seed):
        optimizer.zero_grad()
        ddp(x, **options).square().mean().backward()
        optimizer.step()


def state_of(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    """What this rank keeps for every element of a parameter."""
    unit, i = optimizer._where[p]
    return {k: unit.view(t, i).clone() for k, t in unit.state.items() if t.numel() == unit.padded}
