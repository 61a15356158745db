"""`Link` and `Cluster`: what the collectives of a cluster cost. Imports no torch.

N nodes of g ranks, n = N g. A node's NIC is shared by its ranks and carries R Gbit/s each way. B: bytes of the tensor on one
rank. What crosses one NIC, and how often a message has to be waited for:

    all-reduce, ring      (1)  2 (n-1)/n B                              2 (n-1) hops, 2 (N-1) of them between nodes
                or tree        the same                                 2 (log2 N + g-1), 2 log2 N of them between nodes
    all-reduce, by nodes  (2)  2 (N-1)/N B                              2 (N-1) hops
    all-to-all, flat      (3)  g (N-1)/N B                              n-1 messages of each rank
    all-gather, flat      (4)  pairwise g (N-1)/N B, ring (n-1)/n B     n-1
    the two, by nodes     (5)  (N-1)/N B each                           N-1

B of (4) is what everybody has in the end. With one node the same formulas hold for the link inside it, with n = g "nodes" of
one rank.

Flows that share a NIC do not end together. The last of p in an exchange of t ms comes later by

    (6) sqrt(2 ln p) sqrt(u t)

which is how far the last of p independent normal deviations of variance u t is behind, to leading order; 0 for one peer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transfer:
    """One collective, seen from one NIC.

    ms: how long the NIC is busy. late_ms: from then until everything has arrived; the NIC is free for others meanwhile.
    nbytes: what it sends.
    """

    ms: float
    late_ms: float
    nbytes: float

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(self.ms + other.ms, self.late_ms + other.late_ms, self.nbytes + other.nbytes)


NOTHING = Transfer(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Link:
    """One way of one NIC (or of one GPU's port inside a node).

    gbps:       Gbit/s of payload in large messages. latency_us: of one message.
    message_us: what each message of a pairwise exchange costs its sender besides.
    unfair_ms:  flows of a pairwise exchange that meet on one NIC get unequal shares. What each is ahead or behind is a
                random walk, after t ms of standard deviation sqrt(unfair_ms t); the last of p flows is behind by (6).
    burst_bytes: what a token bucket lets pass at once after a pause; 0 for a real link.
    spread:     relative half-width of the rate where it was measured.
    """

    gbps: float
    latency_us: float = 0.0
    message_us: float = 0.0
    unfair_ms: float = 0.0
    burst_bytes: float = 0.0
    spread: float = 0.0
    source: str = "stated"

    def __post_init__(self) -> None:
        if not self.gbps > 0:
            raise ValueError(f"a link's rate must be positive, got {self.gbps:g} Gbit/s")
        if min(self.latency_us, self.message_us, self.unfair_ms, self.burst_bytes, self.spread) < 0:
            raise ValueError("latency_us, message_us, unfair_ms, burst_bytes and spread must not be negative")

    def ring(self, sent: float, hops: int) -> Transfer:
        """`sent` bytes in a ring of `hops` messages after one another."""
        return Transfer(self.wire_ms(sent) + hops * self.latency_us / 1e3, 0.0, sent) if sent and hops else NOTHING

    def exchange(self, sent: float, messages: int, peers: int) -> Transfer:
        """`sent` bytes in `messages` at the same time, to `peers` other NICs."""
        if not sent or not peers:
            return NOTHING
        wire = self.wire_ms(sent)
        behind = math.sqrt(2 * math.log(peers) * self.unfair_ms * wire)
        return Transfer(wire, behind + (self.latency_us + messages * self.message_us) / 1e3, sent)

    def wire_ms(self, nbytes: float) -> float:
        """How long so many bytes take, without waiting."""
        return nbytes * 8 / (self.gbps * 1e6)

    @property
    def burst_ms(self) -> float:
        """`burst_bytes` in ms of the link's rate."""
        return self.wire_ms(self.burst_bytes)


NVLINK = Link(1840.0, 5.0, source="230 GB/s of bus bandwidth, 8 A100 on NVSwitch: an assumption")


@dataclass(frozen=True)
class Cluster:
    """nodes x ranks_per_node, with a link between nodes and one inside.

    ring: whether flat dense all-reduces and all-gathers are rings through all ranks, as NCCL's, or go by nodes (dense) and
    pairwise (1-bit), as on gloo. borders: of a ring's n-1 hops N-1 cross from node to node and the others stay inside, and
    an all-reduce takes a tree over nodes and a chain in each, as NCCL's, where that waits less. False: every hop of (1) has
    the latency between nodes.
    nics: `between` has the rate of so many NICs; a fraction where switches carry less than the NICs.
    parts: where FSDP shards, a rank holds one of so many parts of each parameter, and its hook and its update touch no other.
    """

    nodes: int
    ranks_per_node: int
    between: Link
    inside: Link = NVLINK
    ring: bool = True
    borders: bool = False
    nics: float = 1.0
    parts: int = 1

    def __post_init__(self) -> None:
        for number in (self.nodes, self.ranks_per_node):
            if not (number >= 1 and number % 1 == 0):
                raise ValueError(
                    f"a cluster needs at least 1 node and 1 rank per node, in whole numbers, got {self.nodes} x "
                    f"{self.ranks_per_node}"
                )
        if not self.nics > 0:
            raise ValueError(f"nics must be positive, got {self.nics:g}")

    @classmethod
    def of_gpus(cls, nodes: int, ranks_per_node: int, between: Link, inside: Link = NVLINK) -> Cluster:
        """As every question, page and picture asks about one: NCCL's rings, which cross few borders between nodes."""
        return cls(nodes, ranks_per_node, between, inside, borders=True)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def workers(self, by_nodes: bool) -> tuple[int, int]:
        """(workers, shards): every rank is a worker, or a node is one, whose ranks have a shard each."""
        return (self.nodes, self.ranks_per_node) if by_nodes else (self.ranks, 1)

    def at(self, gbps: float) -> Cluster:
        """The same with NICs of another rate."""
        return replace(self, between=replace(self.between, gbps=gbps * self.nics))

    @property
    def spread(self) -> float:
        """Of the link that ranks share."""
        return self._shape[2].spread

    def faster(self, factor: float) -> Cluster:
        """The same where the link that ranks share carries so many times as much."""
        link = replace(self._shape[2], gbps=factor * self._shape[2].gbps)
        return replace(self, inside=link) if self.nodes == 1 else replace(self, between=link)

    @property
    def nic_gbps(self) -> float:
        """Of one NIC, which is what `at` takes."""
        return self.between.gbps / self.nics

    @property
    def _shape(self) -> tuple[int, int, Link]:
        """(N, g, the link that ranks share): on one node every rank has its own port."""
        if self.nodes == 1:
            return self.ranks_per_node, 1, self.inside
        return self.nodes, self.ranks_per_node, self.between

    def all_reduce(self, nbytes: float) -> Transfer:
        """(1), (2)"""
        nodes, ranks, _ = self._shape
        around = nodes * ranks if self.ring else nodes
        return self._around(2 * (around - 1) / around * nbytes, 2, around)

    def all_to_all(self, nbytes: float) -> Transfer:
        """(3)"""
        nodes, ranks, link = self._shape
        return link.exchange(ranks * (nodes - 1) / nodes * nbytes, (nodes * ranks - 1) * ranks, nodes - 1)

    def all_gather(self, nbytes: float) -> Transfer:
        """(4)"""
        return self.sharded(nbytes) if self.ring else self.all_to_all(nbytes)

    def _around(self, sent: float, times: int, around: int) -> Transfer:
        """`sent` bytes of a NIC in a ring of `around` ranks that is gone through so many times."""
        nodes, _, link = self._shape
        if not (self.borders and sent and self.nodes > 1):
            return link.ring(sent, times * (around - 1))
        hops = [(nodes - 1, around - nodes)]
        if times == 2:
            hops.append((math.ceil(math.log2(nodes)), around // nodes - 1))
        waits = [times * (slow * link.latency_us + fast * self.inside.latency_us) / 1e3 for slow, fast in hops]
        return Transfer(link.wire_ms(sent) + min(waits), 0.0, sent)

    def sharded(self, nbytes: float) -> Transfer:
        """A reduce-scatter or an all-gather over all ranks, as FSDP's: half of (1), a ring."""
        n = self.ranks
        return self._around((n - 1) / n * nbytes, 1, n)

    def mean(self, nbytes: float) -> Transfer:
        """A mean of floats over all ranks outside of DDP: an all-reduce, or (3) and (4) where it is pairwise."""
        return self.all_reduce(nbytes) if self.ring else self.coded_mean(nbytes)

    def coded_mean(self, nbytes: float) -> Transfer:
        """A mean over all ranks of what a server has to decode: (3) and (4)."""
        return self.all_to_all(nbytes) + self.all_gather(nbytes)

    def by_nodes(self, nbytes: float) -> Transfer:
        """(5), one of the two."""
        peers = self.nodes - 1
        return self.between.exchange(peers / self.nodes * nbytes, peers * self.ranks_per_node, peers)

    def inside_ms(self, nbytes: float, times: int = 1) -> float:
        """A reduce-scatter or an all-gather (times=2: both) over the ranks of a node."""
        g = self.ranks_per_node
        return self.inside.ring(times * (g - 1) / g * nbytes, times * (g - 1)).ms
