"""Ordinary scripts under FSDP2: they train as with torch's optimizer, or get one line before it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import birder
from birder import attach
from tests.helpers import toy
from tests.helpers.hsdp import full, hsdp, make_mesh, shard, train
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

WORLD = 4
"""Two replicas of two shards."""


def said(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except (RuntimeError, ValueError) as e:
        return str(e)
    return "ok"


class Branches(nn.Module):
    """One of two heads is used. Row 3 of the embedding, in the second shard, is seen late; `unused` never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(4, 8)
        self.early = nn.Linear(8, 4)
        self.late = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        head = self.late if late else self.early
        return head(torch.tanh(self.embed(x)))


def late_branch(rank: int, world: int, method: str) -> dict[str, Any]:
    """What is said, by whether the other head is used after the warm-up of two steps, and the steps done."""
    out: dict[str, Any] = {}
    for late in (False, True):
        mesh = make_mesh(2, 2)
        model = shard(Branches(), mesh)
        optimizer = getattr(birder, method)(model.parameters(), lr=0.01, warmup_steps=2)
        attach(model, optimizer, mesh=mesh)

        def steps(some: range, used: bool, model: Any = model, optimizer: Any = optimizer) -> None:
            for step in some:
                optimizer.zero_grad()
                x = torch.arange(6) % (2 if step <= 2 else 4)  # in the warm-up none of the second shard's rows
                F.cross_entropy(model(x, used), (x + rank + step) % 4).backward()
                optimizer.step()

        steps(range(1, 3), False)
        out[str(late)] = said(steps, range(3, 6), late)
        out[f"{late} steps"] = optimizer.steps
    return out


@pytest.mark.parametrize("method", ["OneBitAdam", "OneBitLAMB"])
def test_a_layer_first_used_after_the_warm_up_is_refused_as_under_ddp(method: str) -> None:
    """Its variance is 0, so it would never move. One of which a shard was seen is not: nor one that has no gradient."""
    for result in run_ranks(late_branch, WORLD, method):
        assert result["False"] == "ok"
        assert result["False steps"] == 5
        assert result["True"].startswith("late.")
        assert "its variance is 0, so it would never move" in result["True"]
        assert result["True steps"] == 2


def variance_set_to_0(rank: int, world: int, method: str, alone: bool) -> list[str]:
    """What is said once a script has set the variance of a part of a layer to 0, and of all of it. alone: one rank what it
    holds, and then the other one."""
    model, optimizer, _ = hsdp("toy", make_mesh(1, world), method, {"lr": 0.01, "warmup_steps": 2})
    train(model, optimizer, toy.loss, rank, range(1, 4))
    variance, found = optimizer.state[model.second.weight]["v"], []  # type: ignore[index]
    parts = [variance if rank == turn else None for turn in (world - 1, 0)] if alone else [variance[rank:1], variance]
    for part in parts:
        if part is not None:
            part.zero_()
        found.append(said(train, model, optimizer, toy.loss, rank, range(4, 7)))
    return found


@pytest.mark.parametrize("method", ["OneBitAdam", slow("OneBitLAMB")])
@pytest.mark.parametrize("alone", [False, True])
def test_a_frozen_variance_that_is_set_to_0_is_refused_as_under_ddp(method: str, alone: bool) -> None:
    """Also where one rank alone does so: nobody is kept waiting."""
    for part, whole in run_ranks(variance_set_to_0, 2, method, alone):
        assert part == "ok"
        assert "second.weight had no gradient" in whole
        assert "its variance is 0, so it would never move" in whole


def spread(model: nn.Module) -> float:
    """The largest difference of a parameter between ranks."""
    mine = full(model)
    others = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(others, mine)
    return max(float((other - mine).abs().max()) for other in others)


def after_close(rank: int, world: int) -> dict[str, Any]:
    """Gradients of one step: after `close`, and torch's own HSDP from the same parameters; and ranks after three steps."""
    model, optimizer, attachment = hsdp("toy", make_mesh(2, 2), "Birder", {"lr": 0.01})
    train(model, optimizer, toy.loss, rank, range(1, 3))
    optimizer.zero_grad()
    attachment.close()
    mean = toy.make()
    flat, start = full(model), 0
    for p in mean.parameters():
        p.data.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()
    for worker in range(world):
        (toy.loss(mean, worker, 3) / world).backward()
    toy.loss(model, rank, 3).backward()
    grads = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), mean.parameters(), strict=True)]  # type: ignore[union-attr]
    off = max(float((a - b).abs().max()) for a, b in grads if b is not None)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), toy.loss, rank, range(3, 6))  # type: ignore[arg-type]
    return {"off": off, "spread": spread(model)}


def test_once_closed_another_optimizer_gets_the_mean_over_replicas() -> None:
    for result in run_ranks(after_close, WORLD):
        assert result["off"] < 1e-7  # sums of four fp32 numbers below 1, in another order
        assert result["spread"] == 0.0


