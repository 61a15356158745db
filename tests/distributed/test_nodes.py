"""Which ranks share a node, started as launchers do it: all ranks take the same, or refuse alike, and none waits."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from birder import Birder, Topology, attach
from tests.distributed.test_ddp import wrap
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

Env = Callable[[int], dict[str, str]]


def srun(r: int) -> dict[str, str]:
    return {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 2)}


def mpirun(r: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(r % 2)}


STARTED: dict[str, Env] = {
    "torchrun": lambda r: {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
    "srun": srun,
    "srun, one node": lambda r: srun(r) | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_LOCALID": str(r)},
    "srun, cyclic": lambda r: srun(r) | {"SLURM_LOCALID": str(r // 2)},
    "srun, a node less": lambda r: {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1", "SLURM_NODEID": str(r // 3)},
    "srun, another by hand": lambda r: srun(r) | {"LOCAL_WORLD_SIZE": "4"},
    "mpirun": mpirun,
    "mpirun, cyclic": lambda r: mpirun(r) | {"OMPI_COMM_WORLD_LOCAL_RANK": str(r // 2)},
    "torchrun on each node by srun": lambda r: (
        {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"} | {"LOCAL_WORLD_SIZE": "2"}
    ),
    "by hand, on one rank": lambda r: {"LOCAL_WORLD_SIZE": "2"} if r == 0 else {},
    "by hand, not alike": lambda r: {"LOCAL_WORLD_SIZE": "2" if r < 2 else "1"},
    "by hand": lambda r: {},
    "by hand, hosts": lambda r: {"HOST": str(r // 2)},
}
TAKEN = {
    "torchrun": (2, 2),
    "srun": (2, 2),
    "srun, one node": (1, 4),
    "mpirun": (2, 2),
    "torchrun on each node by srun": (2, 2),
    "by hand, hosts": (2, 2),
}
REFUSED_FLAT = {"srun, a node less", "by hand, not alike"}


def attached(rank: int, **options) -> tuple[int, int] | str:
    """Nodes and ranks per node, or what attach raises."""
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(model.parameters())
    try:
        attachment = attach(ddp, optimizer, **options)
    except (ValueError, RuntimeError) as e:
        return str(e)
    attachment.close()
    comm = optimizer.comm
    return (comm.workers, comm.shards) if {"hierarchical", "mesh"} & options.keys() else (1, comm.workers)


def starts(rank: int, world: int) -> dict[tuple[str, bool], tuple[int, int] | str]:
    ends: dict[tuple[str, bool], tuple[int, int] | str] = {}
    name = socket.gethostname
    before = dict(os.environ)
    for kind, env in STARTED.items():
        mine = env(rank)
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        os.environ.update(mine)
        host = mine.get("HOST", "host")
        socket.gethostname = lambda host=host: host
        for hierarchical in (True, False):
            ends[kind, hierarchical] = attached(rank, hierarchical=hierarchical)
        for key in mine:
            os.environ.pop(key)
        os.environ.update(before)
    socket.gethostname = name
    ends["given on one rank", True] = attached(rank, hierarchical=True, topology=Topology(2, 2) if rank == 2 else None)
    ends["of another size", True] = attached(rank, topology=Topology(2, 3 if rank == 2 else 2))
    ends["of another size on all", True] = attached(rank, topology=Topology(2, 3))
    nodes, turned = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", torch.arange(4).view(2, 2).t())
    ends["2 x 2", True] = attached(rank, mesh=nodes)
    ends["4", True] = attached(rank, mesh=init_device_mesh("cpu", (4,)))
    ends["turned", True] = attached(rank, mesh=turned)
    ends["with hierarchical", True] = attached(rank, mesh=nodes, hierarchical=True)
    ends["with topology", True] = attached(rank, mesh=nodes, topology=Topology(2, 2))
    return ends


@pytest.fixture(scope="module")
def ends() -> list[dict[tuple[str, bool], tuple[int, int] | str]]:
    return run_ranks(starts, 4)


@pytest.mark.parametrize("kind", STARTED)
def test_nodes_are_found_or_refused_on_all_ranks_alike(ends, kind: str) -> None:
    for of_rank in ends:
        assert of_rank[kind, True] == ends[0][kind, True]
        assert of_rank[kind, False] == ends[0][kind, False]
    nested, flat = ends[0][kind, True], ends[0][kind, False]
    if kind in TAKEN:
        assert nested == TAKEN[kind]
    else:
        assert isinstance(nested, str)
        assert "\n" not in nested
    assert isinstance(flat, str) == (kind in REFUSED_FLAT)


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        ("2 x 2", (2, 2)),
        ("4", (4, 1)),
        ("turned", "mesh must be nodes x ranks per node over the 4 ranks of the model, in their order, got 2 x 2"),
        ("with hierarchical", "leave out hierarchical"),
        ("with topology", "leave out topology"),
    ],
)
def test_a_mesh_says_which_ranks_are_one_worker_and_nothing_else_may(ends, kind: str, taken) -> None:
    for of_rank in ends:
        found = of_rank[kind, True]
        assert found == taken or (isinstance(found, str) and taken in found and "\n" not in found)


@pytest.mark.parametrize("kind", ["given on one rank", "of another size", "of another size on all"])
def test_ranks_with_another_topology_do_not_wait_for_each_other(ends, kind: str) -> None:
    assert all(isinstance(of_rank[kind, True], str) for of_rank in ends)
