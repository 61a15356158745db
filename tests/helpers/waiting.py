"""Waiting for what another process does: never for a fixed time, since a busy machine needs longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], what: object = "it", within_s: float = 60, every_s: float = 0.05) -> T:
    """The first true answer of `true()`. Raises AssertionError, with `what`, if none came in time."""
    deadline = time.monotonic() + within_s
    while not (found := true()):
        said = what() if callable(what) else what
        assert time.monotonic() < deadline, f"did not come about in {within_s} s: {said}"
        time.sleep(every_s)
    return found


def came_true(true: Callable[[], object], within_s: float, every_s: float = 0.05) -> bool:
    """Whether `true()` held once in that time."""
    try:
        return bool(until(true, within_s=within_s, every_s=every_s))
    except AssertionError:
        return False
