"""What a launcher says about this rank's node: how many ranks it has, and the number of this one among them.

torchrun says it by LOCAL_WORLD_SIZE, MPI by the variables in `MPI`, srun by those of `_slurm` and SLURM_LOCALID.
What MPI or SLURM says counts only where its tasks are the ranks: torchrun may have been started by srun, once on each node.
LOCAL_WORLD_SIZE counts before them. Where it was set by hand and contradicts them, hierarchical communication is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

MPI = (
    # Of Open MPI; MPICH and Intel MPI; MVAPICH; others with PMI.
    # Ranks on the node, number among them, ranks of the world, number among them:
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID", "PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_LOCAL_SIZE", "PMI_LOCAL_RANK", "PMI_SIZE", "PMI_RANK"),
)
UNKNOWN, WRONG = 0, -1


class Said(NamedTuple):
    """Of one rank. Numbers alone, so that ranks can send them to each other.

    local:  ranks on its node; UNKNOWN, or WRONG where the variable is not a number.
    number: its own among them; -1 where nothing says it.
    other:  what MPI or SLURM says against `local`; UNKNOWN where they agree or say nothing.
    given:  whether the caller gave a topology.
    hierarchical: whether the caller asked for hierarchical communication.
    host:   a digest of the host's name.
    """

    local: int
    number: int
    other: int
    given: int
    hierarchical: int
    host: int


def digest_of(value: Any) -> int:
    """63 bits, the same in every process for what prints the same."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


def ranks_per_node(world_size: int) -> int:
    """What this rank's launcher says; UNKNOWN (0) when it says nothing that is a number."""
    return max(UNKNOWN, said(os.environ, None, world_size).local)


def said(env: Mapping[str, str], rank: int | None, world_size: int, given: bool = False, hier: bool = False) -> Said:
    """What the environment says of rank number `rank` (None: not known) of so many."""
    local, number = _scheduler(env, rank, world_size)
    other = UNKNOWN
    if "LOCAL_WORLD_SIZE" in env:
        mine = _number(env, "LOCAL_WORLD_SIZE") or WRONG
        by_torchrun = "TORCHELASTIC_RUN_ID" in env
        if by_torchrun:
            number = -1  # torchrun numbers node by node
        elif local not in (UNKNOWN, mine):
            other = local
        local = mine
    return Said(local, number, other, given, hier, digest_of(socket.gethostname()))


def _scheduler(env: Mapping[str, str], rank: int | None, world_size: int) -> tuple[int, int]:
    """What MPI or SLURM says, where its tasks are the ranks: (ranks on this node, number of this one there)."""
    for local, number, size, own in MPI:
        if local in env and _are_the_ranks(env, rank, world_size, size, own):
            return _number(env, local) or WRONG, _number(env, number)
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in env), "")
    if size and _are_the_ranks(env, rank, world_size, size, "SLURM_PROCID"):
        return _slurm(env, world_size), _number(env, "SLURM_LOCALID")
    return UNKNOWN, -1


def _are_the_ranks(env: Mapping[str, str], rank: int | None, world_size: int, size: str, own: str) -> bool:
    same = rank is None or env.get(own, str(rank)) == str(rank)
    return same and env.get(size, str(world_size)) == str(world_size)


def _slurm(env: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node. Of a node without number (a node's own list says it) only where all have as many."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = per_node(env.get(name, ""))
        if sum(counts) == world_size:
            node = _number(env, "SLURM_NODEID")
            if 0 <= node < len(counts):
                return counts[node]
            if len(set(counts)) == 1:
                return counts[0]
    alone = per_node(env.get("SLURM_NTASKS_PER_NODE", ""))
    return alone[0] if len(set(alone)) == 1 else UNKNOWN


def per_node(text: str) -> list[int]:
    """SLURM's list of tasks on each node: "2(x3),1" is [2, 2, 2, 1]; [] where it is not such a list."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if found is None or int(found[1]) < 1:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(env: Mapping[str, str], name: str) -> int:
    """What the variable says; -1 where it is not there, or not a number of at least 0."""
    text = env.get(name, "").strip()
    return int(text) if text.isdecimal() else -1
