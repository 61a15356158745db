"""When a step computed, encoded, sent and waited: spans of time, a few for each unit, kept for one step.

Host time: with CUDA, where work is only queued, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_here = threading.local()
MOST = 1 << 16
"""Spans that are kept until the step ends: where another optimizer steps, none of this one's ever does."""


class Span(NamedTuple):
    """One interval of one step on one rank. Times: seconds of `time.perf_counter`.

    kind: what happened,
          work     a part of a unit's exchange ran on thread `thread`, its waits included
          wait     ... and that thread started a collective or waited for it
          wire     a collective was under way: from its start to the end of the wait for it
          encode, decode  what dense methods do before and after their all-reduce
          compute  forward and backward
          exposed  `step()` waited for the exchange
          apply    the update of parameters
    unit: the unit's number (of dense methods the bucket's); None where it is not of one.
    """

    kind: str
    unit: int | None
    begin: float
    end: float
    thread: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Trace:
    """The spans of the step under way, and in `last` those of the step that ended last."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.last: list[Span] = []
        self._now: deque[Span] = deque(maxlen=MOST)

    def add(self, kind: str, unit: int | None, begin: float, end: float) -> None:
        """Called from any thread."""
        if self.on:
            self._now.append(Span(kind, unit, begin, end, threading.get_ident()))

    @contextlib.contextmanager
    def span(self, kind: str, unit: int | None = None) -> Iterator[None]:
        """Records what happens inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, unit, began, time.perf_counter())

    @contextlib.contextmanager
    def work(self, unit: int | None) -> Iterator[None]:
        """Records a part of a unit's exchange; `note_wire` on this thread belongs to that unit meanwhile."""
        before = current()
        _here.at = (self, unit)
        try:
            with self.span("work", unit):
                yield
        finally:
            _here.at = before

    def end_step(self) -> None:
        """What was recorded since the last call becomes `last`."""
        ended, self._now = self._now, deque(maxlen=MOST)
        self.last = list(ended)


def current() -> tuple[Trace, int | None] | None:
    """Trace and unit of the `work` that this thread is in."""
    return getattr(_here, "at", None)


def note_wire(began: float, waited_from: float) -> None:
    """A collective that began at `began` is over; this thread has waited for it since `waited_from`."""
    if (at := current()) is not None:
        trace, unit = at
        now = time.perf_counter()
        trace.add("wire", unit, began, now)
        trace.add("wait", unit, waited_from, now)
