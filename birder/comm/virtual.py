"""The ranks of a world in one process: their collectives, without a network.

Each rank runs until it would wait for the others (`lockstep` in birder/comm/runtime.py). What it would send is copied to
where it is received (`Board`). `VirtualCollectives` changes nothing else of `Collectives`: paddings, the order of sums and
the count of bytes are those of real ranks on gloo, and so are the results, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from birder.comm.collectives import Collectives, Wait
from birder.comm.communicator import Communicator
from birder.comm.counter import ByteCounter
from birder.comm.topology import Topology
from birder.kernels.bits import round_up

SEGMENT = 1 << 20
"""Bytes of the largest segment of gloo's ring."""
Posted = dict[int, tuple[list[Tensor], Tensor]]
"""Of one exchange of a group, by place in the group; empty once all have posted, and everything has been copied."""


class Board:
    """What the ranks of one group have posted. Tensors are copied when the last of them has: nothing is kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._posted: dict[int, Posted] = {}

    def post(self, tag: int, place: int, out: list[Tensor], received: Tensor) -> Posted:
        """From the member at `place`: out[j] is for member j, received[j] waits for what comes from it."""
        posted = self._posted.setdefault(tag, {})
        posted[place] = (out, received)
        if len(posted) == self.size:
            for receiver, (_, where) in posted.items():
                for sender, (what, _) in posted.items():
                    if sender != receiver:
                        where[sender].copy_(what[receiver])
            self._posted.pop(tag).clear()
        return posted


class VirtualCollectives(Collectives):
    """A group of virtual ranks, as one of them sees it. It acts as gloo, on any device."""

    def __init__(self, board: Board, ranks: list[int], me: int, topology: Topology, counter: ByteCounter) -> None:
        """ranks: members of the group, by their number in the world; me: this one's number there."""
        super().__init__(None, Topology(1, 1), counter)
        self.ranks, self.size, self.rank = ranks, len(ranks), ranks.index(me)
        self.near = [topology.same_node(me, peer) for peer in ranks]
        self._board = board

    def _backend(self, tensor: Tensor) -> str:
        return "gloo"

    def _exchange(self, out: list[Tensor], received: Tensor, tag: int | None) -> Wait:
        posted = self._board.post(self._next_tag() if tag is None else tag, self.rank, out, received)

        def arrived() -> Tensor:
            if posted:
                raise RuntimeError("virtual ranks wait for each other: they did not make the same collectives")
            return received

        return arrived


def links(topology: Topology, counters: Sequence[ByteCounter]) -> list[VirtualCollectives]:
    """The link to all others of each rank."""
    everyone, board = list(range(topology.world_size)), Board(topology.world_size)
    return [VirtualCollectives(board, everyone, rank, topology, counters[rank]) for rank in everyone]


def communicators(topology: Topology, hierarchical: bool) -> list[Communicator]:
    """The communicator of each rank."""
    size, local = topology.world_size, topology.ranks_per_node
    whole = links(topology, [ByteCounter() for _ in range(size)])
    if not hierarchical:
        return [Communicator(link) for link in whole]
    nodes = [list(range(n * local, (n + 1) * local)) for n in range(topology.nodes)]
    rails = [list(range(i, size, local)) for i in range(local)]
    boards = {tuple(group): Board(len(group)) for group in (*nodes, *rails)}

    def link(group: list[int], rank: int) -> Collectives:
        return VirtualCollectives(boards[tuple(group)], group, rank, topology, whole[rank].counter)

    return [Communicator(every, link(rails[r % local], r), link(nodes[r // local], r)) for r, every in enumerate(whole)]


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
