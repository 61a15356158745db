"""Which rank lives on which node."""

from __future__ import annotations

from dataclasses import dataclass

from birder.comm import launcher


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes with `ranks_per_node` ranks each; rank = node * ranks_per_node + local rank, as torchrun numbers them."""

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"a topology needs at least 1 node and 1 rank per node, got {self.nodes} x {self.ranks_per_node}"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def same_node(self, a: int, b: int) -> bool:
        return self.node(a) == self.node(b)

    @staticmethod
    def of_nodes(nodes: list[int]) -> Topology:
        """Of ranks of which each is on the node of that number, in the order of ranks.

        Raises ValueError when the ranks of a node do not lie side by side, as many on each node.
        """
        count = len(set(nodes))
        per_node = len(nodes) // count
        if nodes != [node for node in dict.fromkeys(nodes) for _ in range(per_node)]:
            held = [nodes.count(node) for node in dict.fromkeys(nodes)]
            if len(set(held)) > 1:
                shown = ", ".join(map(str, held[:8])) + (", ..." if len(held) > 8 else "")
                raise ValueError(
                    f"{len(nodes)} ranks do not divide into {count} equal nodes, these have {shown}: "
                    "give every node the same number of ranks"
                )
            raise ValueError(
                "the ranks of a node do not lie side by side: number them node by node (srun --distribution=block, "
                "mpirun --map-by core)"
            )
        return Topology(count, per_node)

    @staticmethod
    def of_ranks(ranks: list[int], local: int | None = None) -> Topology:
        """Of some ranks of the world, on nodes of `local` ranks; None: as `from_env` finds.

        Raises ValueError when these ranks do not lie side by side, as many on each node.
        """
        world = max(ranks) + 1
        local = local or launcher.ranks_per_node(world) or world
        return Topology.of_nodes([rank // local for rank in ranks])

    @staticmethod
    def from_env(world_size: int) -> Topology:
        """From what this rank's launcher says (birder/comm/launcher.py); one node when it says nothing.

        Raises ValueError when the ranks per node do not divide the world size (nodes of unequal size).
        """
        local = launcher.ranks_per_node(world_size) or world_size
        if world_size % local:
            raise ValueError(
                f"{world_size} ranks do not divide into nodes of {local}: give every node the same number of ranks"
            )
        return Topology(world_size // local, local)
