"""What an optimizer keeps when it is attached again, refused or left: its state, the changes it has seen, its steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import Topology, attach
from birder.optim.by_parameter import taken
from tests.helpers import toy
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.workload_data import same

H = 4
QSPARSE = {"lr": 0.05, "ratio": 8, "sync_every": H, "block": 8}


def closed_alone(rank: int, world: int) -> list[bool]:
    """One rank of DDP goes on after `close`, as a script with no other rank does."""
    found = []
    methods: dict[str, dict[str, int]] = {"Birder": {}, "OneBitAdam": {"warmup_steps": 2}, "SGDM": {}}
    for name, options in methods.items():
        models = [toy.make() for _ in range(2)]
        ddp = DistributedDataParallel(models[0])
        optimizers = [getattr(birder, name)(m.parameters(), lr=0.01, **options) for m in models]
        attachment = attach(ddp, optimizers[0])
        for step in range(1, 7):
            if step == 4:
                attachment.close()
            for model, optimizer in zip((ddp, models[1]), optimizers, strict=True):
                optimizer.zero_grad()
                toy.loss(model, 0, step).backward()
                optimizer.step()
        found.append(torch.equal(*map(toy.flat, models)))
    return found


def test_one_rank_trains_on_after_close() -> None:
    assert run_ranks(closed_alone, 1) == [[True, True, True]]


def left_alone(rank: int, world: int) -> None:
    """After `close` one rank's optimizer is as one that was never attached: scaled, clipped, given another layer."""
    model = toy.make()
    model.scale.requires_grad_(False)
    ddp, optimizer = DistributedDataParallel(model), birder.Birder(model.parameters(), lr=0.01)
    attachment = attach(ddp, optimizer)
    toy.train(ddp, optimizer, rank, range(1, 3))
    attachment.close()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(toy.loss(model, rank, 3)).backward()
    scaler.step(optimizer)
    optimizer.max_grad_norm = 1.0
    model.scale.requires_grad_(True)
    toy.train(model, optimizer, rank, range(4, 6))
    assert optimizer.steps == 5
    assert optimizer.holds(model.scale)


def test_close_leaves_one_rank_nothing_that_is_refused_for_backwards_messages() -> None:
    run_ranks(left_alone, 1)


def watched_again(rank: int, world: int, change: str) -> tuple[list[str], torch.Tensor]:
    """Attached again within an interval, with units of another size; the caller clips before or after that, or never."""
    model = toy.make()
    ddp, optimizer = DistributedDataParallel(model), birder.QSparseLocalSGD(model.parameters(), **QSPARSE)
    attachment = attach(ddp, optimizer, unit_mb=0.001)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 2 * H + 1):
            optimizer.zero_grad()
            toy.loss(ddp, rank, step).backward()
            optimizer.step()
            if step == {"before": H + 1, "after": H + 2}.get(change):
                for p in model.parameters():
                    p.data.clamp_(-0.05, 0.05)
            if step == H + 1:
                attachment = attach(ddp, optimizer)
    units = len(optimizer.units)
    attachment.close()
    assert units == 1
    return [str(w.message) for w in said if "synchronisation" in str(w.message)], toy.flat(model)


@pytest.mark.parametrize("change", ["never", "before", "after"])
def test_units_of_another_size_see_the_callers_changes_and_no_others(change: str) -> None:
    (said, mine), (_, theirs) = run_ranks(watched_again, 2, change)
    assert len(said) == int(change != "never"), said
    assert (mine == theirs).all()


def test_a_refusal_to_bind_leaves_the_state() -> None:
    """Bound again while a parameter is of another type."""
    model = toy.make()
    optimizer = birder.Birder(model.parameters(), lr=0.01)
    toy.train(model, optimizer, 0, range(1, 4))
    before = copy.deepcopy(optimizer.state_dict())
    model.second.half()
    with pytest.raises(ValueError, match="float32") as error:
        optimizer.bind()
    model.second.float()
    optimizer.bind()
    assert "\n" not in str(error.value)
    assert same(optimizer.state_dict(), before)


