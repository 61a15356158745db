"""What habits share."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.distributed.habits.script import NAMES, Gradients, Script, drawn

HABITS: dict[str, type[Script]] = {}
SECOND = ("second.weight", "second.bias")
FIRST = ("first.weight", "first.bias")
DDP_ONLY = ("DDP", "DDP, overlap=False", "hierarchical", "hierarchical, overlap=False")
EVERYWHERE = (*Script.ways, "FSDP2", "FSDP2, overlap=False")
CHANGED = r"changed|replaced|None|clip"
CLIPS = r"clip"


def habit(cls: type[Script]) -> type[Script]:
    HABITS[cls.__name__] = cls
    return cls


def others(*names: str) -> tuple[str, ...]:
    return tuple(n for n in NAMES if n not in names)


def elementwise(cls: type[Script]) -> Any:
    """A twin of methods that treat every parameter by itself."""
    return lambda method, way: cls if method.elementwise else None


@habit
class Plain(Script):
    """nothing special"""

    ways = EVERYWHERE
    twin = None


class FirstStays:
    """Of a framework's habit: FIRST has no gradient from step 4 on, and does not move."""

    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    twin = elementwise(Plain)
    names = others(*FIRST)

    def stays(self, t: int) -> tuple[str, ...]:
        return FIRST if t >= 4 else ()


class FirstUnused(FirstStays):
    """Of a framework's habit: a branch with FIRST is not used from step 4 on."""

    def gradients(self, t: int, rank: int) -> Gradients:
        g = drawn(rank, t)
        return {n: v for n, v in g.items() if n not in FIRST} if t >= 4 else g


class Taken(Script):
    """The twin whose gradients are what a habit means."""

    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    ways = EVERYWHERE


class Absent(Script):
    """FIRST has no gradient on any rank in steps 4 to `until`."""

    ways = EVERYWHERE
    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    until: ClassVar[int] = 9
    names = others(*FIRST)
    twin = elementwise(Plain)

    def absent(self, t: int) -> bool:
        return 4 <= t <= self.until

    def stays(self, t: int) -> tuple[str, ...]:
        return FIRST if self.absent(t) else ()


class HalvedSumOfTwo(Script):
    """The twin of two micro-batches whose mean counts."""

    def gradients(self, t: int, rank: int) -> Gradients:
        a, b = drawn(rank, t), drawn(rank, t, 1)
        return {n: a[n] / 2 + b[n] / 2 for n in a}
