"""How a unit's 1-bit messages travel: which ranks are workers, who serves which part, what is gathered where.

A communicator moves bytes and knows the topology. It does no optimizer mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from birder.comm.counter import ByteCounter
from birder.comm.groups import part
from birder.comm.link import FEW, Link
from birder.comm.topology import Topology


class Communicator(ABC):
    """The moves of a 1-bit all-reduce over a unit of D elements, and means of floats for what is not 1-bit.

    Each rank works on one of `shards` equal parts of the unit (number `shard`), as worker number `worker` of `workers`:

        part = shard_mean(gradient)              fp32[D]             -> fp32[D/shards]
        rows = scatter(bits of part)             uint8[D/(8 shards)] -> uint8[workers, c]
        bits = gather(what the server makes)     uint8[c]            -> uint8[D/8]

    with c = D/(8 shards workers). The server on a rank owns row `worker` of its shard. D is a multiple of `multiple`.
    Methods with error feedback send a scale behind the bits of each chunk: c is then 4 more (birder/kernels/message.py).
    `out`: where what is received goes, contiguous; a new tensor where it is not given. A single rank returns its own message.
    """

    counter: ByteCounter
    workers: int = 1
    worker: int = 0
    shards: int = 1
    shard: int = 0
    world_size: int = 1
    rank: int = 0
    holders: int = 1
    """Ranks among which every parameter is divided before its gradient comes here, by FSDP."""

    @property
    def multiple(self) -> int:
        """A unit's number of elements must be a multiple of this, so that every chunk ends on a 32-bit word of bits."""
        return 32 * self.workers * self.shards

    @property
    def signature(self) -> tuple[int, int]:
        """(workers, shards): the shape of rank-local state. State saved under one cannot be loaded under another."""
        return self.workers, self.shards

    @abstractmethod
    def shard_mean(self, flat: Tensor) -> Tensor:
        """The part of `flat` on which this rank works, averaged over the ranks that make up one worker.

        Valid until the next call. In an `exchange` that is a generator, until its `yield`: the next unit's may come then.
        """

    @abstractmethod
    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Begins phase 1, and returns what waits for its result: [c*workers] -> [workers, c]."""

    def scatter(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        """Phase 1: every worker's bytes for the chunk that this rank serves. [c*workers] -> [workers, c]."""
        return self.start_scatter(packed, out)()

    @abstractmethod
    def start_gather_workers(self, values: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Begins to gather `values` of each worker, for this rank's shard; returns what waits: [k] -> [workers, k]."""

    def gather_workers(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """`values` of each worker, for this rank's shard. [k] -> [workers, k]."""
        return self.start_gather_workers(values, out)()

    @abstractmethod
    def start_gather(self, chunk: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Begins phase 2, and returns what waits for its result: [k] -> [shards*workers*k]."""

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Tensor:
        """Phase 2: the served chunks of all shards and workers, in element order. [k] -> [shards*workers*k]."""
        return self.start_gather(chunk, out)()

    def gather_shards(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The parts of all shards, in element order. [k] -> [shards*k]. This one is right for a single shard."""
        return part

    def gather_ranks(self, values: Tensor) -> Tensor:
        """`values` of every rank, in rank order: between nodes first, then within them. [k] -> [world_size, k]."""
        found = self.gather_shards(self.gather_workers(values).reshape(-1))
        return found.view(self.shards, self.workers, -1).transpose(0, 1).reshape(self.world_size, -1)

    @abstractmethod
    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        """The mean over all ranks, sent as `wire`. fp32[k], any k -> fp32[k], the same on all ranks. Maybe `flat` itself."""

    def worker_mean(self, part: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        """The mean over workers of what each has for this rank's shard: fp32[k] -> fp32[k]. Right for one shard."""
        return self.mean(part, wire)

    @abstractmethod
    def union(self, flags: Tensor) -> Tensor:
        """bool[k] -> the union over all ranks."""

    @abstractmethod
    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar tensor over all ranks."""

    def across_holders(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """The sum, or the maximum, over the ranks that hold the other parts of the same parameters. [k] -> [k]."""
        return values


class SingleProcess(Communicator):
    """One process: a worker that is its own server. The methods' control, and what runs without DDP."""

    def __init__(self) -> None:
        self.counter = ByteCounter()

    def shard_mean(self, flat: Tensor) -> Tensor:
        return flat

    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: packed.unsqueeze(0)

    def start_gather_workers(self, values: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: values.unsqueeze(0)

    def start_gather(self, chunk: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return lambda: chunk

    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        return flat

    def union(self, flags: Tensor) -> Tensor:
        return flags

    def total(self, value: Tensor) -> Tensor:
        return value


class TwoPhase(Communicator):
    """Flat: every rank is a worker and serves 1/n of the unit. All-to-all, then all-gather."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        """`group` should be this communicator's own: its collectives run beside those of DDP."""
        self.counter = ByteCounter()
        self.all = Link(group, topology, self.counter)
        self.workers = self.world_size = self.all.size
        self.worker = self.rank = self.all.rank

    def shard_mean(self, flat: Tensor) -> Tensor:
        return flat

    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return self.all.start_all_to_all(packed.view(self.workers, -1), out)

    def start_gather_workers(self, values: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return self.all.start_all_gather(values, out)

    def start_gather(self, chunk: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        gathered = self.all.start_all_gather(chunk, out)
        return lambda: gathered().view(-1)

    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        return self.all.mean(flat, wire)

    def union(self, flags: Tensor) -> Tensor:
        return self.all.all_or(flags)

    def total(self, value: Tensor) -> Tensor:
        return self.all.sum_scalar(value)


class Hierarchical(Communicator):
    """A node is one worker. Intra-node reduce-scatter, 1-bit all-reduce between nodes, intra-node all-gather.

    Local rank l of every node works on shard l, so that rank-local state shrinks by the ranks per node, and the bits of
    each shard cross the network once instead of once for each local rank.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        """Makes the sub-groups that this rank is in: every rank of `group`, the whole world, has to call this."""
        if topology.world_size != dist.get_world_size(group) or topology.world_size != dist.get_world_size():
            raise ValueError(
                f"hierarchical communication needs the whole world of {dist.get_world_size()} ranks, "
                f"the topology has {topology.nodes} x {topology.ranks_per_node}"
            )
        self.counter = ByteCounter()
        self.all = Link(group, topology, self.counter)
        self.world_size, self.rank = self.all.size, self.all.rank
        self.workers, self.shards = topology.nodes, topology.ranks_per_node
        self.worker, self.shard = divmod(self.rank, topology.ranks_per_node)
        intra = part(group, [self.worker * self.shards + i for i in range(topology.ranks_per_node)])
        inter = part(group, [n * self.shards + self.shard for n in range(topology.nodes)])
        self.intra = Link(intra, topology, self.counter)
        self.inter = Link(inter, topology, self.counter)

    def shard_mean(self, flat: Tensor) -> Tensor:
        return self.intra.reduce_scatter_mean(flat)

    def start_scatter(self, packed: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return self.inter.start_all_to_all(packed.view(self.workers, -1), out)

    def start_gather_workers(self, values: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        return self.inter.start_all_gather(values, out)

    def start_gather(self, chunk: Tensor, out: Tensor | None = None) -> Callable[[], Tensor]:
        if out is None:
            out = chunk.new_empty(self.shards * self.workers * chunk.numel())
        # Received where it belongs in the whole, from where the other local ranks take it.
        part = self.inter.start_all_gather(chunk, out.view(self.shards, -1)[self.shard])
        return lambda: self.gather_shards(part().view(-1), out)

    def gather_shards(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        return self.intra.all_gather(part, out).view(-1)

    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        whole = torch.nn.functional.pad(flat, (0, -flat.numel() % self.shards))
        # In memory of its own: what `shard_mean` has given may still be in use.
        part = self.intra.reduce_scatter_mean_into(torch.empty_like(whole), whole)
        return self.gather_shards(self.inter.mean(part, wire))[: flat.numel()]

    def worker_mean(self, part: Tensor, wire: torch.dtype = torch.float32) -> Tensor:
        return self.inter.mean(part, wire)

    def union(self, flags: Tensor) -> Tensor:
        from birder.kernels.reference import pack, unpack

        if self.shards == 1 or flags.numel() <= 8 * FEW:
            return self.all.all_or(flags)
        # Inside the node, a share of it between nodes, all shares inside the node: 1/L of the bytes leave it.
        of_node = self.intra.all_or(flags)
        share = torch.nn.functional.pad(of_node, (0, -flags.numel() % (8 * self.shards))).chunk(self.shards)[self.shard]
        return unpack(self.gather_shards(pack(self.inter.all_or(share))))[: flags.numel()].bool()

    def total(self, value: Tensor) -> Tensor:
        return self.all.sum_scalar(value)
