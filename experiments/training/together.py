"""What every rank has, known to all of them."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(mine: T) -> list[T]:
    """`mine` of every rank, in the order of ranks, on all of them; it must be picklable. Called on every rank."""
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
