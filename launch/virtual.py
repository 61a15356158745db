"""All ranks in one process: what `cluster=virtual` starts. The process itself is experiments/training/virtual.py."""

from __future__ import annotations

from dataclasses import dataclass

from launch.local import LocalLauncher


@dataclass(kw_only=True, eq=False, repr=False)
class VirtualLauncher(LocalLauncher):
    """One process on this machine that trains as `nodes` x `ranks_per_node` ranks."""

    def __post_init__(self) -> None:
        self.workers = self.nodes, self.ranks_per_node
        self.nodes = self.ranks_per_node = 1

    def shape(self) -> str:
        nodes, ranks = self.workers
        return f"{nodes} x {ranks} virtual ranks in one process"
