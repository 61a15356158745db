"""Where the communication of a unit runs: on threads beside backward, on a side stream, or at once."""

from __future__ import annotations

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from birder.comm.tags import TaskTags
from birder.comm.trace import Trace

Task = Callable[[], Iterator[None] | None]
"""What a pipeline runs. A generator yields once, when what it sends first is on its way and it would begin to wait."""
HIGH = -1
"""Priority of a CUDA stream whose kernels go before those of ordinary ones."""


def _finish(work: Task | Iterator[None]) -> None:
    """Runs a task, or what is left of one that has begun, to its end."""
    for _ in (work() if callable(work) else work) or ():
        pass


class Pipeline:
    """Runs tasks in the order in which they were submitted, the same on every rank. This one runs them at once."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._submitted = 0
        self._failed = False
        self.trace = Trace()

    @property
    def sound(self) -> bool:
        """Whether all that was submitted is done, and nothing has ever failed."""
        return not self._failed

    def take_busy(self) -> float:
        """Seconds spent in tasks since the last call; beside each other they count twice. On CUDA the time to queue them."""
        busy, self._busy_s = self._busy_s, 0.0
        return busy

    def submit(self, task: Task, unit: int | None = None) -> None:
        """Runs `task` when it is its turn. `unit`: the number of the unit that it exchanges, for the trace."""
        began = time.perf_counter()
        with self._noting_failure(), self._next_tags().running(), self.trace.work(unit):
            _finish(task)
        self._busy_s += time.perf_counter() - began

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _next_tags(self) -> TaskTags:
        self._submitted += 1
        return TaskTags(self._submitted)

    def wait(self) -> None:
        """Returns when all submitted tasks are done. Raises the first error that one of them met."""

    def close(self) -> None:
        """Ends what the pipeline started."""


class ThreadPipeline(Pipeline):
    """Two worker threads, for CPU tensors: while backward goes on and unit k is on the wire, unit k+1 is encoded.

    The first thread begins a task: it runs until its `yield`, having started to send. The second one finishes it: waits for
    the wire and does the rest. Both keep the order of submission, but not beside each other: messages of two tasks are told
    apart by their tags (birder/comm/tags.py). A task that never yields is begun and finished by the second thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin: queue.SimpleQueue[tuple[Task, int | None, TaskTags] | None] = queue.SimpleQueue()
        self._finish: queue.SimpleQueue[tuple[Iterator[None] | Task, int | None, TaskTags] | None] = queue.SimpleQueue()
        self._open = 0
        self._error: BaseException | None = None
        self._state = threading.Condition()
        # Daemons: a collective that never returns must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=self._encode, name="birder-encode", daemon=True),
            threading.Thread(target=self._communicate, name="birder-comm", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sound(self) -> bool:
        with self._state:
            return not self._failed and self._open == 0

    def _encode(self) -> None:
        while (submitted := self._begin.get()) is not None:
            task, unit, tags = submitted
            if not inspect.isgeneratorfunction(task):
                self._finish.put(submitted)
                continue
            started = task()
            if self._attempt(lambda started=started: next(started, None), unit, tags):  # type: ignore[misc]
                self._finish.put((started, unit, tags))
            else:
                self._done()
        self._finish.put(None)

    def _communicate(self) -> None:
        while (begun := self._finish.get()) is not None:
            work, unit, tags = begun
            self._attempt(lambda work=work: _finish(work), unit, tags)  # type: ignore[misc]
            self._done()

    def _attempt(self, part: Callable[[], object], unit: int | None, tags: TaskTags) -> bool:
        """Runs a part of a task, unless an earlier one failed. Whether it went well."""
        if self._error is not None:
            return False
        began = time.perf_counter()
        try:
            with torch.no_grad(), tags.running(), self.trace.work(unit):
                part()
        except BaseException as e:
            with self._state:
                self._error, self._failed = self._error or e, True
            return False
        finally:
            with self._state:
                self._busy_s += time.perf_counter() - began
        return True

    def _done(self) -> None:
        with self._state:
            self._open -= 1
            self._state.notify_all()

    def submit(self, task: Task, unit: int | None = None) -> None:
        with self._state:
            self._open += 1
        self._begin.put((task, unit, self._next_tags()))

    def wait(self) -> None:
        with self._state:
            self._state.wait_for(lambda: self._open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._begin.put(None)
        if self._open == 0:  # otherwise a collective may never return
            for thread in self._threads:
                thread.join()


class StreamPipeline(Pipeline):
    """Two side streams, for CUDA tensors, beside backward's: while unit k is on the wire, unit k+1 is encoded.

    What a task does until its `yield` is queued on the first stream, the rest, and a task that never yields, on the second.
    Everything is queued from the caller's thread, in the order of submission; nothing waits on the host. Both streams have
    high priority: their kernels are short, and what they delay is a collective that all ranks wait for.

    The caller's stream comes before what is submitted, the first stream before the second, and `wait` brings the second
    before the caller's. A tensor that a task makes before its `yield` belongs, for torch's allocator, to the first stream,
    which could give its memory to the next unit before the second stream has read it. Instead of `record_stream`, whose
    events the allocator has to ask for, such tensors are held until `wait`: after it the first stream begins behind them.

    cuda: what streams are made with, `torch.cuda` or a model of it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__()
        self.trace.on = False
        self._cuda, self._device = cuda, device
        self._first, self._second = (cuda.Stream(device, priority=HIGH) for _ in range(2))
        self._held: list[dict[str, Any]] = []

    def submit(self, task: Task, unit: int | None = None) -> None:
        began = time.perf_counter()
        caller = self._cuda.current_stream(self._device)
        with self._noting_failure(), torch.no_grad(), self._next_tags().running():
            rest: Task | Iterator[None] = task
            if inspect.isgeneratorfunction(task):
                self._first.wait_stream(caller)
                with self._cuda.stream(self._first):
                    rest = task()
                    next(rest, None)
                self._hold(rest)
            self._second.wait_stream(caller)
            self._second.wait_stream(self._first)
            with self._cuda.stream(self._second):
                _finish(rest)
        self._busy_s += time.perf_counter() - began

    def _hold(self, started: Any) -> None:
        """Keeps what the generator, and those from which it yields, know at their `yield`."""
        while started is not None and (frame := getattr(started, "gi_frame", None)) is not None:
            self._held.append(dict(frame.f_locals))
            started = started.gi_yieldfrom

    def wait(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._second)
        self._held.clear()
