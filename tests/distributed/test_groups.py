"""Process groups: their back end, groups that do not wait for each other, what crosses a border, a union of flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from birder import Birder, Topology, attach
from birder.comm import TwoPhase, Union, run
from birder.comm.collectives import backend_for, new_group
from birder.predict import measuring
from experiments.training import rank_link
from tests.helpers import toy
from tests.helpers.ranks import fresh_world


def spelled(rank: int, world: int, spelling: str | None) -> tuple:
    """A run on a process group whose back end is asked for in one of three ways."""
    dist.init_process_group(spelling, rank=rank, world_size=world)
    try:
        model = toy.make()
        from birder import OneBitAdam

        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup_steps=2)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        attach(ddp, optimizer, unit_mb=0.001)
        toy.train(ddp, optimizer, rank, range(1, 9))
        return toy.flat(model).numpy(), type(optimizer.pipeline).__name__
    finally:
        dist.destroy_process_group()


def test_the_back_end_is_that_of_the_tensors_device_however_it_is_spelled() -> None:
    plain = fresh_world(spelled, 3, "gloo", grouped=False)
    assert plain[0][1] == "ThreadPipeline"
    compound = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo,cuda:gloo"
    for spelling in (None, compound):  # torch makes NCCL only where there is a GPU
        for rank, (x, pipeline) in enumerate(fresh_world(spelled, 3, spelling, grouped=False)):
            assert pipeline == "ThreadPipeline"
            assert (x == plain[rank][0]).all()


def test_the_entry_of_the_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    names = [backend_for(None, torch.device(kind)) for kind in ("cpu", "cuda", "meta")]  # type: ignore[arg-type]
    assert names == ["gloo", "nccl", ""]


@pytest.fixture
def world_of_4() -> Iterator[None]:
    """A world of 4 ranks, of which there is only this one; it sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def bound_world(world_of_4: None) -> torch.device:
    """That world as `init_process_group(device_id=...)` leaves it: bound to this device.

    It is bound by hand, as torch itself binds only to an accelerator that is there.
    """
    device = torch.device("cuda:0")
    dist.group.WORLD.bound_device_id = device  # type: ignore[union-attr]
    return device


def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch is told, from now on, of each group; and the device that the world is bound to meanwhile."""
    seen: list[dict[str, Any]] = []
    make = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        seen.append({**options, "bound": dist.group.WORLD.bound_device_id})  # type: ignore[union-attr]
        return make(ranks, **{**options, "pg_options": None})

    monkeypatch.setattr(dist, "new_group", noted)
    return seen


def test_a_group_of_some_ranks_is_not_split_off_the_world(
    bound_world: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all others would have to come: ncclCommSplit is a collective of the whole world."""
    seen = made(monkeypatch)
    new_group([0, 2])
    new_group([0, 1, 2, 3])
    assert [one["bound"] for one in seen] == [None, bound_world]
    assert all(one["use_local_synchronization"] for one in seen)
    assert dist.group.WORLD.bound_device_id == bound_world  # type: ignore[union-attr]


def test_a_group_has_the_back_end_of_the_one_that_it_is_for(world_of_4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of_gloo = dist.new_group([0], backend="gloo")
    seen = made(monkeypatch)
    assert backend_for(new_group([0], like=of_gloo), torch.device("cpu")) == "gloo"
    assert backend_for(new_group([0]), torch.device("cpu")) == "fake"
    assert [one["backend"] is None for one in seen] == [False, True]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_nccl_has_high_priority(world_of_4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = made(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    new_group([0, 1])
    assert seen[-1]["pg_options"] is None
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    new_group([0, 1])
    assert seen[-1]["pg_options"].is_high_priority_stream


def test_links_are_measured_with_the_gpus_back_end(world_of_4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for spelled_as, device in (("cpu:gloo,cuda:nccl", "cuda:3"), ("cpu:gloo,cuda:gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, said=spelled_as: said)
        assert measuring._device(dist.group.WORLD) == torch.device(device)  # type: ignore[arg-type]


def test_gloo_is_probed_from_the_host(world_of_4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends no tensor of a GPU."""
    sent: list[torch.device] = []

    def exchange(pair: list[Any]) -> list[Any]:
        sent.extend(one.tensor.device for one in pair)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    monkeypatch.setattr(rank_link, "backend_for", lambda group, device: "gloo")
    monkeypatch.setattr(rank_link, "PROBE_MB", 1)
    assert rank_link.probe(1, torch.device("cuda", 0)) is not None
    assert set(sent) == {torch.device("cpu")}


def two_groups(rank: int, world: int, hierarchical: bool) -> tuple:
    """Two jobs in one world, each with its own DDP; the second attaches long after the first has begun to train."""
    from birder import Birder

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, member = groups[rank // 2], rank % 2
    model = toy.make()
    ddp = DistributedDataParallel(model, process_group=mine)
    optimizer = Birder(model.parameters(), lr=0.01)
    if rank >= 2:
        dist.barrier()
    attachment = attach(ddp, optimizer)
    toy.train(ddp, optimizer, member, range(1, 6))
    if rank < 2:
        dist.barrier()
    return toy.flat(model).numpy(), attachment.counter.intra, attachment.counter.inter


def test_two_disjoint_groups_do_not_wait_for_each_other() -> None:
    results = fresh_world(two_groups, 4, False)
    for x, intra, inter in results:
        assert (x == results[0][0]).all()  # the same data, the same draws: the same model
        assert intra > 0
        assert inter == 0


def some_attach(rank: int, world: int) -> list[float]:
    """Ranks 0 and 1 train a model, then all ranks make a group and train another; how far apart ranks end."""
    some = dist.new_group([0, 1])
    models = [(some, 2), (dist.group.WORLD, world)]
    for group, size in models:
        if rank < size:
            model = toy.make()
            optimizer = Birder(model.parameters(), lr=0.01)
            ddp = DistributedDataParallel(model, process_group=group)
            attach(ddp, optimizer)
            toy.loss(ddp, rank, 1).backward()
            optimizer.step()
        everyone = dist.new_group(list(range(world)))
        dist.barrier(group=everyone)
    return toy.flat(model).tolist()


def test_ranks_that_attach_without_the_others_do_not_hold_up_later_groups() -> None:
    found = fresh_world(some_attach, 3)
    assert found[0] == found[1] == found[2]


def test_a_group_across_two_nodes_counts_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Topology.of_ranks([2, 3]) == Topology(1, 2)
    assert Topology.of_ranks([1, 2]) == Topology(2, 1)
    assert Topology.of_ranks([0, 1, 2, 3]) == Topology(2, 2)
    with pytest.raises(ValueError, match="give every node the same number of ranks"):
        Topology.of_ranks([0, 1, 2])


def packed(rank: int, world: int, count: int) -> tuple:
    comm = TwoPhase(dist.group.WORLD, Topology.from_env(world))
    flags = torch.arange(count) % 5 == rank
    union = run(comm, Union(flags))
    return union.numpy(), comm.counter.total, comm.counter.collectives


@pytest.mark.parametrize(("count", "nbytes", "calls"), [(8000, 2 * 2 * -(-1000 // 3), 2), (101, 2 * 13, 1)])
def test_a_union_sends_one_bit_for_each_flag(count: int, nbytes: int, calls: int) -> None:
    """To each server and back; few of them to every peer in one collective."""
    for union, sent, collectives in fresh_world(packed, 3, count):
        assert (union == (torch.arange(count) % 5 < 3).numpy()).all()
        assert (sent, collectives) == (nbytes, calls)
