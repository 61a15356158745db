"""On which nodes the ranks of a group are, from what all of them say: the same answer on all, or the same error."""

from __future__ import annotations

from collections.abc import Sequence

from birder.comm.launcher import UNKNOWN, WRONG, Said
from birder.comm.topology import Topology

WAY_ON = (
    "set LOCAL_WORLD_SIZE to the ranks per node on every rank, or use attach(topology=birder.Topology(nodes, ranks))"
)


def decided(everyone: Sequence[Said], ranks: list[int]) -> Topology:
    """The topology of these ranks of the world. Depends on its arguments alone. Raises ValueError.

    Without hierarchical communication it only says what the counter of bytes takes for traffic between nodes. Where it is not
    known, or ranks are numbered across nodes, it is then a guess.
    """
    hierarchical = any(one.hierarchical for one in everyone) and len(ranks) > 1
    said_by = dict(zip(ranks, everyone, strict=True))
    for rank, one in said_by.items():
        if one.local == WRONG:
            raise ValueError(
                f"on rank {rank} the number of ranks per node is not a whole number of at least 1: {WAY_ON}"
            )
    for rank, one in said_by.items() if hierarchical else ():
        if one.other:
            raise ValueError(
                f"on rank {rank} LOCAL_WORLD_SIZE says {one.local} ranks per node, the launcher {one.other}: {WAY_ON}"
            )
    known = {one.local for one in everyone}
    if known == {UNKNOWN} or (UNKNOWN in known and not hierarchical):
        return _by_host(everyone, hierarchical)
    if len(known) > 1:
        shown = ", ".join(str(one.local or "nothing") for one in everyone[:8]) + (", ..." if len(everyone) > 8 else "")
        raise ValueError(
            f"ranks say different numbers of ranks per node ({shown}): give every node the same number of ranks"
        )
    local = known.pop()
    for rank, one in said_by.items() if hierarchical else ():
        if one.number not in (-1, rank % local):
            raise ValueError(
                f"the ranks of a node do not lie side by side (rank {rank} is number {one.number} on its node): number them "
                "node by node (srun --distribution=block, mpirun --map-by core)"
            )
    return Topology.of_ranks(ranks, local)


def _by_host(everyone: Sequence[Said], hierarchical: bool) -> Topology:
    """By the names of hosts, where they differ: the same name does not say the same node."""
    hosts = list(dict.fromkeys(one.host for one in everyone))
    if len(hosts) > 1:
        try:
            return Topology.of_nodes([hosts.index(one.host) for one in everyone])
        except ValueError:
            if hierarchical:
                raise
    elif hierarchical:
        raise ValueError(
            f"hierarchical communication needs to know which ranks share a node, and nothing says it: {WAY_ON}"
        )
    return Topology(1, len(everyone))
