"""What docs/frameworks.md says to change in loops of public training code, on 2 ranks. The control is torch's optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from tests.helpers.ranks import run_ranks

STEPS = 6
ROUNDING = 1e-6
DENSE = "SGDM"
METHODS: dict[str, Callable[..., Any]] = {
    "torch": lambda params, **o: torch.optim.SGD(params, momentum=0.9, **o),
    DENSE: birder.SGDM,
    "Birder": birder.Birder,
    "OneBitAdam": lambda params, **o: birder.OneBitAdam(params, warmup_steps=2, eps=1e-4, **o),
}


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def flat(*models: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().view(-1) for m in models for p in m.parameters()]).numpy().copy()


def attach(model: nn.Module, optimizer: Any, name: str, **options: Any) -> None:
    if name != "torch":
        birder.attach(model, optimizer, **options)


def two_models(rank: int, name: str) -> np.ndarray:
    """An encoder and a predictor, each with DDP. With torch one optimizer holds both; here one holds each."""
    encoder, predictor = net(1), net(2)
    first, second = DistributedDataParallel(encoder), DistributedDataParallel(predictor)
    make = METHODS[name]
    if name == "torch":
        optimizers = [make(itertools.chain(encoder.parameters(), predictor.parameters()), lr=1e-2)]
    else:
        optimizers = [make(encoder.parameters(), lr=1e-2), make(predictor.parameters(), lr=1e-2)]
        birder.attach(first, optimizers[0])
        birder.attach(second, optimizers[1])
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(STEPS):
        second(first(batch(rank, step))).square().mean().backward()
        for o, s in zip(optimizers, schedules, strict=True):
            o.step()
            o.zero_grad()
            s.step()
    return flat(encoder, predictor)


def by_hand(rank: int, name: str) -> np.ndarray:
    """No DDP: the loop averages gradients with dist.all_reduce. `bind` trains without messages of the optimizer's own."""
    model = net(1)
    optimizer = METHODS[name](model.parameters(), lr=1e-2)
    if name != "torch":
        optimizer.bind()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return flat(model)


def toggled(rank: int, name: str) -> np.ndarray:
    """Accumulation by DDP's own switch, lr set in each step, clipping by the optimizer."""
    model = net(1)
    clip = 1e-2
    own = {} if name == "torch" else {"max_grad_norm": clip}
    optimizer = METHODS[name](model.parameters(), lr=0.0, **own)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer, name)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / STEPS
        for micro in (0, 1):
            ddp.require_backward_grad_sync = micro == 1
            (ddp(batch(rank, 2 * step + micro)).square().mean() / 2).backward()
        if name == "torch":
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return flat(model)


def synchronised(rank: int, name: str) -> np.ndarray:
    """All passes of an accumulation synchronise. Gradients are clipped one by one, the last layer's thrown away at first."""
    model = net(1)
    optimizer = METHODS[name](model.parameters(), lr=1e-2)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer, name, overlap=False)
    for step in range(STEPS):
        for micro in (0, 1):
            ddp(batch(rank, 2 * step + micro)).square().mean().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.mul_(min(1.0, float(1e-2 / p.grad.data.norm())))
        if step < 1:
            for p in model[2].parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


LOOPS = {"two models": two_models, "by hand": by_hand, "toggled": toggled, "synchronised": synchronised}


def play(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {f"{loop} {name}": LOOPS[loop](rank, name) for loop in LOOPS for name in METHODS}
    both = [*net(1).parameters(), *net(2).parameters()]
    with pytest.raises(ValueError, match="one for each wrapped model"):
        birder.attach(DistributedDataParallel(net(1)), birder.Birder(both))
    found["rank 0's"] = from_rank_0(rank, folder / "checkpoint.pt")
    return found


def from_rank_0(rank: int, path: Path) -> str:
    """Rank 0 saves, every rank loads after attach: what rank 1 is told."""

    def start() -> tuple[Any, Any]:
        optimizer = birder.Birder((model := net(1)).parameters())
        birder.attach(ddp := DistributedDataParallel(model), optimizer)
        return ddp, optimizer

    ddp, optimizer = start()
    ddp(batch(rank, 0)).sum().backward()
    optimizer.step()
    if rank == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()
    _, optimizer = start()
    try:
        optimizer.load_state_dict(torch.load(path))
    except ValueError as e:
        return str(e)
    return ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, 2, tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("loop", LOOPS)
def test_the_way_on_of_a_public_loop(ranks: list[dict[str, Any]], loop: str) -> None:
    """Dense: torch's values. Compressed: trained, and the same on both ranks."""
    first, second = ranks
    start = flat(net(1), net(2)) if loop == "two models" else flat(net(1))
    for name in METHODS:
        assert np.array_equal(first[f"{loop} {name}"], second[f"{loop} {name}"])
        assert not np.array_equal(first[f"{loop} {name}"], start)
    assert np.abs(first[f"{loop} {DENSE}"] - first[f"{loop} torch"]).max() < ROUNDING


def test_a_checkpoint_of_rank_0_is_refused_by_the_others(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["rank 0's"] == ""
    assert "saved by rank 0, this is rank 1" in second["rank 0's"]
