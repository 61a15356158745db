"""A model for `experiments/predict.py model=tests.helpers.toy_module:make`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def make(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A small network and the function that computes its loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5))
    x = torch.randn(batch, 40)
    return net, lambda: net(x).square().mean()


def vector(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A loss that is no scalar."""
    net, _ = make(batch)
    return net, lambda: net(torch.randn(batch, 40))


def frozen(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model without a parameter that is trained."""
    net, loss = make(batch)
    return net.requires_grad_(False), loss


def broken(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A function that fails."""
    raise RuntimeError(f"no room for\n{batch} samples")


def uneven(batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A function that takes whole eights."""
    assert batch % 8 == 0, f"no room for {batch} samples"
    return make(batch)
