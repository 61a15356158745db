"""What users do with DDP: accumulate, clip, scale losses, freeze, group, schedule, disagree, resume."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import SGDM, Birder, attach
from experiments.training import torch_hooks as hooks
from tests.helpers import toy
from tests.helpers.ranks import run_ranks


def wrap(model: nn.Module, **options) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.0005, **options)


def accumulate(rank: int, world: int, overlap: bool) -> list:
    """Two micro-batches under no_sync, and the same as one batch of both."""
    ends = []
    for split in (True, False):
        model = toy.make().double().float()
        ddp = wrap(model)
        optimizer = Birder(model.parameters(), lr=0.01)
        attach(ddp, optimizer, overlap=overlap)
        for step in range(1, 11):
            optimizer.zero_grad()
            if split:
                with ddp.no_sync():
                    toy.loss(ddp, rank, 2 * step).backward()
                toy.loss(ddp, rank, 2 * step + 1).backward()
            else:
                (toy.loss(ddp, rank, 2 * step) + toy.loss(ddp, rank, 2 * step + 1)).backward()
            optimizer.step()
        ends.append(toy.flat(model).numpy())
    return ends


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_under_no_sync_is_one_large_batch(overlap):
    (split, whole), (split1, _) = run_ranks(accumulate, 2, overlap)
    assert (split == split1).all()
    # Gradients are summed in another order: a sign drawn at the edge of its probability may fall the other way, once
    # in 2^16 draws and bit of difference. Here none does.
    assert (split == whole).mean() > 0.99


def backward_twice(rank: int, world: int) -> str:
    model = toy.make()
    ddp = wrap(model)
    attach(ddp, Birder(model.parameters(), lr=0.01))
    toy.loss(ddp, rank, 1).backward()
    try:
        toy.loss(ddp, rank, 2).backward()
    except RuntimeError as e:
        return str(e)
    return ""


def test_accumulation_without_no_sync_is_refused():
    assert all("no_sync" in said for said in run_ranks(backward_twice, 2))


def groups_and_schedule(rank: int, world: int) -> tuple:
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(
        [
            {"params": [model.embed.weight], "lr": 0.25, "beta": 0.5},
            {"params": list(model.first.parameters()), "weight_decay": 0.5},
            {"params": list(model.second.parameters())},
        ],
        lr=0.125,
    )
    attach(ddp, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moves = []
    for step in (1, 2):
        optimizer.zero_grad()
        toy.loss(ddp, rank, step).backward()
        optimizer.step()
        schedule.step()
        now = {n: p.detach().clone() for n, p in model.named_parameters()}
        moves.append({n: float((now[n] - before[n]).abs().max()) for n in now})
        before = now
    return moves


def test_groups_have_rates_of_their_own_and_schedulers_work():
    first, second = run_ranks(groups_and_schedule, 2)[0]
    assert first["embed.weight"] == pytest.approx(0.25)
    assert first["second.weight"] == pytest.approx(0.125)
    assert second["embed.weight"] == pytest.approx(0.125)
    assert second["second.weight"] == pytest.approx(0.0625)
    assert first["scale"] == 0  # in no group


class Branch(nn.Module):
    """`spare` takes part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.frozen(self.used(x))
        return (self.spare(y) if both else y).square().sum()


def unused(rank: int, world: int) -> dict:
    torch.manual_seed(0)
    model = Branch()
    ddp = wrap(model, find_unused_parameters=True)
    optimizer = Birder(model.parameters(), lr=0.01)
    attach(ddp, optimizer)
    start, moved = model.spare.weight.detach().clone(), []
    frozen = model.frozen.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4) + rank, both=step >= 2).backward()
        optimizer.step()
        moved.append(bool((model.spare.weight != start).any()))
    return {"x": toy.flat(model).numpy(), "moved": moved, "frozen": bool((model.frozen.weight == frozen).all())}


def test_parameters_without_gradient_stay_until_they_have_one():
    a, b = run_ranks(unused, 2)
    assert a["moved"] == [False, False, True, True]
    assert a["frozen"]
    assert (a["x"] == b["x"]).all()


def disagree(rank: int, world: int, what: str) -> str:
    model = toy.make()
    odd = rank == 2
    options = {"lr": 0.02 if odd and what == "lr" else 0.01, "idle": "hold" if odd and what == "idle" else "decay"}
    optimizer, ddp = Birder(model.parameters(), **options), wrap(model)
    if odd and what == "steps":  # replicas of a dense method drifted apart without a word
        optimizer.steps = 3
    if odd and what == "frozen":  # its units would hold other parameters
        model.second.requires_grad_(False)
    if odd and what == "state":  # it alone would put a state into its units
        optimizer.state[model.scale]["m"] = torch.ones(1)
    try:
        attach(ddp, optimizer, hierarchical=odd and what == "hierarchical")
    except RuntimeError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("what", ["lr", "idle", "hierarchical", "steps", "frozen", "state"])
def test_ranks_that_disagree_are_named(what):
    said = run_ranks(disagree, 3, what)
    assert all("ranks [2] differ from rank 0" in s for s in said)


