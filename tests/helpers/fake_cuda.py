"""A model of CUDA's streams on the CPU, which finds what a GPU would only sometimes get wrong.

Operations run at once, on CPU tensors, and are noted: on which stream, what they read and what they write. A vector clock for
each stream says what is certain to have happened before. `FakeCuda.faults` names

    a read that need not come after a write of the same bytes,
    a write that need not come after a read or write of them,
    an allocation while another stream may still use memory that has gone back to torch's allocator: that gives memory away
    again in the order of the stream that it was made on, and asks no other stream.

`FakeCuda` has what birder/comm/runtime.py asks of `torch.cuda`. For CPU tensors FSDP asks `torch.cpu` for streams, which do
nothing. Inside `streams_of_cpu` they are those of the model, so that torch's own code of FSDP2 runs under it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]


class Stream:
    """Work in the order in which it was queued. `clock`: for each stream, how much of it is certain to be done before."""

    def __init__(self, world: FakeCuda, device: torch.device | None = None, priority: int = 0) -> None:
        self.world, self.priority, self.number = world, priority, len(world.streams)
        self.clock: Clock = {self.number: 0}
        world.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        """What is queued here from now on comes after all that is queued there by now."""
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        """What has been queued here by now."""
        event = Event(self.world)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is queued here from now on comes after what the event stands for."""
        self.world.collect()
        self.world.waits += 1
        for number, time in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), time)

    def tick(self) -> tuple[int, int]:
        """One more operation: (stream, its number there)."""
        self.clock[self.number] += 1
        return self.number, self.clock[self.number]


class Event:
    """A point in a stream; before `record` it stands for nothing."""

    def __init__(self, world: FakeCuda) -> None:
        self.world = world
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.world.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.world.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """The host waits; nothing is free for the allocator that was not before."""


class Memory:
    """One allocation, and what has been done with it: (stream and number, name, first byte, end, whether it wrote).

    recorded: streams of which the allocator has been told that they use it: it waits until they have done so.
    """

    def __init__(self, tensor: Tensor, stream: Stream | None) -> None:
        self.alive, self.stream = StorageWeakRef(tensor.untyped_storage()), stream
        self.uses: list[tuple[tuple[int, int], str, int, int, bool]] = []
        self.recorded: set[int] = set()


class FakeCuda(TorchDispatchMode):
    """Inside of it every operation is noted; `main` is the stream that is current first."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.main = Stream(self)
        self.current = self.main
        self.memory: dict[int, Memory] = {}
        self.free: list[Memory] = []
        self.faults: list[str] = []
        self.launches = self.waits = 0

    # ---- what a pipeline asks of torch.cuda --------------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, device, priority)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def Event(self, *args: Any, **options: Any) -> Event:
        return Event(self)

    def record_stream(self, tensor: Tensor) -> None:
        """As `tensor.record_stream(current stream)`."""
        memory = self.memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.recorded.add(self.current.number)

    @contextlib.contextmanager
    def streams_of_cpu(self) -> Iterator[None]:
        """Inside, `torch.cpu` has these streams."""
        names = ("Stream", "Event", "current_stream", "stream")
        kept = {name: getattr(torch.cpu, name) for name in names}
        for name in names:
            setattr(torch.cpu, name, getattr(self, name))
        try:
            yield
        finally:
            for name, own in kept.items():
                setattr(torch.cpu, name, own)

    # ---- what is noted -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then does the same with the part that it holds
        kwargs = kwargs or {}
        self.collect()
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changed else reads).extend(t for t in tree_leaves(value) if isinstance(t, Tensor))
        before = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [t for t in made if t.untyped_storage()._cdata not in before]
        if fresh or writes:  # otherwise it is a view
            self.note(str(func), reads, writes, fresh)
        return out

    def note(self, name: str, reads: list[Tensor], writes: list[Tensor], fresh: list[Tensor] = ()) -> None:  # type: ignore[assignment]
        """An operation on the current stream. `fresh`: what it has allocated and written."""
        self.launches += 1
        at = self.current.tick()
        if fresh:
            self._allocate(name)
        for tensor in fresh:
            self.memory[tensor.untyped_storage()._cdata] = Memory(tensor, self.current)
        for tensor in reads:
            self._use(tensor, at, name, False)
        for tensor in (*writes, *fresh):
            self._use(tensor, at, name, True)

    def _use(self, tensor: Tensor, at: tuple[int, int], name: str, wrote: bool) -> None:
        if tensor.numel() == 0:
            return
        key = tensor.untyped_storage()._cdata
        if key not in self.memory:  # there before
            self.memory[key] = Memory(tensor, None)
        first = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = first + span * tensor.element_size()
        for when, other, begin, stop, written in self.memory[key].uses:
            if (wrote or written) and first < stop and begin < end and not self._before(when, self.current):
                self.faults.append(
                    f"{name} on stream {at[0]} {'writes' if wrote else 'reads'} what {other} on stream {when[0]} "
                    f"{'writes' if written else 'reads'}, and nothing puts one before the other"
                )
        self.memory[key].uses.append((at, name, first, end, wrote))

    @staticmethod
    def _before(when: tuple[int, int], stream: Stream) -> bool:
        return stream.clock.get(when[0], 0) >= when[1]

    def collect(self) -> None:
        """Looks for memory that nobody holds any more."""
        for key, memory in list(self.memory.items()):
            if memory.alive.expired():
                del self.memory[key]
                if memory.stream is not None:
                    self.free.append(memory)

    def _allocate(self, name: str) -> None:
        """Memory that is free may be given to the current stream, if that is the one on which it was made."""
        for memory in [m for m in self.free if m.stream is self.current]:
            self.free.remove(memory)
            for when, user, *_ in memory.uses:
                if when[0] not in memory.recorded and not self._before(when, self.current):
                    self.faults.append(
                        f"{name} on stream {self.current.number} may be given memory that {user} on stream {when[0]} "
                        "may still use"
                    )