def unfrozen_head(rank: int, world: int) -> list[float]:
    """Differences between ranks before and after another optimizer's layer is unfrozen, and how far it moved."""
    mesh = make_mesh(2, 2)
    model = toy.make()
    model.second.requires_grad_(False)
    shard(model, mesh)
    trunk = [p for name, p in model.named_parameters() if not name.startswith("second")]
    optimizer = birder.Birder(trunk, lr=0.01)
    head = torch.optim.AdamW(model.second.parameters(), lr=0.01)
    attach(model, optimizer, mesh=mesh)
    found = []
    for steps in (range(1, 3), range(3, 6)):
        before = model.second.weight.full_tensor().clone()  # type: ignore[operator]
        for step in steps:
            model.zero_grad()
            toy.loss(model, rank, step).backward()
            optimizer.step()
            head.step()
        found += [spread(model), float((model.second.weight.full_tensor() - before).abs().max())]  # type: ignore[operator]
        model.second.requires_grad_(True)
    return found


def test_a_layer_of_another_optimizer_that_is_unfrozen_is_averaged_over_replicas() -> None:
    for before, still, after, moved in run_ranks(unfrozen_head, WORLD):
        assert before == still == after == 0.0
        assert moved > 0.01  # three steps of AdamW at lr 0.01


def two_optimizers(rank: int, world: int) -> dict[str, Any]:
    mesh = make_mesh(2, 2)

    def both(first: str, second: str, **options: Any) -> tuple[str, nn.Module]:
        model = shard(toy.make(), mesh)
        one, *others = model.parameters()
        a = getattr(birder, first)([one], lr=0.01)
        b = getattr(birder, second)(others, lr=0.01, **options)
        attach(model, a, mesh=mesh)
        if (words := said(lambda: attach(model, b, mesh=mesh))) == "ok":
            for step in range(1, 3):
                model.zero_grad()
                toy.loss(model, rank, step).backward()
                a.step()
                b.step()
        return words, model

    out: dict[str, Any] = {f"{a} {b}": both(a, b)[0] for a, b in (("Birder", "AdamW"), ("SGDM", "Birder"))}
    out["wires"] = both("SGDM", "AdamW", wire="bf16")[0]
    out["dense"], model = both("SGDM", "AdamW")
    out["spread"] = spread(model)

    model, optimizer, attachment = hsdp("toy", mesh, "Birder", {"lr": 0.01})
    out["again"] = said(lambda: attach(model, optimizer, mesh=mesh))
    assert attachment.closed
    second = birder.Birder(model.parameters(), lr=0.01)
    out["instead"] = said(lambda: attach(model, second, mesh=mesh))
    optimizer.attachment.close()
    out["closed"] = said(lambda: attach(model, second, mesh=mesh))
    train(model, second, toy.loss, rank, range(1, 3))
    out["closed spread"] = spread(model)

    parts = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 5))
    for part in parts:
        attach(fully_shard(part, mesh=mesh["shard"]), birder.Birder(part.parameters(), lr=0.01), mesh=mesh)
    return out


def test_two_attached_optimizers_are_refused_where_one_hook_does_not_do_for_both() -> None:
    for result in run_ranks(two_optimizers, WORLD):
        for case in ("Birder AdamW", "SGDM Birder", "wires", "instead"):
            assert "is attached to this model already" in result[case]
            assert "\n" not in result[case]
        assert [result[case] for case in ("dense", "again", "closed")] == ["ok", "ok", "ok"]
        assert result["spread"] == result["closed spread"] == 0.0


class Checkpointed(nn.Module):
    """Its blocks, sharded one by one, run under activation checkpointing. All other parameters come before or after."""

    def __init__(self, reentrant: bool | None, ends: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 8) if ends else nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).requires_grad_()
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(rank: int, world: int, method: str, ends: bool) -> dict[str, Any]:
    mesh, out = make_mesh(2, 2), {}
    for way in (None, True):
        model = Checkpointed(way, ends)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        more = {"warmup_steps": 2} if method == "OneBitAdam" else {}
        optimizer = getattr(birder, method)(model.parameters(), lr=0.01, **more)
        attach(model, optimizer, mesh=mesh)

        def backward(step: int, model: nn.Module = model) -> None:
            g = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(6, 8, generator=g)).square().mean().backward()

        for step in range(1, 5):
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
        out[str(way)] = full(model).numpy().tobytes()
        optimizer.zero_grad()
        backward(5)
        for p in model.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]
        out[f"{way} changed"] = said(optimizer.step)
        backward(5)
        out[f"{way} twice"] = said(backward, 6)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("method", ["Birder", "OneBitAdam"])
def test_reentrant_checkpointing_changes_nothing(method: str, ends: bool) -> None:
    """Its inner graph tasks do not end the pass. Also where no parameter comes outside of them; and guards still hold."""
    for result in run_ranks(checkpointed, WORLD, method, ends):
        assert result["None"] == result["True"]
        for way in (None, True):
            assert "gradients were changed after backward" in result[f"{way} changed"]
            assert "backward ran twice before step()" in result[f"{way} twice"]
