"""Which rank lives on which node."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
    def of_ranks(ranks: list[int]) -> Topology:
        """Of some ranks of the world, on nodes of LOCAL_WORLD_SIZE ranks (torchrun's); one node when it is not set.

        Raises ValueError when these ranks do not lie side by side, as many on each node.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", max(ranks) + 1))
        nodes = [rank // local for rank in ranks]
        count = len(set(nodes))
        per_node = len(ranks) // count
        if nodes != [node for node in dict.fromkeys(nodes) for _ in range(per_node)]:
            raise ValueError(
                f"{len(ranks)} ranks do not divide into nodes of {local}: give every node the same number of ranks"
            )
        return Topology(count, per_node)

    @staticmethod
    def from_env(world_size: int) -> Topology:
        """From torchrun's LOCAL_WORLD_SIZE; one node when it is not set.

        Raises ValueError when the ranks per node do not divide the world size (nodes of unequal size).
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if world_size % local:
            raise ValueError(
                f"{world_size} ranks do not divide into nodes of {local}: give every node the same number of ranks"
            )
        return Topology(world_size // local, local)
