"""Process groups that an attachment has for itself, kept for the next one when it is closed.

torch cannot give one back and make another of the same ranks: the new one would have the old one's name, and find in the
store what ranks have left there. One that is merely forgotten keeps its connections and threads; gloo's wake up a hundred
times a second. With 8 ranks on 2 cores, 20 of them made every step 5 to 15 % longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from birder.comm.collectives import gather_numbers, new_group
from birder.comm.launcher import digest_of

OFFERED = 8
"""Of the groups that were given back: so many of the last are offered to the other ranks."""

_FREE: WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = WeakKeyDictionary()
"""By the world that they were made in: they go when it ends."""

_PARTS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, tuple[int, ...]], dist.ProcessGroup]] = WeakKeyDictionary()
"""By the group, not by its name: where ranks are threads of one process, each has another group of the same name."""


def borrow(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Another process group of the same ranks (None: the world's), that nobody else uses. All of them call it.

    One that was given back, where all ranks have the same, or a new one. device: of the tensors that ranks agree with.
    """
    wanted = _about(group)
    free = {digest_of(other.group_name) or 1: other for other in _free() if _about(other) == wanted}  # 0: none
    mine = [*list(free)[-OFFERED:], *[0] * OFFERED][:OFFERED]
    common = set.intersection(*map(set, gather_numbers(group, mine, device))) - {0}
    if not common:
        return new_group(dist.get_process_group_ranks(group), like=group)
    taken = free[min(common)]
    _free().remove(taken)
    return taken


def give_back(group: dist.ProcessGroup) -> None:
    """For the next `borrow` in this world. No message of the group may be under way."""
    if _about(group) is not None:
        _free().append(group)


def _free() -> list[dist.ProcessGroup]:
    """Those of this world."""
    assert dist.group.WORLD is not None
    return _FREE.setdefault(dist.group.WORLD, [])


def part(group: dist.ProcessGroup, ranks: Sequence[int], number: int = 0) -> dist.ProcessGroup:
    """A process group of some ranks of `group`, for whoever has borrowed that: made once. All of `ranks` call it.

    Of the world, for whoever takes turns with all others: `birder.predict.measure_link`. number: for another group of the
    same ranks.
    """
    made = _PARTS.setdefault(group, {})
    key = number, tuple(ranks)
    if key not in made:
        made[key] = new_group(list(ranks), group)
    return made[key]


def ended(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has been destroyed: its other ranks may have gone, or do something else."""
    return group is not None and _about(group) is None


def _about(group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], str] | None:
    """Its ranks and back ends; None where its world has ended."""
    try:
        return tuple(dist.get_process_group_ranks(group)), str(dist.get_backend_config(group))
    except (KeyError, ValueError):
        return None
