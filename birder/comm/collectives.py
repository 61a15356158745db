"""`Collectives` of one process group: each counts the bytes that this rank sends."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from birder.comm import staged
from birder.comm.counter import ByteCounter
from birder.comm.topology import Topology
from birder.comm.trace import note_wire
from birder.kernels.bits import pack, unpack

TASKS, CALLS = 1 << 14, 1 << 8
"""Tags are used again after so many tasks, and calls of one task: far more than are under way at once."""
OUTSIDE, OUTSIDE_TAGS = TASKS * CALLS, 1 << 20
"""The first of the tags of calls that no task makes, and after how many these are used again."""

FEW = 512
"""Bytes of flags up to which sending all of them to every peer takes less time than a collective more."""
OWN = 1 << 32
"""Groups that are made here have numbers above those that torch gives."""

_MADE: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""By world: how many groups of the same ranks this rank has made."""

T = TypeVar("T")
Wait = Callable[[], Tensor]
"""What waits for a collective that is under way, and returns what has been received."""


@dataclass(frozen=True, slots=True)
class Post:
    """One collective of a link, for a driver to start (birder/comm/runtime.py).

    start: with the tag of its messages, None for one of the link's own; returns what waits.
    count: counts the bytes that this rank sends.
    """

    start: Callable[[int | None], Wait]
    count: Callable[[], None]


Operation = Generator[Post, Tensor, T]
"""Yields the collectives that it wants one after the other, is sent what each received, and returns a result."""


def finish(operation: Operation[T], counted: bool = True) -> T:
    """The operation's result, at once: starts each collective and waits for it."""
    received: Any = None
    while True:
        try:
            post = operation.send(received)
        except StopIteration as end:
            return end.value
        if counted:
            post.count()
        began = time.perf_counter()
        received = post.start(None)()
        note_wire(began, began)


