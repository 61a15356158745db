"""Hooks in the form that `DistributedDataParallel.register_comm_hook` wants."""

# No postponed annotations here: DDP inspects them and wants the classes themselves.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


@torch._disable_dynamo  # else a compiled training step compiles what it calls
def bucket_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hands each bucket that is ready to `state.on_bucket`. DDP calls it in the same order on every rank."""
    found: Future[Tensor] = state.on_bucket(bucket)
    return found


def block_scaled_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Hands each bucket that is ready to `birder.BlockScaled`."""
    return bucket_hook(state, bucket)
