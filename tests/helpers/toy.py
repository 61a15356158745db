"""A small problem whose model has awkward sizes: odd tensors, an embedding with rows never used, an unused parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

ROWS, USED = 23, 17


class Net(nn.Module):
    """Rows USED.. of the embedding never get a gradient; `scale` has one element."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 9)
        self.first = nn.Linear(9, width)
        self.second = nn.Linear(width, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.embed(rows)))) * self.scale


def batch(worker: int, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """A batch that depends on worker and step alone."""
    g = torch.Generator().manual_seed(1000 * step + worker)
    rows = torch.randint(USED, (size,), generator=g)
    return rows, (rows * 7) % 5


def loss(model: nn.Module, worker: int, step: int) -> Tensor:
    rows, target = batch(worker, step)
    return F.cross_entropy(model(rows), target)


def make(seed: int = 3, width: int = 37) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def train(model: nn.Module, optimizer: Optimizer, worker: int, steps: Iterable[int]) -> None:
    """These steps of a worker."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, worker, step).backward()
        optimizer.step()


def trained(make_optimizer: Callable[..., Optimizer], steps: int) -> Tensor:
    """The parameters of one worker's model after so many steps."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, 0, range(1, steps + 1))
    return flat(model)


def part(values: np.ndarray, name: str) -> Tensor:
    """The parameter `name` out of what `flat` gave."""
    start = 0
    for key, p in make().named_parameters():
        if key == name:
            return torch.from_numpy(values[start : start + p.numel()]).view_as(p)
        start += p.numel()
    raise KeyError(name)


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, detached."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
