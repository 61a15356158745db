"""The environment of a node's torchrun agent, and so of its ranks: what all launchers set. Standard library alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What an enclosing torchrun or an earlier run may have left: it would speak to the wrong world.
_STALE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_STALE_PREFIXES = ("TORCHELASTIC_", "PET_", "GROUP_", "ROLE_")


def fresh(inherited: Mapping[str, str], ranks: int) -> dict[str, str]:
    """`inherited` without what belongs to another world, cores divided among the `ranks` of this machine."""
    env = {k: v for k, v in inherited.items() if k not in _STALE and not k.startswith(_STALE_PREFIXES)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    return env


def of_node(node: int, interface: str) -> dict[str, str]:
    """What tells ranks which node they are on, and by which interface they reach the others. Loopback is not metered."""
    env = {"BIRDER_NODE": str(node), "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return env | {"PYTHONUNBUFFERED": "1"} | ({} if interface in ("lo", "lo0") else {"BIRDER_NIC": interface})


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