def several(rank: int, world: int) -> tuple[list[int], str]:
    """Bytes that each of two attachments has counted, in dense steps of both; then a third that would send nothing."""
    model = toy.make()
    ddp = DistributedDataParallel(model)
    parts = [list(model.first.parameters()), list(model.second.parameters())]
    optimizers: list[Any] = [birder.SGDM(parts[0], lr=0.01, wire="bf16"), birder.AdamW(parts[1], lr=0.01)]
    attachments = [attach(ddp, optimizer) for optimizer in optimizers]
    toy.loss(ddp, rank, 1).backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(ValueError, match="communicate") as error:
        attach(ddp, birder.SGDM([model.scale], lr=0.01), communicate=False)
    sent = [a.counter.total for a in attachments]
    for a in attachments:
        a.close()
    return sent, str(error.value)


def test_each_attachment_counts_what_its_own_optimizer_sends() -> None:
    (first, second), message = run_ranks(several, 2)[0]
    model = toy.make()
    mine, others = (sum(p.numel() for p in m.parameters()) for m in (model.first, model.second))
    rest = model.embed.weight.numel() + 1  # nobody's, in fp32: of the same message as the second's
    assert (first, second) == (2 * mine, 4 * (others + rest))
    assert "\n" not in message


def by_nodes_and_back(rank: int, world: int, frozen: bool) -> list[torch.Tensor]:
    """What workers withhold, all together or on average, before and after attaching by nodes, and by ranks again.

    frozen: a layer is so meanwhile, and its state is kept aside.
    """
    found = []
    for reduce, name in (("one_phase", "owner_error"), ("two_phase", "worker_error")):
        model = toy.make()
        ddp, optimizer = DistributedDataParallel(model), birder.SigmaDeltaAdam(model.parameters(), reduce=reduce)

        def withheld(name: str = name, optimizer: Any = optimizer) -> torch.Tensor:
            own = torch.cat([kept[name].flatten() for kept in taken(optimizer).values()])
            dist.all_reduce(own)  # of a node each rank says all of it
            return own / (optimizer.comm.shards if name == "owner_error" else world)

        attach(ddp, optimizer)
        toy.train(ddp, optimizer, rank, range(1, 4))
        optimizer.zero_grad()
        found.append(withheld())
        before: dict[str, Any] = {}
        for how in ({"hierarchical": True, "topology": Topology(1, 2)}, {}):
            if frozen:
                model.second.requires_grad_(False)
                attach(ddp, optimizer, **before)
            attachment = attach(ddp, optimizer, **how)
            if frozen:
                model.second.requires_grad_(True)
                attachment = attach(ddp, optimizer, **how)
            found.append(withheld())
            before = how
        attachment.close()
    return found


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_withheld_stays_where_nodes_become_workers_and_back(frozen: bool) -> None:
    """A part of it was dropped where nodes became workers, and sent twice where ranks did again."""
    for mine in run_ranks(by_nodes_and_back, 2, frozen):
        for before, *after in (mine[:3], mine[3:]):
            assert before.abs().max() > 0.1
            for now in after:
                torch.testing.assert_close(now, before, rtol=0, atol=1e-6)


def left_by_the_other(rank: int, world: int) -> list[str]:
    """Two ranks train, their process group ends, and each trains on alone: what attach says, by method."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    optimizers = {}
    for name in ("OneBitAdam", "Birder", "AdamW"):
        model = toy.make()
        options = {"warmup_steps": 1} if name == "OneBitAdam" else {}
        optimizer = getattr(birder, name)(model.parameters(), lr=0.01, **options)
        ddp = DistributedDataParallel(model)
        attach(ddp, optimizer)
        toy.train(ddp, optimizer, rank, range(1, 4))
        optimizers[name] = model, optimizer
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said = []
    for model, optimizer in optimizers.values():
        ddp = DistributedDataParallel(model)
        try:
            attach(ddp, optimizer)
            toy.train(ddp, optimizer, rank, range(4, 6))
        except RuntimeError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


def test_a_rank_does_not_wait_for_the_state_of_one_that_has_left() -> None:
    for said in fresh_world(left_by_the_other, 2, grouped=False):
        assert len(said) == 1
        assert "OneBitAdam is divided among 2 ranks" in said[0]
        assert "birder.checkpoint" in said[0]
