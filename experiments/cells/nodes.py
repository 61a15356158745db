"""Nodes of many GPUs that are one process. One rank stands for a node of `gpus_per_node` GPUs:

dense         the all-reduce over nodes, 2(N-1)/N of the gradient through each NIC; the part inside a node delays
              every gradient by the time of one bucket (`timelines.bucket_delay_ms`)
hierarchical  unchanged; the reduce-scatter and all-gather inside the node are waits
flat          each of the node's GPUs would ship its own bits through the one NIC, so the rank sends them as often
              (`FlatNode`)
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from birder.comm import Communicator, Hierarchical, Topology, TwoPhase
from birder.comm.collectives import Operation
from experiments.cells.model import ReplayModel, pause_until


class _Waiting:
    """Knows how long it has waited for the clock, and made what nobody else would have to."""

    waited_s = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    def take_waited(self) -> float:
        """Seconds waited since the last call."""
        waited, self.waited_s = self.waited_s, 0.0
        return waited


class FlatNode(_Waiting, TwoPhase):
    """Flat 1-bit communication where this rank stands for a node of `gpus` GPUs: n = N gpus workers, N nodes.

    All-to-all: each of n workers sends D/(8n) bytes to each worker of the other nodes. A node's NIC sends

        gpus * (n - gpus) * D/(8n) = gpus (N-1)/N D/8

    so every chunk for another node is sent `gpus` times. All-gather, as NCCL does it, in a ring through all workers that
    crosses each node's border once: (n-1)/n D/8, a little more than the (N-1)/N D/8 of N ranks; with ring=False pairwise,
    as often as in the all-to-all. The bits themselves are those of one worker per node: what is replayed is time.
    A scale, 4 bytes behind the bits of a chunk, is sent as often as the bits. There would be `gpus` times as many chunks,
    each with its own: a few hundred bytes per unit that are not replayed.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology, gpus: int, *, ring: bool = True) -> None:
        super().__init__(group, topology)
        self.gpus = gpus
        others = max(1, self.workers - 1)
        n = gpus * self.workers
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self.gather_copies = (n - 1) / (gpus * others) if ring else float(gpus)
        self.value_copies = (n - 1) / others if ring else float(gpus * gpus)

    def scatter(self, packed: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        rows = packed.view(self.workers, -1)
        if self.workers == 1:
            return rows
        sent = _copies(rows, self.gpus)
        received = yield from self.all.all_to_all(sent, self._received(sent.numel(), sent, out))
        return received[:, : rows.shape[1]].contiguous()

    def gather_workers(self, values: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        return (yield from self._gather(values, self.value_copies, out))

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        return (yield from self._gather(chunk, self.gather_copies, out)).reshape(-1)

    def _gather(self, part: Tensor, copies: float, out: Tensor | None) -> Operation[Tensor]:
        if self.workers == 1:
            return part.unsqueeze(0)
        with self.waiting():  # copies that a node would not make
            sent = _copies(part.unsqueeze(0), copies)[0]
        received = self._received(self.workers * sent.numel(), sent, out)
        return (yield from self.all.all_gather(sent, received))[:, : part.numel()]

    def _received(self, numel: int, like: Tensor, out: Tensor | None) -> Tensor | None:
        """Where the copies of what belongs into `out` go: the same buffer in every step. None where there is no `out`."""
        if out is None:
            return None
        key = out.data_ptr(), numel
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(numel)
        return self._buffers[key]


class HierarchicalNode(_Waiting, Hierarchical):
    """Hierarchical 1-bit communication where this rank does the work of all shards of a node.

    What happens inside the node is a wait, the timeline's constants times the share of the elements.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology, model: ReplayModel) -> None:
        super().__init__(group, topology)
        self.model = model

    def shard_mean(self, flat: Tensor) -> Operation[Tensor]:
        self._inside(self.model.timeline.intra_node.reduce_scatter_ms * flat.numel())
        return flat
        yield  # an operation, which asks for nothing

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        bits = yield from super().gather(chunk, out)
        self._inside(self.model.timeline.intra_node.all_gather_ms * 8 * bits.numel())
        return bits

    def _inside(self, ms_times_elements: float) -> None:
        with self.waiting():
            seconds = self.model.dilation * ms_times_elements / self.model.elements / 1000
            pause_until(time.perf_counter() + seconds)


def maker(model: ReplayModel, hierarchical: bool, gpus: int, ring: bool = True) -> Callable[..., Communicator]:
    """What `birder.attach` takes as `communicator` where a rank stands for a node of so many GPUs. ring: as of `FlatNode`."""

    def make(group: dist.ProcessGroup, topology: Topology) -> Communicator:
        if hierarchical:
            return HierarchicalNode(group, topology, model)
        return FlatNode(group, topology, gpus, ring=ring)

    return make


def _copies(rows: Tensor, factor: float) -> Tensor:
    """[r, c] -> [r, about factor*c], beginning with the row itself."""
    wanted = max(rows.shape[1], round(rows.shape[1] * factor))
    return rows.repeat(1, math.ceil(wanted / rows.shape[1]))[:, :wanted].contiguous()
