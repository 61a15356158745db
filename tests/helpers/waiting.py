"""Waiting for what another process does: never for a fixed time, since a busy machine needs longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], what: object = "it", within_s: float = 300, every_s: float = 0.05) -> T:
    """The first true answer of `true()`. Raises AssertionError, with `what`, if none came in time.

    within_s: bounds a hang, and nothing else: a machine may be ten times as slow as any that was thought of.
    """
    deadline = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"did not come about in {within_s} s: {what() if callable(what) else what}"
        time.sleep(every_s)
    return found
