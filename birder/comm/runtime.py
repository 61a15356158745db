"""Drivers: what performs the requests of methods (birder/comm/requests.py).

| driver | a unit's exchange runs |
|---|---|
| `run`, `Pipeline` | at once |
| `ThreadPipeline` | on two threads during backward, for CPU tensors |
| `StreamPipeline` | on two side streams during backward, for CUDA tensors |
| `lockstep` | for all ranks of a world in this process: `birder.VirtualRanks` |

A task is begun on the first thread or stream: until its first request that is not `early` is on its way. The second one
waits for the wire and does the rest, while the first begins the next task.

Two tasks have collectives under way at once, and the order in which they start them differs between ranks. gloo pairs a send
with the receive of the same tag, in the order in which they were posted. A driver therefore makes a tag of what is the same
on all ranks: the number of the task, in the order of submission, and of the call within it. Messages then cannot cross.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import GeneratorType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from birder.comm.collectives import CALLS, TASKS, finish
from birder.comm.communicator import Communicator, SingleProcess
from birder.comm.requests import Request, Requests
from birder.comm.trace import Trace, note_wire

T = TypeVar("T")
Task = Callable[[], Requests[None] | None]
"""What a pipeline runs. A plain function requests no collectives."""
PLACE = re.compile(r"^\[[^]]*\] *")
"""The line of gloo's source that its message begins with."""
Steps = Generator[Request, None, T]
"""A task that is being performed: it yields each time that something is on its way and it would begin to wait."""
HIGH = -1
"""Priority of a CUDA stream whose kernels go before those of ordinary ones."""


def performing(comm: Communicator, requests: Requests[T], task: Turn | None = None) -> Steps[T]:
    """Performs what is asked for: yields when a collective has started, and waits for it when it is resumed."""
    answer: Any = None
    while True:
        try:
            request = requests.send(answer)
        except StopIteration as end:
            return end.value
        operation, received, started = request.on(comm), None, False
        while True:
            try:
                post = operation.send(received)  # type: ignore[arg-type]
            except StopIteration as end:
                answer = end.value
                break
            if request.counted:
                post.count()
            began = time.perf_counter()
            wait, started = post.start(None if task is None else task.tag()), True
            if task is not None:
                task.pipeline.trace.add("wait", task.unit, began, time.perf_counter())
            yield request
            waited_from = time.perf_counter()
            received = wait()
            if task is not None:
                task.waited(began, waited_from)
        if not started:
            yield request


@overload
def run(comm: Communicator, requests: Request) -> Tensor: ...
@overload
def run(comm: Communicator, requests: Requests[T]) -> T: ...
def run(comm: Communicator, requests: Any) -> Any:
    """What `requests` ends with, or the answer to a single one, at once."""
    if isinstance(requests, Request):
        return finish(requests.on(comm), requests.counted)
    steps = performing(comm, requests)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def in_short(error: Exception) -> str:
    """What a collective has raised, to be quoted: its first sentence, without gloo's place and advice."""
    return PLACE.sub("", str(error).partition("\n")[0]).partition(". ")[0]


def asking(found: Any) -> Requests[None]:
    """What a method has returned, as a generator: it may have nothing to ask for."""
    if isinstance(found, GeneratorType):
        yield from found


def lockstep(comms: Sequence[Communicator], tasks: Sequence[Requests[Any]], enter: Callable[[int], None]) -> None:
    """Performs the tasks of all ranks of a world, each until it would wait for the others, then the next one's.

    enter: called with the rank that continues. Raises the first error that one of them meets.
    """
    going = {rank: performing(comm, task) for rank, (comm, task) in enumerate(zip(comms, tasks, strict=True))}
    while going:
        for rank, steps in list(going.items()):
            enter(rank)
            if next(steps, None) is None:
                del going[rank]


class Turn:
    """One task of a pipeline: the numbers of its messages, and what is noted of it."""

    def __init__(self, pipeline: Pipeline, number: int, task: Task, unit: int | None, whole: bool) -> None:
        self.pipeline, self.unit, self.task = pipeline, unit, task
        self.whole = whole or not inspect.isgeneratorfunction(task)
        self._first, self._calls = number % TASKS * CALLS, 0
        self.steps: Steps[None] | None = None

    def tag(self) -> int:
        self._calls += 1
        return self._first + self._calls % CALLS

    def waited(self, began: float, waited_from: float) -> None:
        """A collective that began at `began` is over; this thread has waited for it since `waited_from`."""
        note_wire(began, waited_from)
        self.pipeline.spent(waited_from - time.perf_counter())

    def begin(self) -> None:
        """Runs the task until it would wait, with something on its way that it does not need at once."""
        self.steps = performing(self.pipeline.comm, asking(self.task()), self)
        for request in self.steps:
            if not request.early:
                return

    def finish(self) -> None:
        """Runs what is left of it."""
        if self.steps is None:
            self.begin()
        for _ in self.steps or ():
            pass


