"""The ranks of a world as threads of one process: their collectives, without a network.

Every rank runs in a thread of its own, and one of them at a time: until it has to wait for the others (`Turns`). What it
would send is copied to where it is received (`Board`). `VirtualLink` changes nothing else of `Link`: paddings, the order of
sums and the count of bytes are those of real ranks on gloo, and so are the results, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from birder.comm.communicator import Communicator, Hierarchical, TwoPhase
from birder.comm.counter import ByteCounter
from birder.comm.link import Link
from birder.comm.topology import Topology

SEGMENT = 1 << 20
"""Bytes of the largest segment of gloo's ring."""


class _Abandoned(Exception):
    """Another rank has failed: what this one waits for will not come."""


class Turns:
    """Runs a task for each of `size` ranks, each on a thread, one thread at a time.

    enter: called with the rank whose turn begins, on its thread.
    """

    def __init__(self, size: int, enter: Callable[[int], None] = lambda rank: None) -> None:
        self.size, self._enter = size, enter
        self._wakes: list[threading.Semaphore] = []
        """One for each rank, so that a turn that is passed on wakes one thread, not all of them."""
        self._over: list[bool] = []
        self._idle = 0
        """How often in a row a rank had its turn and could not go on."""
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Returns when all tasks are done. Raises the first error that one of them met; the others then end early."""
        threads = torch.get_num_threads()
        self._idle, self._error, self._over = 0, None, [False] * self.size
        self._wakes = [threading.Semaphore(rank == 0) for rank in range(self.size)]  # the first turn is rank 0's
        started = [
            threading.Thread(target=self._life, args=(rank, task, threads), name=f"virtual-rank-{rank}", daemon=True)
            for rank, task in enumerate(tasks)
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> None:
        """Lets the others go on until `ready`. Raises RuntimeError where all of them wait for what none will do."""
        while not ready():
            self._idle += 1
            if self._idle > self.size:
                raise RuntimeError("virtual ranks wait for each other: they did not make the same collectives")
            self._pass_on(rank)
            self._await_turn(rank)
        self._idle = 0

    def _life(self, rank: int, task: Callable[[], object], threads: int) -> None:
        try:
            self._await_turn(rank)
            torch.set_num_threads(threads)  # a new thread begins with a number of its own
            task()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._over[rank] = True
            self._idle = 0
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        for following in ((rank + i) % self.size for i in range(1, self.size + 1)):
            if not self._over[following]:
                self._wakes[following].release()
                return

    def _await_turn(self, rank: int) -> None:
        self._wakes[rank].acquire()
        if self._error is not None:
            raise _Abandoned
        self._enter(rank)


class _Call:
    """One exchange of a group: what has been posted of it, by place in the group."""

    def __init__(self) -> None:
        self.posted: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.done = False


class Board:
    """What the ranks of one group have posted. Tensors are copied when the last of them has: nothing is kept."""

    def __init__(self, turns: Turns, size: int) -> None:
        self.turns, self.size = turns, size
        self._calls: dict[int, _Call] = {}

    def post(self, tag: int, place: int, out: list[Tensor], into: list[Tensor]) -> _Call:
        """From the member at `place`: out[j] is for member j, into[j] waits for what comes from it."""
        call = self._calls.setdefault(tag, _Call())
        call.posted[place] = (out, into)
        if len(call.posted) == self.size:
            del self._calls[tag]
            for receiver, (_, where) in call.posted.items():
                for sender, (what, _) in call.posted.items():
                    if sender != receiver:
                        where[sender].copy_(what[receiver])
            call.posted.clear()
            call.done = True
        return call


class _Arrival:
    """As a `dist.Work`: `wait` returns when all members have posted theirs."""

    def __init__(self, turns: Turns, rank: int, call: _Call) -> None:
        self._turns, self._rank, self._call = turns, rank, call

    def wait(self) -> None:
        self._turns.wait_until(self._rank, lambda: self._call.done)


class VirtualLink(Link):
    """A group of virtual ranks, as one of them sees it. It acts as gloo, on any device."""

    def __init__(self, board: Board, ranks: list[int], me: int, topology: Topology, counter: ByteCounter) -> None:
        """ranks: members of the group, by their number in the world; me: this one's number there."""
        self.counter = counter
        self.ranks, self.size, self.rank = ranks, len(ranks), ranks.index(me)
        self.near = [topology.same_node(me, peer) for peer in ranks]
        self._backends: dict[str, str] = {}
        self._outside = 0
        self._received: dict[tuple[int, int], Tensor] = {}
        self._board, self._me = board, me

    def _backend(self, tensor: Tensor) -> str:
        return "gloo"

    def _exchange(self, out: list[Tensor], into: list[Tensor]) -> list[_Arrival]:  # type: ignore[override]
        return [_Arrival(self._board.turns, self._me, self._board.post(self._tag(), self.rank, out, into))]


