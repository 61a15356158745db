"""What frameworks put around a model or an optimizer, taken off; and wrappers whose gradients no hook would get."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from birder.hooks.attachment import Detached
from birder.optim.base import BucketOptimizer


def unwrap_model(model: Any) -> Any:
    """The model inside what `torch.compile` returned; any other one as it is."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those of Accelerate and Lightning; any other one as it is."""
    # Lightning's claims to be of the class that it wraps, so the class says nothing.
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def unwrap_method(optimizer: Any) -> BucketOptimizer:
    """The same, and one of this package. Raises TypeError for any other."""
    inner = unwrap_optimizer(optimizer)
    if not isinstance(inner, BucketOptimizer):
        raise TypeError(f"attach needs an optimizer of the birder package, got {type(inner).__name__}")
    return inner


def check_reducer(model: DistributedDataParallel) -> None:
    """Raises RuntimeError for a DDP model whose buckets come to no hook, or to another one."""
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            "DDP was built for compiled autograd (torch._dynamo.config.optimize_ddp='python_reducer'), and gives hooks no "
            "buckets: leave optimize_ddp at its default and compile forward only, with torch.compile(ddp)"
        )
    if any(base.__module__.split(".")[0] == "torchft" for base in type(model).__mro__):
        raise RuntimeError(
            "torchft's DistributedDataParallel averages gradients in a hook of its own, through groups that change while it "
            "trains: use torch's DistributedDataParallel, and go on from checkpoints after a failure"
        )
    if any(not isinstance(state, Detached) for _, state in getattr(model, "_comm_hooks", [])):
        raise RuntimeError(
            "another communication hook is registered with this model: build a new DistributedDataParallel and attach to that"
        )
