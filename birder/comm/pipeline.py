"""Where the communication of a unit runs: on a thread beside backward, on a side stream, or at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch


class Pipeline:
    """Runs tasks in the order in which they were submitted, the same on every rank. This one runs them at once."""

    def __init__(self) -> None:
        self._busy_s = 0.0

    def take_busy(self) -> float:
        """Seconds spent in tasks since the last call. On CUDA the time to queue them."""
        busy, self._busy_s = self._busy_s, 0.0
        return busy

    def submit(self, task: Callable[[], None]) -> None:
        began = time.perf_counter()
        task()
        self._busy_s += time.perf_counter() - began

    def wait(self) -> None:
        """Returns when all submitted tasks are done. Raises the first error that one of them met."""

    def close(self) -> None:
        """Ends what the pipeline started."""


class ThreadPipeline(Pipeline):
    """One worker thread, for CPU tensors: encoding and collectives run while backward goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open = 0
        self._error: BaseException | None = None
        self._state = threading.Condition()
        # A daemon: a collective that never returns must not keep the interpreter from ending.
        threading.Thread(target=self._run, name="birder-comm", daemon=True).start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            error = None
            try:
                if self._error is None:
                    with torch.no_grad():
                        super().submit(task)
            except BaseException as e:
                error = e
            with self._state:
                self._error = self._error or error
                self._open -= 1
                self._state.notify_all()

    def submit(self, task: Callable[[], None]) -> None:
        with self._state:
            self._open += 1
        self._tasks.put(task)

    def wait(self) -> None:
        with self._state:
            self._state.wait_for(lambda: self._open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._tasks.put(None)


class StreamPipeline(Pipeline):
    """A side stream, for CUDA tensors: tasks are queued from the caller's thread, nothing waits on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)

    def submit(self, task: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            super().submit(task)

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