class VirtualTwoPhase(TwoPhase):
    """`TwoPhase` of a virtual rank."""

    def __init__(self, link: VirtualLink) -> None:
        self.counter, self.all = link.counter, link
        self.workers = self.world_size = link.size
        self.worker = self.rank = link.rank


class VirtualHierarchical(Hierarchical):
    """`Hierarchical` of a virtual rank."""

    def __init__(self, everyone: VirtualLink, intra: VirtualLink, inter: VirtualLink, topology: Topology) -> None:
        self.counter, self.all, self.intra, self.inter = everyone.counter, everyone, intra, inter
        self.world_size, self.rank = everyone.size, everyone.rank
        self.workers, self.shards = topology.nodes, topology.ranks_per_node
        self.worker, self.shard = divmod(self.rank, topology.ranks_per_node)


def links(turns: Turns, topology: Topology, counters: Sequence[ByteCounter]) -> list[VirtualLink]:
    """The link to all others of each rank."""
    everyone, board = list(range(turns.size)), Board(turns, turns.size)
    return [VirtualLink(board, everyone, rank, topology, counters[rank]) for rank in everyone]


def communicators(turns: Turns, topology: Topology, hierarchical: bool) -> list[Communicator]:
    """The communicator of each rank."""
    counters = [ByteCounter() for _ in range(turns.size)]
    whole, local = links(turns, topology, counters), topology.ranks_per_node
    if not hierarchical:
        return [VirtualTwoPhase(link) for link in whole]
    nodes = [list(range(n * local, (n + 1) * local)) for n in range(topology.nodes)]
    rails = [list(range(i, turns.size, local)) for i in range(local)]
    boards = {tuple(group): Board(turns, len(group)) for group in (*nodes, *rails)}
    made: list[Communicator] = []
    for rank, link in enumerate(whole):
        intra, inter = (
            VirtualLink(boards[tuple(group)], group, rank, topology, counters[rank])
            for group in (nodes[rank // local], rails[rank % local])
        )
        made.append(VirtualHierarchical(link, intra, inter, topology))
    return made


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def ring_sum(rows: Tensor) -> Tensor:
    """The sum over ranks as gloo's ring all-reduce adds it up: [n, k] -> [k], of the same type.

    The buffer is cut into one chunk for each rank, in whole segments. Chunk c begins at rank c-1 and goes down the ring to
    rank c, each adding its own (gloo's allreduce.cc, `ring`).
    """
    n, numel = rows.shape
    if n == 1:
        return rows[0].clone()
    size = rows.element_size()
    segments = round_up(max(round_up(numel * size, SEGMENT) // SEGMENT, 2 * n), n)
    elements = round_up(round_up(numel * size, segments) // segments, size) // size  # of a segment
    chunk = segments // n * elements
    total = torch.empty_like(rows[0])
    for c in range(n):
        part = slice(min(c * chunk, numel), min((c + 1) * chunk, numel))
        added = rows[(c - 1) % n, part].clone()
        for i in range(2, n + 1):
            added.add_(rows[(c - i) % n, part])
        total[part] = added
    return total