def test_attach_refuses_what_it_cannot_serve():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        attach(toy.make(), Birder(toy.make().parameters()))
    for flag in ("hierarchical", "overlap", "communicate"):  # any word counts as True
        with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'no'"):
            attach(toy.make(), Birder(toy.make().parameters()), **{flag: "no"})  # type: ignore[arg-type]


def foreign(rank: int, world: int) -> list[str]:
    model = toy.make()
    ddp = wrap(model)
    said = []
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1), Birder(toy.make().parameters())):
        try:
            attach(ddp, optimizer)
        except (TypeError, ValueError) as e:
            said.append(str(e))
    with pytest.raises(TypeError, match=r"birder\.Topology"):
        attach(ddp, Birder(model.parameters()), topology=(1, 1))  # type: ignore[arg-type]
    late = mock.patch("birder.hooks.attachment.gather_numbers", side_effect=RuntimeError("Timed out"))
    with late, pytest.raises(RuntimeError, match=r"call it on every rank, not on rank 0 alone \(Timed out\)"):
        attach(ddp, Birder(model.parameters()))
    ddp.mixed_precision = object()  # what it makes of this needs a GPU
    with pytest.raises(RuntimeError, match=r"torch\.autocast"):
        attach(ddp, Birder(model.parameters()))
    return said


def test_attach_refuses_other_optimizers_and_other_parameters():
    said = run_ranks(foreign, 1)[0]
    assert "birder package" in said[0]
    assert "parameters that the model does not have" in said[1]


def sent(rank: int, world: int, kind: str) -> int:
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000)
    ddp = DistributedDataParallel(model)
    optimizer = SGDM(model.parameters(), 0.1) if kind == "sgdm" else Birder(model.parameters())
    attachment = attach(ddp, optimizer)
    for step in range(6):
        if step == 1:
            attachment.counter.reset()
        optimizer.zero_grad()
        ddp(torch.randn(4, 1000, generator=torch.Generator().manual_seed(rank + 10 * step))).square().mean().backward()
        optimizer.step()
    return attachment.counter.total


def test_birder_sends_a_thirtieth_of_what_fp32_sends():
    dense, bits = sum(run_ranks(sent, 4, "sgdm")), sum(run_ranks(sent, 4, "birder"))
    assert 1 / 33 < bits / dense < 1 / 30


def no_communication(rank: int, world: int) -> tuple:
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(model.parameters(), lr=0.01)
    attachment = attach(ddp, optimizer, communicate=False)
    toy.train(ddp, optimizer, rank, range(1, 6))
    return toy.flat(model).numpy(), attachment.counter.total


def test_without_communication_nothing_is_sent_and_replicas_part():
    (x, a), (y, b) = run_ranks(no_communication, 2)
    assert a == b == 0
    assert (x != y).any()


def closed_without_communication(rank: int, world: int) -> list[list[float]]:
    """Gradients of this rank while an attachment sends nothing, and after it was closed."""
    model = toy.make()
    ddp = wrap(model)
    attachment = attach(ddp, SGDM(model.parameters(), lr=0.01), communicate=False)
    found = []
    for _ in range(2):
        model.zero_grad()
        toy.loss(ddp, rank, 1).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist())
        attachment.close()
    return found


def test_a_closed_attachment_leaves_averaging_to_ddp_also_where_it_sent_nothing() -> None:
    (alone, together), (alone1, together1) = run_ranks(closed_without_communication, 2)
    assert alone != alone1
    assert together == together1


def steps_after_close(rank: int, world: int) -> str:
    model = toy.make()
    ddp, optimizer = wrap(model), Birder(model.parameters(), lr=0.01)
    attach(ddp, optimizer).close()
    toy.loss(ddp, rank, 1).backward()
    try:
        optimizer.step()
    except RuntimeError as e:
        return str(e)
    return ""


def test_a_step_after_close_is_refused_where_there_are_other_ranks() -> None:
    """Its process group may be another attachment's by then."""
    assert all(
        "was closed: call birder.attach(model, optimizer) again" in said for said in run_ranks(steps_after_close, 2)
    )


def left_over(rank: int, world: int) -> list[str]:
    """What is still there after models, optimizers and attachments have gone out of use."""
    base = toy.make()
    there: dict[str, weakref.ref[Any]] = {}
    for name in ("SGDM", "Birder", "OneBitAdam", "bf16", "powersgd"):
        ddp = DistributedDataParallel(base, gradient_as_bucket_view=True)
        own = name[0].isupper()
        options = {"warmup_steps": 1} if name == "OneBitAdam" else {}
        optimizer = getattr(birder, name if own else "SGDM")(base.parameters(), lr=0.01, **options)
        attachment: Any = attach(ddp, optimizer) if own else hooks.attach_hook(ddp, optimizer, name)
        toy.train(ddp, optimizer, rank, range(3))
        attachment.close()
        there |= {f"{name}'s {type(x).__name__}": weakref.ref(x) for x in (ddp, optimizer, attachment)}
        del ddp, optimizer, attachment
    gc.collect()
    return [name for name, reference in there.items() if reference() is not None]


def test_nothing_is_left_after_close() -> None:
    """DDP keeps hooks where Python's collector does not look: a hook that knew the model would keep all of it for ever."""
    assert run_ranks(left_over, 2) == [[], []]