class Pipeline:
    """Runs tasks in the order in which they were submitted, the same on every rank. This one runs them at once.

    comm: what performs their requests; an optimizer's is its own.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm or SingleProcess()
        self.trace = Trace()
        self._busy_s = 0.0
        self._submitted = 0
        self._open = 0
        """Of what was submitted, how much is not done."""
        self._failed = False
        self._state = threading.Condition()

    @property
    def sound(self) -> bool:
        """Whether all that was submitted is done, and nothing has ever failed."""
        with self._state:
            return not self._failed and self._open == 0

    def spent(self, seconds: float) -> None:
        with self._state:
            self._busy_s += seconds

    def take_busy(self) -> float:
        """Seconds spent in tasks since the last call, but for waits; two at the same time count twice. On CUDA the time to
        queue them."""
        with self._state:
            busy, self._busy_s = self._busy_s, 0.0
        return busy

    def submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        """Runs `task` when it is its turn. unit: the number of the unit that it exchanges, for the trace. whole: it begins
        when those before it are over."""
        turn = self._turn(task, unit, whole)
        with self._working(turn):
            turn.finish()

    def _turn(self, task: Task, unit: int | None, whole: bool) -> Turn:
        self._submitted += 1
        return Turn(self, self._submitted, task, unit, whole)

    @contextlib.contextmanager
    def _working(self, turn: Turn) -> Iterator[None]:
        """Inside a part of a task runs."""
        began = time.perf_counter()
        try:
            with torch.no_grad(), self.trace.work(turn.unit):
                yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self.spent(time.perf_counter() - began)

    def wait(self) -> None:
        """Returns when all submitted tasks are done. Raises the first error that one of them met."""

    def waiting(self) -> Requests[None]:
        """`wait`, of a task that is performed itself."""
        self.wait()
        yield from ()

    def close(self) -> None:
        """Ends what the pipeline started."""


class OwnTurn(Pipeline):
    """Of virtual ranks: tasks are a part of the step that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[Task] = []

    def submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        self._tasks.append(task)

    def waiting(self) -> Requests[None]:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            yield from asking(task())


_PIPELINES: weakref.WeakSet[ThreadPipeline] = weakref.WeakSet()
LEAVE_S = 10.0
"""How long a process that ends waits for messages under way: a script may stop between backward and `step`."""


@atexit.register
def _leave() -> None:
    """A thread that is inside gloo when the interpreter ends would abort the process, and a run that is over would count as
    failed."""
    until = time.monotonic() + LEAVE_S
    for pipeline in list(_PIPELINES):
        pipeline.settle(max(until - time.monotonic(), 0.0))


class ThreadPipeline(Pipeline):
    """Two worker threads, for CPU tensors. Each keeps the order of submission."""

    def __init__(self, comm: Communicator | None = None) -> None:
        super().__init__(comm)
        self._begun: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._rest: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # Daemons: a collective that never returns must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=self._encode, name="birder-encode", daemon=True),
            threading.Thread(target=self._communicate, name="birder-comm", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        _PIPELINES.add(self)

    def _encode(self) -> None:
        while (turn := self._begun.get()) is not None:
            if not turn.whole:
                self._attempt(turn, turn.begin)
            self._rest.put(turn)
            del turn  # while the thread waits for the next task it keeps no optimizer alive
        self._rest.put(None)

    def _communicate(self) -> None:
        while (turn := self._rest.get()) is not None:
            self._attempt(turn, turn.finish)
            del turn
            with self._state:
                self._open -= 1
                self._state.notify_all()

    def _attempt(self, turn: Turn, part: Callable[[], None]) -> None:
        """Runs a part of a task, unless an earlier one failed."""
        if self._error is None:
            try:
                with self._working(turn):
                    part()
            except BaseException as e:
                with self._state:
                    self._error = self._error or e

    def submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        with self._state:
            self._open += 1
        self._begun.put(self._turn(task, unit, whole))

    def wait(self) -> None:
        self.settle(None)
        with self._state:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, seconds: float | None) -> None:
        """Returns when all submitted tasks are done, or after so long."""
        with self._state:
            self._state.wait_for(lambda: self._open == 0, seconds)

    def close(self) -> None:
        self._begun.put(None)
        if self._open == 0:  # otherwise a collective may never return
            for thread in self._threads:
                if thread is not threading.current_thread():  # in which the collector may find that nobody uses it
                    thread.join()


class StreamPipeline(Pipeline):
    """Two side streams, for CUDA tensors, next to backward's: while unit k is on the wire, unit k+1 is encoded.

    Everything is queued from the caller's thread, in the order of submission; nothing waits on the host. Both streams have
    high priority: their kernels are short, and what they delay is a collective that all ranks wait for.

    The caller's stream comes before what is submitted, the first stream before the second, and `wait` brings the second
    before the caller's. A tensor that a task makes on the first stream belongs, for torch's allocator, to that stream,
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

    def submit(self, task: Task, unit: int | None = None, whole: bool = False) -> None:
        caller, turn = self._cuda.current_stream(self._device), self._turn(task, unit, whole)
        with self._working(turn):
            if not turn.whole:
                self._first.wait_stream(caller)
                with self._cuda.stream(self._first):
                    turn.begin()
                self._hold(turn.steps)
            self._second.wait_stream(caller)
            self._second.wait_stream(self._first)
            with self._cuda.stream(self._second):
                turn.finish()

    def _hold(self, started: Any) -> None:
        """Keeps what a generator, those from which it yields and those that it drives know where they stand."""
        while started is not None and (frame := getattr(started, "gi_frame", None)) is not None:
            known = dict(frame.f_locals)
            self._held.append(known)
            for driven in known.values():
                if isinstance(driven, GeneratorType):
                    self._hold(driven)
            started = started.gi_yieldfrom

    def wait(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._second)
        self._held.clear()