def gather_numbers(group: dist.ProcessGroup | None, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """What each rank of the group says, in rank order: as many numbers on all. Their bytes are not counted.

    device: of the tensors that carry them.
    """
    size, mine = dist.get_world_size(group), torch.tensor(numbers, dtype=torch.int64, device=device)
    link = Collectives(group, Topology(1, size), ByteCounter())
    return finish(link.all_gather(mine)).view(size, -1).tolist()  # type: ignore[no-any-return]


def new_group(ranks: list[int], like: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A process group of `ranks`: all of them call it, and no other rank has to.

    like: the group whose back ends it has; None: those of the world. Its collectives may take as long as those of the whole
    world. Raises RuntimeError when torch makes no group.
    """
    world: Any = dist.group.WORLD
    backends = str(dist.get_backend_config(world if like is None else like))
    options, timeout = None, _world_timeout()
    if torch.cuda.is_available() and dist.is_nccl_available() and "cuda:nccl" in backends:
        # Its kernels go before those of backward, as those of the streams that wait for them do (birder/comm/runtime.py).
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout
    named = None if backends == str(dist.get_backend_config(world)) else backends
    # Of a world that is bound to a device (`init_process_group(device_id=...)`) torch would split the group off, and
    # ncclCommSplit is a collective of the whole world: ranks outside of the group never come.
    bound = world.bound_device_id if len(ranks) == dist.get_world_size() else None
    # By itself torch numbers groups on every rank, and names them so. Ranks outside of this group do not make it, so their
    # numbers would be others from then on, and the next group of all ranks would wait for ever. Here the name is that of the
    # ranks, and how many groups of the same ranks have been made here; torch's own count stays.
    made = _MADE.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    count = OWN + made[tuple(ranks)]
    with _set(world, "bound_device_id", bound), _set(dist.distributed_c10d._world, "group_count", count):
        group = dist.new_group(
            ranks, timeout=timeout, backend=named, pg_options=options, use_local_synchronization=True
        )
    if group is None:
        raise RuntimeError(f"torch.distributed made no process group of ranks {ranks}")
    return group  # type: ignore[return-value]


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, that attribute has this value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _world_timeout() -> timedelta | None:
    """How long a collective of the whole world may take; None: not known. (torch's own default is another one.)"""
    world = dist.group.WORLD
    for kind in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return world._get_backend(torch.device(kind)).options._timeout  # type: ignore[union-attr]
    return None


def backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """What carries tensors on `device`: "gloo", "nccl", ...; "" when the group (None: the world) has nothing for it.

    A group may have one for each kind of device, however it was asked for: "gloo", "cpu:gloo,cuda:nccl", or nothing at all.
    """
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {kind: name for kind, _, name in pairs}.get(device.type, "")


def _arrival(sent: dist.Work | None, received: Tensor) -> Wait:
    """What waits for a collective of the back end; on the stream that is current then, not on the one that sent."""

    def arrived() -> Tensor:
        assert sent is not None
        sent.wait()
        return received

    return arrived


def gather_into(out: Tensor, part: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> dist.Work | None:
    """torch's all-gather into one tensor: newer releases have renamed it, and warn of the old name."""
    call: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, part, group=group, async_op=async_op)


def scatter_into(
    part: Tensor, flat: Tensor, group: dist.ProcessGroup | None, async_op: bool = False, **op: dist.ReduceOp.RedOpType
) -> dist.Work | None:
    """torch's reduce-scatter of one tensor, likewise. op: the sum where it is not given."""
    call: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, flat, group=group, async_op=async_op, **op)


class Collectives:
    """A process group, with the collectives that the methods need. A link without a group is this process alone.

    On gloo, exchanges are plain sends and receives, all posted before the first is waited for: gloo's own all-to-all
    leaves half of a full-duplex link idle, its reduce-scatter is an all-reduce inside. GPU tensors are staged in host
    memory there (birder/comm/staged.py). On other back ends they are the back end's collectives. Sums are taken in rank
    order, so that they do not depend on timing.

    Every collective is an `Operation`: whoever drives it decides when it waits. Other collectives may begin before. `out`:
    where what is received goes, contiguous; a new tensor where it is not given.
    """

    def __init__(self, group: dist.ProcessGroup | None, topology: Topology, counter: ByteCounter) -> None:
        self.group = group
        self.counter = counter
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.size = len(self.ranks)
        self.rank = 0 if group is None else dist.get_rank(group)
        # A topology of just this group numbers its ranks from 0, one of the whole world as the world does.
        numbers = range(self.size) if topology.world_size == self.size else self.ranks
        # Which of its ranks are on this rank's node, itself among them.
        self.near = [topology.same_node(numbers[self.rank], peer) for peer in numbers]
        self._backends: dict[str, str] = {}
        self._outside = 0
        self._received: dict[tuple[int, int], Tensor] = {}

    def _backend(self, tensor: Tensor) -> str:
        kind = tensor.device.type
        if kind not in self._backends:
            self._backends[kind] = backend_for(self.group, tensor.device)
        return self._backends[kind]

    def _next_tag(self) -> int:
        """Of an exchange that no task makes: those keep the order of the thread that makes them."""
        self._outside = (self._outside + 1) % OUTSIDE_TAGS
        return OUTSIDE + self._outside

    def count_pairwise(self, nbytes: int) -> None:
        """One collective in which this rank sends `nbytes` to every peer."""
        near = sum(self.near) - 1
        self.counter.collective(near * nbytes, (self.size - 1 - near) * nbytes)

    def count_ring_all_reduce(self, nbytes: int) -> None:
        """One all-reduce of `nbytes` around a ring: 2(n-1)/n of it to the next rank."""
        share, near = 2 * (self.size - 1) * nbytes // self.size, self.near[(self.rank + 1) % self.size]
        self.counter.collective(share if near else 0, 0 if near else share)

    def _exchange(self, out: list[Tensor], received: Tensor, tag: int | None) -> Wait:
        """Starts to send out[j] to peer j and to receive received[j] from it, for every peer but this rank itself."""
        tag, into = self._next_tag() if tag is None else tag, list(received)
        staging = staged.Staging(out, into, self.rank) if staged.needed(received) else None
        if staging is not None:
            out, into = staging.out, staging.into
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        posted = [dist.irecv(into[j], group=self.group, group_src=j, tag=tag) for j in peers]
        posted += [dist.isend(out[j], group=self.group, group_dst=j, tag=tag) for j in peers]
        work = [w for w in posted if w is not None]

        def arrived() -> Tensor:
            for w in work:
                w.wait()
            if staging is not None:
                staging.bring()
            return received

        return arrived

    def all_to_all(self, rows: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """Row j goes to peer j; row i of the result came from peer i. [size, c] -> [size, c], contiguous."""
        if self.size == 1:
            return rows
        received = torch.empty_like(rows) if out is None else out.view(rows.shape)

        def start(tag: int | None) -> Wait:
            if self._backend(rows) != "gloo":
                return _arrival(dist.all_to_all_single(received, rows, group=self.group, async_op=True), received)
            received[self.rank].copy_(rows[self.rank])
            return self._exchange(list(rows), received, tag)

        return (yield Post(start, functools.partial(self.count_pairwise, rows[0].nbytes)))

    def all_gather(self, part: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """Every rank's `part` goes to all, in rank order: [c] -> [size, c]. `part` must not change until then."""
        if self.size == 1:
            return part.unsqueeze(0)
        shape = self.size, part.numel()
        gathered = part.new_empty(shape) if out is None else out.view(shape)

        def start(tag: int | None) -> Wait:
            if self._backend(part) != "gloo":
                flat = gathered.view(-1)
                return _arrival(gather_into(flat, part, self.group, async_op=True), gathered)
            if gathered[self.rank].data_ptr() != part.data_ptr():
                gathered[self.rank].copy_(part)
            return self._exchange([part] * self.size, gathered, tag)

        return (yield Post(start, functools.partial(self.count_pairwise, part.nbytes)))

    def reduce_scatter_mean(self, flat: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """The mean over ranks of this rank's part: fp32[size*c] -> fp32[c], a part of `out`, which is as large as `flat`.

        Without `out` it is valid until the next call on the same thread and stream: what two halves of a pipeline do at the
        same time stays apart. Of one rank `flat` itself.
        """
        if self.size == 1:
            return flat
        received, rows = self._buffer(flat) if out is None else out, flat.view(self.size, -1)
        if self._backend(flat) == "nccl":
            part = received[: rows.shape[1]]

            def start(tag: int | None) -> Wait:
                return _arrival(scatter_into(part, flat, self.group, async_op=True), part)

            return (yield Post(start, functools.partial(self.count_pairwise, rows[0].nbytes))).div_(self.size)
        return self.sum_of_rows((yield from self.all_to_all(rows, received))).div_(self.size)

    def _buffer(self, like: Tensor) -> Tensor:
        """As large as `like`, the same in all calls from one thread and stream: units take turns with it."""
        stream = torch.cuda.current_stream(like.device).stream_id if like.is_cuda else 0
        key = threading.get_ident(), stream
        kept = self._received.get(key)
        if kept is None or kept.numel() < like.numel() or kept.dtype != like.dtype:
            kept = self._received[key] = torch.empty_like(like)
        return kept[: like.numel()]

    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Operation[Tensor]:
        """The mean over ranks, summed in fp32 in rank order, sent as `wire`. fp32[k], any k -> fp32[k], the same everywhere.

        2(n-1)/n of the bytes leave each rank, as in a ring. The mean of one rank is its own `flat`, not a copy.
        """
        if self.size == 1 or flat.numel() == 0:
            return flat
        if self._backend(flat) == "nccl":
            sent = flat.to(wire, copy=True)

            def start(tag: int | None) -> Wait:
                return _arrival(dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=self.group, async_op=True), sent)

            return (yield Post(start, functools.partial(self.count_ring_all_reduce, sent.nbytes))).float()
        rows = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size)).to(wire).view(self.size, -1)
        part = self.sum_of_rows((yield from self.all_to_all(rows))).div_(self.size)
        return (yield from self.all_gather(part.to(wire))).view(-1)[: flat.numel()].float()

    @staticmethod
    def sum_of_rows(rows: Tensor) -> Tensor:
        """[n, c] -> fp32[c]. Overwrites the first row, if it is fp32."""
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        return total

    def all_or(self, flags: Tensor) -> Operation[Tensor]:
        """The union over ranks of bool[c], as bool[c]: one gather of the bits where they are few, else two collectives."""
        if self.size == 1:
            return flags
        few = flags.numel() <= 8 * FEW
        bits = pack(torch.nn.functional.pad(flags, (0, -flags.numel() % (8 if few else 8 * self.size))))
        rows = yield from (self.all_gather(bits) if few else self.all_to_all(bits.view(self.size, -1)))
        part = functools.reduce(operator.or_, rows)
        united = part if few else (yield from self.all_gather(part)).view(-1)
        return unpack(united)[: flags.numel()].bool()

    def sum(self, values: Tensor) -> Operation[Tensor]:
        """The sum over ranks, added up in rank order. [k] -> [k]."""
        return functools.reduce(operator.add, (yield from self.all_gather(values.contiguous())))
