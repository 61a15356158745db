"""Bits that mean nothing on top of the bound: what a world measures for its prediction changes nothing in the world."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology
from experiments.records import record
from launch.spec import RunSpec
from tests.distributed import test_turns
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.tiers import slow

METHODS = (["optimizer=sgdm", "comm.enabled=false"], ["optimizer=sgdm"], ["optimizer=birder"])


def _train(rank: int, world: int, spec: RunSpec) -> tuple[dict[str, list[float]], list[bool]]:
    """Losses of each method, with a profile; and whether the bound's parameters were left alone."""
    from experiments.timing import turns

    alone: list[bool] = []

    def always(self: Any) -> dict[str, Any]:
        self.bound.own.enter()
        before = [p.detach().clone() for p in self.ddp.module.parameters()]
        self.bound.own.leave()
        found = self._profiled()
        self.bound.own.enter()
        alone.extend(torch.equal(p, b) for p, b in zip(self.ddp.module.parameters(), before, strict=True))
        self.bound.own.leave()
        return found

    turns._World._profile = always  # type: ignore[method-assign]
    return test_turns._train(rank, world, spec, False, 0.8), alone


@pytest.mark.slow
def test_a_profile_is_the_same_on_all_ranks_and_changes_no_training(tmp_path: Path) -> None:
    spec = test_turns.described(tmp_path, *METHODS)
    plain, _ = test_turns.in_turns(spec)
    found = fresh_world(_train, 2, spec, grouped=False, ranks_per_node=1)
    assert [losses for losses, _ in found] == plain
    assert all(all(alone) and alone for _, alone in found)
    (profile,) = {repr(r.turns["profile"]) for r in record.read_all(spec.config["results_dir"])}
    assert "bits_ms" in profile


def _send(rank: int, size: int) -> tuple[int, list[float]]:
    from experiments.timing.profiled import Bits

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96, bias=False)
    before = model.weight.detach().clone()
    ddp = DistributedDataParallel(model)
    optimizer = Bits(model.parameters(), {"lr": 0.0, "weight_decay": 0.0})
    attachment = birder.attach(ddp, optimizer, topology=Topology(size, 1))
    for _ in range(3):  # DDP rebuilds its buckets after the first
        attachment.counter.reset()
        ddp(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    return attachment.counter.inter, (model.weight - before).flatten().tolist()


@pytest.mark.parametrize("ranks", [slow(2), 3, slow(4)])
def test_bits_are_those_of_two_phases_and_train_nothing(ranks: int) -> None:
    for sent, moved in run_ranks(_send, ranks):
        assert sent == 2 * (ranks - 1) * (64 * 96 // 8 // ranks)
        assert not any(moved)


def test_what_bits_cost_is_what_a_step_takes_longer_than_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds, on the slowest rank; the first turn of each does not count."""
    from experiments.timing import profiled

    seconds = {False: iter([9.0, 0.15, 0.14, 0.16]), True: iter([9.0, 0.20, 0.21, 0.19])}
    bound: Any = SimpleNamespace(turn=lambda *_, optimizer_and_hook: next(seconds[optimizer_and_hook is not None]))
    ddp = SimpleNamespace(process_group=None, hook=None, use=lambda _: None)
    bound.shared = SimpleNamespace(ddp=ddp, shard=SimpleNamespace(device=torch.device("cpu")))
    attached = SimpleNamespace(attach=lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(profiled, "birder", attached)
    monkeypatch.setattr(profiled, "dist", SimpleNamespace(get_world_size=lambda _: 2, barrier=lambda: None))
    monkeypatch.setattr(profiled, "gathered", lambda mine: [mine / 2, mine])
    groups = [{"params": [torch.nn.Parameter(torch.zeros(8))]}]
    assert profiled.bits_ms(bound, groups, 25.0, 3) == pytest.approx(50.0)
