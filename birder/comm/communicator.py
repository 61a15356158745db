"""How a unit's 1-bit messages travel: which ranks are workers, who serves which part, what is gathered where.

A communicator moves bytes and knows the topology. It does no optimizer mathematics. Methods ask it by the requests of
birder/comm/requests.py; each of its operations is performed by a driver (birder/comm/runtime.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from birder.comm.collectives import FEW, Collectives, Operation
from birder.comm.counter import ByteCounter
from birder.comm.groups import part
from birder.comm.topology import Topology
from birder.kernels.bits import pack, unpack


class Communicator:
    """The moves of a 1-bit all-reduce over a unit of D elements, and means of floats for what is not 1-bit.

    Each rank works on one of `shards` equal parts of the unit (number `shard`), as worker number `worker` of `workers`:

        part = shard_mean(gradient)              fp32[D]             -> fp32[D/shards]
        rows = scatter(bits of part)             uint8[D/(8 shards)] -> uint8[workers, c]
        bits = gather(what the server makes)     uint8[c]            -> uint8[D/8]

    with c = D/(8 shards workers). The server on a rank owns row `worker` of its shard. D is a multiple of `multiple`.
    Methods with error feedback send a scale behind the bits of each chunk: c is then 4 more (birder/kernels/bits.py).
    `out`: where what is received goes, contiguous; a new tensor where it is not given. A single rank returns its own message.

    everyone: all ranks. between: the workers with this rank's shard; None: everyone, and every rank is a worker. within: the
    ranks that make up this worker. holding: the ranks among which FSDP has divided every parameter.
    """

    def __init__(
        self,
        everyone: Collectives,
        between: Collectives | None = None,
        within: Collectives | None = None,
        holding: Collectives | None = None,
    ) -> None:
        self.counter = everyone.counter
        alone = Collectives(None, Topology(1, 1), self.counter)
        self.all, self.inter, self.intra, self.inside = everyone, between or everyone, within or alone, holding or alone
        self.world_size, self.rank = everyone.size, everyone.rank
        self.workers, self.worker = self.inter.size, self.inter.rank
        self.shards, self.shard = self.intra.size, self.intra.rank
        self.holders = self.inside.size
        """Ranks among which every parameter is divided before its gradient comes here, by FSDP."""

    @property
    def multiple(self) -> int:
        """A unit's number of elements must be a multiple of this, so that every chunk ends on a 32-bit word of bits."""
        return 32 * self.workers * self.shards

    @property
    def signature(self) -> tuple[int, int]:
        """(workers, shards): the shape of rank-local state. State saved under one cannot be loaded under another."""
        return self.workers, self.shards * self.holders

    def shard_of(self, elements: int) -> slice:
        """Which of a unit's elements make this rank's shard."""
        size = elements // self.shards
        return slice(self.shard * size, (self.shard + 1) * size)

    def chunk_of(self, elements: int) -> slice:
        """Which of a unit's elements this rank serves."""
        size, number = elements // (self.shards * self.workers), self.shard * self.workers + self.worker
        return slice(number * size, (number + 1) * size)

    def shard_mean(self, flat: Tensor) -> Operation[Tensor]:
        """The part of `flat` on which this rank works, averaged over those of its worker. Valid until the next request."""
        return (yield from self.intra.reduce_scatter_mean(flat))

    def scatter(self, packed: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """Phase 1: every worker's bytes for the chunk that this rank serves. [c*workers] -> [workers, c]."""
        return (yield from self.inter.all_to_all(packed.view(self.workers, -1), out))

    def gather_workers(self, values: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """`values` of each worker, for this rank's shard. [k] -> [workers, k]."""
        return (yield from self.inter.all_gather(values, out))

    def gather(self, chunk: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """Phase 2: the served chunks of all shards and workers, in element order. [k] -> [shards*workers*k]."""
        if self.shards == 1:
            return (yield from self.inter.all_gather(chunk, out)).view(-1)
        if out is None:
            out = chunk.new_empty(self.shards * self.workers * chunk.numel())
        # Received where it belongs in the whole, from where the other local ranks take it.
        received = yield from self.inter.all_gather(chunk, out.view(self.shards, -1)[self.shard])
        return (yield from self.gather_shards(received.view(-1), out))

    def gather_shards(self, part: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        """The parts of all shards, in element order. [k] -> [shards*k]."""
        return (yield from self.intra.all_gather(part, out)).view(-1)

    def gather_ranks(self, values: Tensor) -> Operation[Tensor]:
        """`values` of every rank, in rank order: between nodes first, then within them. [k] -> [world_size, k]."""
        found = yield from self.gather_shards((yield from self.gather_workers(values)).reshape(-1))
        return found.view(self.shards, self.workers, -1).transpose(0, 1).reshape(self.world_size, -1)

    def mean(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Operation[Tensor]:
        """The mean over all ranks, sent as `wire`. fp32[k], any k -> fp32[k], the same on all ranks. Maybe `flat` itself."""
        if self.shards == 1:
            return (yield from self.inter.mean(flat, wire))
        whole = pad(flat, (0, -flat.numel() % self.shards))
        # In separate memory: what `shard_mean` has given may still be in use.
        part = yield from self.intra.reduce_scatter_mean(whole, torch.empty_like(whole))
        return (yield from self.gather_shards((yield from self.inter.mean(part, wire))))[: flat.numel()]

    def worker_mean(self, part: Tensor, wire: torch.dtype = torch.float32) -> Operation[Tensor]:
        """The mean over workers of what each has for this rank's shard: fp32[k] -> fp32[k]."""
        return (yield from self.inter.mean(part, wire))

    def union(self, flags: Tensor) -> Operation[Tensor]:
        """bool[k] -> the union over all ranks."""
        if self.shards == 1 or flags.numel() <= 8 * FEW:
            return (yield from self.all.all_or(flags))
        # Inside the node, a share of it between nodes, all shares inside the node: 1/L of the bytes leave it.
        of_node = yield from self.intra.all_or(flags)
        share = pad(of_node, (0, -flags.numel() % (8 * self.shards))).chunk(self.shards)[self.shard]
        united = yield from self.gather_shards(pack((yield from self.inter.all_or(share))))
        return unpack(united)[: flags.numel()].bool()

    def total(self, value: Tensor) -> Operation[Tensor]:
        """The sum of a scalar tensor over all ranks."""
        own = yield from self.across_holders(value.reshape(1))
        return (yield from self.all.sum(own)).reshape(value.shape)

    def across_holders(self, values: Tensor, largest: bool = False) -> Operation[Tensor]:
        """The sum, or the maximum, over the ranks that hold the other parts of the same parameters. [k] -> [k]."""
        if self.holders == 1:
            return values
        if largest:
            return (yield from self.inside.all_gather(values.contiguous())).amax(0)
        return (yield from self.inside.sum(values))  # in rank order, so that all ranks get the same bits


class SingleProcess(Communicator):
    """One process: a worker that is its own server. The methods' control, and what runs without DDP."""

    def __init__(self) -> None:
        super().__init__(Collectives(None, Topology(1, 1), ByteCounter()))


class TwoPhase(Communicator):
    """Flat: every rank is a worker and serves 1/n of the unit. All-to-all, then all-gather."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        """`group` must be this communicator's alone: its collectives overlap those of DDP."""
        super().__init__(Collectives(group, topology, ByteCounter()))


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
        counter, local = ByteCounter(), topology.ranks_per_node
        node, place = divmod(dist.get_rank(group), local)
        within = part(group, [node * local + i for i in range(local)])
        between = part(group, [n * local + place for n in range(topology.nodes)])
        super().__init__(*(Collectives(g, topology, counter) for g in (group, between, within)))


class Replicas(Communicator):
    """FSDP2: a replica is one worker. Each of its ranks exchanges its shard with those that hold the same shard elsewhere.

    The reduce-scatter inside a replica and the all-gather of parameters are FSDP's, so that for this communicator a shard is
    all there is (`shards` is 1). `world_size` counts replicas; `rank` is the world's, since every rank's state is its own.
    """

    def __init__(self, group: dist.ProcessGroup, holding: dist.ProcessGroup, topology: Topology) -> None:
        """group: of the ranks with this rank's shard. holding: of those in its replica. topology: of the whole world."""
        counter = ByteCounter()
        super().__init__(Collectives(group, topology, counter), holding=Collectives(holding, topology, counter))
        self.rank = dist.get_rank()
