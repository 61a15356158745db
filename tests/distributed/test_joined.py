"""How ranks of the harness join each other."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from experiments.training.world import joined
from launch.errors import UserError
from tests.helpers.ranks import fresh_world


def _twice(rank: int, world: int, port: int) -> list[float]:
    """As the jobs of `run.py -m` under torchrun, whose agent keeps one store for all of them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    sums = []
    for job in range(2):
        if job == 1 and rank == 1:
            time.sleep(0.5)  # a slower one: the other must not take its address in the first job
        with joined("gloo", collective_timeout_s=30, heartbeat_timeout_s=30):
            dist.all_reduce(one := torch.ones(1))
            sums.append(one.item())
    return sums


def test_jobs_that_share_a_store_do_not_meet_each_others_addresses() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert fresh_world(_twice, 2, store.port, grouped=False) == [[2.0, 2.0]] * 2


def _of_two_kinds(rank: int, world: int) -> str:
    backend = "nccl" if rank == 0 else "gloo"
    with pytest.raises(UserError) as refused, joined(backend, collective_timeout_s=30, heartbeat_timeout_s=30):
        pytest.fail("they have met")
    return str(refused.value)


def test_ranks_that_find_gpus_and_others_that_find_none_are_one_line() -> None:
    """A node with a broken driver: it would wait on gloo for those on NCCL, as long as a collective may take."""
    first, second = fresh_world(_of_two_kinds, 2, grouped=False)
    assert first == second
    assert "rank 0 takes nccl, rank 1 gloo" in first
