"""Norms and maxima of whole tensors, also where FSDP has left this rank a shard of each: then ranks put them together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from birder.comm import AcrossHolders, Communicator, Requests


def norms(comm: Communicator, tensors: list[Tensor]) -> Requests[Tensor]:
    """The 2-norm of each tensor, fp32[len(tensors)]. Of shards every rank of a replica passes its own, in the same order."""
    own = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
    if comm.holders == 1:
        return own
    return (yield AcrossHolders(own.double().square())).sqrt().float()


def maxima(comm: Communicator, tensors: list[Tensor]) -> Requests[Tensor]:
    """The largest element of each tensor, [len(tensors)]; a shard may be empty."""
    own = torch.stack([t.max() if t.numel() else t.new_tensor(-math.inf) for t in tensors])
    return own if comm.holders == 1 else (yield AcrossHolders(own, largest=True))
