"""What launchers say of nodes, and what ranks make of it."""

from __future__ import annotations

import pytest

from birder import Topology
from birder.comm.launcher import UNKNOWN, WRONG, Said, per_node, said
from birder.comm.nodes import decided

SLURM = {"SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2", [2]),
        ("2(x3)", [2, 2, 2]),
        ("2(x2),1", [2, 2, 1]),
        ("3,4(x2)", [3, 4, 4]),
        ("", []),
        ("2(x", []),
        ("many", []),
        ("0(x2)", []),
    ],
)
def test_slurms_list_of_tasks(text: str, counts: list[int]) -> None:
    assert per_node(text) == counts


@pytest.mark.parametrize(
    ("env", "rank", "local", "number"),
    [
        ({}, 3, UNKNOWN, -1),
        ({"LOCAL_WORLD_SIZE": "2"}, 3, 2, -1),
        ({"LOCAL_WORLD_SIZE": "two"}, 3, WRONG, -1),
        ({"LOCAL_WORLD_SIZE": "0"}, 3, WRONG, -1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 3, 2, 1),
        (
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            3,
            UNKNOWN,
            -1,
        ),  # starts what starts the ranks
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, 3, UNKNOWN, -1),  # other ranks than these
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_SIZE": "4", "PMI_RANK": "2"}, 2, 2, 0),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}, 3, 2, 1),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "2(x2)"}, 3, 2, -1),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "4"}, 3, 2, -1),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1"}, 3, 1, -1),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "3,1"}, 3, UNKNOWN, -1),  # on which of the two?
        ({**SLURM, "SLURM_TASKS_PER_NODE": "8(x2)"}, 3, UNKNOWN, -1),  # the job's, not the step's
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, 3, UNKNOWN, -1),  # starts what starts the ranks
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)"}, 3, UNKNOWN, -1),  # all are in one task
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 3, 2, -1),
    ],
)
def test_what_the_environment_says(env: dict[str, str], rank: int, local: int, number: int) -> None:
    found = said(env, rank, 4)
    assert (found.local, found.number, found.other) == (local, number, UNKNOWN)


def test_local_world_size_counts_and_what_contradicts_it_is_kept() -> None:
    by_hand = {**SLURM, "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "1", "LOCAL_WORLD_SIZE": "4"}
    assert said(by_hand, 3, 4)[:3] == (4, 1, 2)
    by_torchrun = {**by_hand, "TORCHELASTIC_RUN_ID": "none"}
    assert said(by_torchrun, 3, 4)[:3] == (4, -1, UNKNOWN)
    assert said({**by_hand, "LOCAL_WORLD_SIZE": "2"}, 3, 4)[:3] == (2, 1, UNKNOWN)


def ranks(
    locals_: list[int], hier: bool = True, numbers: list[int] | None = None, hosts: list[int] | None = None
) -> list:
    n = len(locals_)
    return [
        Said(local, number, UNKNOWN, 0, hier, host)
        for local, number, host in zip(locals_, numbers or [-1] * n, hosts or [7] * n, strict=True)
    ]


@pytest.mark.parametrize(
    ("everyone", "topology"),
    [
        (ranks([2, 2, 2, 2]), Topology(2, 2)),
        (ranks([2, 2, 2, 2], numbers=[0, 1, 0, 1]), Topology(2, 2)),
        (ranks([4, 4, 4, 4]), Topology(1, 4)),
        (ranks([0, 0, 0, 0], hosts=[7, 7, 8, 8]), Topology(2, 2)),
        (ranks([0, 0, 0, 0], hosts=[1, 2, 3, 4]), Topology(4, 1)),
        (ranks([0, 0, 0, 0], hier=False), Topology(1, 4)),
        (ranks([0, 0, 0, 0], hier=False, hosts=[7, 8, 7, 8]), Topology(1, 4)),
        (ranks([2, 0, 0, 0], hier=False), Topology(1, 4)),
        (ranks([2, 2, 2, 2], hier=False, numbers=[0, 0, 1, 1]), Topology(2, 2)),
        (ranks([0]), Topology(1, 1)),
    ],
)
def test_what_ranks_decide(everyone: list[Said], topology: Topology) -> None:
    assert decided(everyone, list(range(len(everyone)))) == topology


@pytest.mark.parametrize(
    ("everyone", "why"),
    [
        (ranks([0, 0, 0, 0]), "set LOCAL_WORLD_SIZE"),
        (ranks([2, 0, 0, 0]), "same number of ranks"),
        (ranks([3, 3, 3, 1], hier=False), "same number of ranks"),
        (ranks([3, 3, 3, 3], hier=False), "same number of ranks"),
        (ranks([2, WRONG, 2, 2], hier=False), "rank 1"),
        (ranks([2, 2, 2, 2], numbers=[0, 0, 1, 1]), "side by side"),
        (ranks([0, 0, 0, 0], hosts=[7, 8, 7, 8]), "side by side"),
        (ranks([0, 0, 0, 0], hosts=[7, 7, 7, 8]), "same number of ranks"),
    ],
)
def test_what_ranks_refuse(everyone: list[Said], why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        decided(everyone, [0, 1, 2, 3])
    assert "\n" not in str(refused.value)


def test_some_ranks_of_the_world() -> None:
    assert decided(ranks([2, 2]), [2, 3]) == Topology(1, 2)
    assert decided(ranks([2, 2]), [1, 2]) == Topology(2, 1)
