"""What every rank has, known to all of them; and how much memory that leaves."""

from __future__ import annotations

import math
from typing import TypeVar

import torch.distributed as dist

from experiments.training import machine

T = TypeVar("T")


def gathered(mine: T) -> list[T]:
    """`mine` of every rank, in the order of ranks, on all of them; it must be picklable. Called on every rank."""
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def memory_left(share: float, on_device: float = math.inf) -> float:
    """Bytes that each rank may take of this `share` of what is free, the same on all. on_device: free on this rank's GPU."""
    readings, rank = gathered(machine.read()), dist.get_rank()
    return share * min(gathered(min(readings[rank].free / machine.ranks_here(readings, rank), on_device)))
