"""Replay: a model that waits as long as a GPU computes, and nodes of many GPUs that are one process.

Forward and backward are waits until the times of a timeline, `dilation` times as long; everything else is real: DDP and
its buckets, the optimizer, its pipeline, compression, collectives. One rank stands for a node of `gpus_per_node` GPUs:

    dense         the all-reduce over nodes, 2(N-1)/N of the gradient through each NIC; the part inside a node delays
                  every gradient by the time of one bucket
    hierarchical  as it is; the reduce-scatter and all-gather inside the node are waits
    flat          each of the node's GPUs would ship its own bits through the one NIC, so the rank sends them as often
                  (`FlatNode`)
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from birder.comm import Hierarchical, Topology, TwoPhase
from experiments.cells.timelines import Timeline

BUCKET_MB = 25.0
"""Size of DDP's buckets and of the methods' units; a replay of a `fraction` of the elements scales it alike."""


def pause_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` says `deadline`."""
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class ReplayModel(nn.Module):
    """Parameters of a timeline's names; its backward hands out each gradient when the timeline says so.

    fraction: share of each tensor's elements that is kept, as a flat tensor; 1: the real shapes.
    delay_ms: added to every gradient's time.
    The input of `forward` decides nothing. Gradients are fixed values, none of them 0.
    """

    def __init__(self, timeline: Timeline, dilation: float, *, fraction: float = 1.0, delay_ms: float = 0.0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self._flat: list[nn.Parameter] = []
        self._values: list[Tensor] = []
        for g in timeline.gradients:
            shape = g.shape if fraction == 1 else (scaled(g.numel, fraction),)
            p = nn.Parameter(torch.zeros(shape))
            _place(self, g.name, p)
            self._flat.append(p)
            self._values.append(torch.empty(shape).normal_(std=1e-3, generator=random).add_(1e-9))
        self.elements = sum(p.numel() for p in self._flat)
        self.layers = timeline.layers
        self.follow(timeline, dilation, delay_ms)

    def follow(self, timeline: Timeline, dilation: float, delay_ms: float = 0.0) -> None:
        """From now on waits as `timeline` says, which must be of the same model. Dilation 0: does not wait at all."""
        if len(timeline.gradients) != len(self._flat):
            raise ValueError(f"timeline {timeline.name} is of another model")
        self.timeline, self.dilation, self.delay_ms = timeline, dilation, delay_ms
        # A layer's gradients come out together, also where another timeline of the model rounds them apart.
        self._ready = [max(timeline.gradients[i].ready_ms for i in layer) for layer in self.layers]
        self._began = 0.0

    def wait(self, ms: float) -> None:
        """Until `ms` of undilated time after the start of forward."""
        if self.dilation > 0:
            pause_until(self._began + self.dilation * ms / 1000)

    def forward(self, x: Tensor) -> Tensor:
        self._began = time.perf_counter()
        self.wait(self.timeline.forward_ms)
        for number in reversed(range(len(self.layers))):
            x = _Layer.apply(self, number, x, *(self._flat[i] for i in self.layers[number]))
        return x

    def hand_out(self, number: int) -> list[Tensor]:
        """The gradients of a layer, when it is time."""
        self.wait(self._ready[number] + self.delay_ms)
        return [self._values[i] for i in self.layers[number]]


class _Layer(torch.autograd.Function):
    """One link of the chain: its backward waits."""

    @staticmethod
    def forward(ctx, model, number, x, *params):  # type: ignore[no-untyped-def]
        ctx.model, ctx.number = model, number
        return x + 0.0

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, None, grad, *ctx.model.hand_out(ctx.number)


def scaled(numel: int, fraction: float) -> int:
    """Elements that a tensor of `numel` keeps."""
    return max(1, round(numel * fraction))


def bucket_delay_ms(timeline: Timeline) -> float:
    """What the all-reduce inside a node adds to dense methods: the time of one bucket, the rest runs beside backward."""
    share = min(1.0, BUCKET_MB * 2**20 / (4 * timeline.elements))
    return timeline.intra_node.all_reduce_ms * share


class _Timed:
    """Knows how long it has waited, for peers or for the clock."""

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


class FlatNode(_Timed, TwoPhase):
    """Flat 1-bit communication where this rank stands for a node of `gpus` GPUs: n = N gpus workers, N nodes.

    All-to-all: each of n workers sends D/(8n) bytes to each worker of the other nodes. A node's NIC sends

        gpus * (n - gpus) * D/(8n) = gpus (N-1)/N D/8

    so every chunk for another node is sent `gpus` times. All-gather, as NCCL does it, in a ring through all workers that
    crosses each node's border once: (n-1)/n D/8, a little more than the (N-1)/N D/8 of N ranks; with ring=False pairwise,
    as often as in the all-to-all. The bits themselves are those of one worker per node: what is replayed is time.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology, gpus: int, *, ring: bool = True) -> None:
        super().__init__(group, topology)
        self.gpus = gpus
        others = max(1, self.workers - 1)
        n = gpus * self.workers
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self.gather_copies = (n - 1) / (gpus * others) if ring else float(gpus)
        self.value_copies = (n - 1) / others if ring else float(gpus * gpus)

    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        rows = packed.view(self.workers, -1)
        if self.workers == 1:
            return lambda: rows
        sent = _copies(rows, self.gpus)
        finish = self.all.start_all_to_all(sent, self._received(sent.numel(), sent, out))

        def result() -> Tensor:
            with self.waiting():
                received = finish()
            return received[:, : rows.shape[1]].contiguous()

        return result

    def gather_workers(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        return self._gather(values, self.value_copies, out)

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Tensor:
        return self._gather(chunk, self.gather_copies, out).reshape(-1)

    def _gather(self, part: Tensor, copies: float, out: Tensor | None) -> Tensor:
        if self.workers == 1:
            return part.unsqueeze(0)
        with self.waiting():
            sent = _copies(part.unsqueeze(0), copies)[0]
            received = self._received(self.workers * sent.numel(), sent, out)
            return self.all.all_gather(sent, received)[:, : part.numel()]

    def _received(self, numel: int, like: Tensor, out: Tensor | None) -> Tensor | None:
        """Where the copies of what belongs into `out` go: the same buffer in every step. None where there is no `out`."""
        if out is None:
            return None
        key = out.data_ptr(), numel
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(numel)
        return self._buffers[key]


class HierarchicalNode(_Timed, Hierarchical):
    """Hierarchical 1-bit communication where this rank does the work of all shards of a node.

    What happens inside the node is a wait, the timeline's constants times the share of the elements.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology, model: ReplayModel) -> None:
        super().__init__(group, topology)
        self.model = model

    def shard_mean(self, flat: Tensor) -> Tensor:
        self._inside(self.model.timeline.intra_node.reduce_scatter_ms * flat.numel())
        return flat

    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        finish = super().start_scatter(packed, out)

        def result() -> Tensor:
            with self.waiting():
                return finish()

        return result

    def gather_workers(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        with self.waiting():
            return super().gather_workers(values, out)

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Tensor:
        with self.waiting():
            bits = super().gather(chunk, out)
        self._inside(self.model.timeline.intra_node.all_gather_ms * 8 * bits.numel())
        return bits

    def _inside(self, ms_times_elements: float) -> None:
        with self.waiting():
            seconds = self.model.dilation * ms_times_elements / self.model.elements / 1000
            pause_until(time.perf_counter() + seconds)


def nic_bytes(method: str, elements: int, nodes: int, gpus: int, *, ring: bool = True) -> float:
    """Bytes that one node's NIC sends per step, without padding and scales. method: fp32, bf16, flat, hierarchical, none."""
    if nodes == 1 or method == "none":
        return 0.0
    share = (nodes - 1) / nodes
    if method in ("fp32", "bf16"):
        return 2 * share * elements * (4 if method == "fp32" else 2)
    bits = elements / 8
    if method == "hierarchical":
        return 2 * share * bits
    n = nodes * gpus
    return bits * (gpus * share + ((n - 1) / n if ring else gpus * share))


def _copies(rows: Tensor, factor: float) -> Tensor:
    """[r, c] -> [r, about factor*c], beginning with the row itself."""
    wanted = max(rows.shape[1], round(rows.shape[1] * factor))
    return rows.repeat(1, math.ceil(wanted / rows.shape[1]))[:, :wanted].contiguous()


def _place(root: nn.Module, name: str, p: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    root.register_parameter(last, p)
