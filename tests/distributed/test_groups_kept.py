"""Process groups that closed attachments leave to the next: birder/comm/groups.py."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import birder
from birder.comm import groups
from tests.helpers import toy
from tests.helpers.ranks import fresh_world
from tests.helpers.tiers import slow
from tests.helpers.waiting import until


def again(rank: int, world: int, times: int) -> dict[str, Any]:
    """Trains a few steps under one attachment after the other, in one process."""
    base = toy.make()
    start = toy.flat(base).clone()
    ends, groups = [], set()
    for number in range(times):
        with torch.no_grad():
            nn.utils.vector_to_parameters(start.clone(), base.parameters())
        ddp = DistributedDataParallel(base, gradient_as_bucket_view=True)
        optimizer = birder.Birder(base.parameters(), lr=0.01) if number % 2 else birder.OneBitAdam(
            base.parameters(), lr=0.01, warmup_steps=1
        )  # fmt: skip
        attachment = birder.attach(ddp, optimizer, hierarchical=world == 4)
        toy.train(ddp, optimizer, rank, range(3))
        attachment.close()
        groups.add(optimizer.comm.all.group.group_name)  # type: ignore[attr-defined]
        ends.append(toy.flat(base).numpy())
        if number == 1:  # the first has made the back end's; a group of its own would be three more each time
            few = psutil.Process().num_threads() + 3
    until(lambda: psutil.Process().num_threads() < few, "threads that end have ended")
    return {"ends": ends, "groups": len(groups)}


@pytest.mark.parametrize("world", [2, slow(4)])
def test_an_attachment_takes_the_group_of_the_one_before(world: int) -> None:
    told = fresh_world(again, world, 6, ranks_per_node=2)
    for mine in told:
        assert mine["groups"] == 1
        for number, end in enumerate(mine["ends"]):
            assert (end == mine["ends"][number % 2]).all()


def sharded_again(rank: int, world: int, times: int) -> None:
    """One attachment of an FSDP model after the other, without more threads."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    for number in range(times):
        model = toy.make()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = birder.Birder(model.parameters(), lr=0.01)
        attachment = birder.attach(model, optimizer, mesh=mesh)
        toy.train(model, optimizer, rank, range(2))
        attachment.close()
        if number == 1:
            few = psutil.Process().num_threads() + 3
    until(lambda: psutil.Process().num_threads() < few, "threads that end have ended")


def test_an_attachment_of_fsdp_takes_the_groups_of_the_one_before() -> None:
    fresh_world(sharded_again, 4, 5, ranks_per_node=2)


def apart(rank: int, world: int) -> list[int]:
    """Rank 1 keeps its first attachment open: it has no group to give, and both have to make a new one."""
    base = toy.make()
    names = []
    kept = []
    for _ in range(3):
        ddp = DistributedDataParallel(base, gradient_as_bucket_view=True)
        optimizer = birder.Birder(base.parameters(), lr=0.01)
        attachment = birder.attach(ddp, optimizer)
        optimizer.zero_grad()
        toy.loss(ddp, rank, 1).backward()
        optimizer.step()
        names.append(str(optimizer.comm.all.group.group_name))  # type: ignore[attr-defined]
        if rank == 1 and not kept:
            kept.append((ddp, optimizer, attachment))
        else:
            attachment.close()
    return [names.index(name) for name in names]


def test_a_group_is_used_again_only_where_every_rank_has_it() -> None:
    # The second is new; the third is the second again.
    assert fresh_world(apart, 2) == [[0, 1, 1], [0, 1, 1]]


def broken(rank: int, world: int) -> list[int]:
    """An exchange fails on rank 0 before anything is sent; then its step, once everything has been sent."""
    base = toy.make()
    names = []
    for number in range(4):
        ddp = DistributedDataParallel(base, gradient_as_bucket_view=True)
        optimizer = birder.Birder(base.parameters(), lr=0.01)
        attachment = birder.attach(ddp, optimizer)
        names.append(str(optimizer.comm.all.group.group_name))  # type: ignore[attr-defined]

        def fail(*_: Any) -> None:
            raise ValueError("no disk")

        if number == 0 and rank == 0:
            optimizer.pipeline.submit(fail)
            with pytest.raises(ValueError, match="no disk"):
                optimizer.pipeline.wait()
        if number == 1:
            toy.loss(ddp, rank, 1).backward()
            if rank == 0:
                optimizer.update = fail  # type: ignore[method-assign, assignment]
            with pytest.raises(ValueError, match="no disk") if rank == 0 else contextlib.nullcontext():
                optimizer.step()
        attachment.close()
    return [names.index(name) for name in names]


def test_no_group_is_used_again_in_which_something_failed() -> None:
    assert fresh_world(broken, 2) == [[0, 1, 2, 2], [0, 1, 2, 2]]


THREADS = 16


def test_ranks_that_are_threads_of_one_process_keep_their_groups_apart() -> None:
    kept = [0] * THREADS

    @spawn_threads_and_init_comms(world_size=THREADS)
    def ranks(self) -> None:
        node = [dist.get_rank() // 4 * 4 + i for i in range(4)]
        mine = groups.borrow(dist.group.WORLD, torch.device("cpu"))
        part = groups.part(mine, node)
        for _ in range(20):
            groups.give_back(mine)
            same = groups.borrow(dist.group.WORLD, torch.device("cpu")) is mine
            kept[dist.get_rank()] += same and groups.part(mine, node) is part

    ranks(None)
    assert kept == [20] * THREADS


def test_a_group_of_other_ranks_is_not_taken() -> None:
    found: list[list[int]] = [[] for _ in range(4)]

    @spawn_threads_and_init_comms(world_size=4)
    def ranks(self) -> None:
        rank, device = dist.get_rank(), torch.device("cpu")
        whole = groups.borrow(dist.group.WORLD, device)
        half = groups.part(whole, [rank // 2 * 2, rank // 2 * 2 + 1])
        groups.give_back(whole)
        found[rank] = dist.get_process_group_ranks(groups.borrow(half, device))

    ranks(None)
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_world_that_has_ended_leaves_nothing() -> None:
    before = list(groups._FREE), list(groups._PARTS)  # worlds of other tests: held here, lest they go in between
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = groups.borrow(dist.group.WORLD, torch.device("cpu"))
        groups.part(group, [0])
        groups.give_back(group)
        dist.destroy_process_group()
        groups.give_back(group)  # too late: of a world that has ended
        del group
        gc.collect()
        assert (list(groups._FREE), list(groups._PARTS)) == before
