"""What habits share."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.distributed.habits.script import NAMES, Script

HABITS: dict[str, type[Script]] = {}
SECOND = ("second.weight", "second.bias")
FIRST = ("first.weight", "first.bias")
DDP_ONLY = ("DDP", "DDP, overlap=False", "hierarchical", "hierarchical, overlap=False")
EVERYWHERE = (*Script.ways, "FSDP2", "FSDP2, overlap=False")
CHANGED = r"changed|replaced|None|clip"


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


class Taken(Script):
    """The twin whose gradients are what a habit means."""

    ddp_options: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
    ways = EVERYWHERE
