"""Numbers for messages on gloo: of the task that sends, and of the call within the task.

The two threads of a pipeline (birder/comm/pipeline.py) have collectives under way at once, and the order in which they start
them differs between ranks. gloo pairs a send with the receive of the same tag, in the order in which they were posted. A tag
is therefore made of what is the same on all ranks: the number of the task, in the order of submission, and the number of
the call within it. Messages then cannot cross, whatever a task communicates before and after its `yield`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

TASKS, CALLS = 1 << 14, 1 << 8
"""Tags are used again after so many tasks, and calls of one task: far more than are under way at once."""
OUTSIDE = TASKS * CALLS
"""The first of the tags of calls that no task makes; those keep the order of the thread that makes them."""

_here = threading.local()


class TaskTags:
    """The tags of one task; on whichever thread a part of it runs, inside `running`."""

    def __init__(self, task: int) -> None:
        self._first = task % TASKS * CALLS
        self._calls = 0

    def next(self) -> int:
        self._calls += 1
        return self._first + self._calls % CALLS

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, this thread's collectives are the task's."""
        before = getattr(_here, "task", None)
        _here.task = self
        try:
            yield
        finally:
            _here.task = before


def current_task() -> TaskTags | None:
    """The task of which this thread runs a part."""
    return getattr(_here, "task", None)
