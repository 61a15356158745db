"""All ranks in one process: what `cluster=virtual` starts. The process itself is experiments/training/virtual.py."""

from __future__ import annotations

from typing import Any

from launch.local import LocalLauncher


class VirtualLauncher(LocalLauncher):
    """One process on this machine that trains as `nodes` x `ranks_per_node` ranks."""

    def __init__(self, *, nodes: int, ranks_per_node: int, **arguments: Any) -> None:
        super().__init__(nodes=1, ranks_per_node=1, **arguments)
        self.workers = nodes, ranks_per_node

    def shape(self) -> str:
        nodes, ranks = self.workers
        return f"{nodes} x {ranks} virtual ranks in one process"
