"""Replay: waits as long as it says, hands out gradients in order, sends what a node of 8 GPUs would."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology, TwoPhase
from birder.predict.timeline import Timeline, parse
from experiments.cells import model as cells_model
from experiments.cells import timelines
from experiments.cells.model import ReplayModel
from experiments.cells.nodes import FlatNode, HierarchicalNode
from experiments.cells.replay import DILATION, Replay
from experiments.cells.timelines import nic_bytes
from experiments.workloads.base import Shard
from launch.errors import UserError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

NAMES = ["a.weight", "a.bias", "b.weight", "c.weight"]
SIZES = [3 * 2**12, 2**12, 2**12, 2**13]


def timeline(sizes: list[int] | None = None) -> Timeline:
    """Three layers; c is ready first, a's weight and bias together and last."""
    times = [40.0, 40.0, 30.0, 20.0]
    gradients = [[n, [s], t] for n, s, t in zip(NAMES, sizes or SIZES, times, strict=True)]
    inside = {"reduce_scatter_ms": 0.0, "all_reduce_ms": 0.0, "all_gather_ms": 0.0, "reason": "none"}
    content = {"name": "t", "model": "t", "gpu": "-", "precision": "fp32", "batch_per_gpu": 4, "gpus_per_node": 8}
    content |= {"forward_ms": 10.0, "step_ms": 40.0, "gradients": gradients, "intra_node": inside, "source": "a test"}
    return parse(content, "test")


class Clock:
    """Stands for the module `time`: it moves while somebody sleeps, and only then."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cells_model, "time", made)
    return made


def test_a_step_takes_the_dilated_time_and_gradients_come_in_order(clock: Clock) -> None:
    model = ReplayModel(timeline(), 5.0)
    came: list[tuple[str, float]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: came.append((name, clock.now)))
    loss = model(torch.zeros(1)).sum()
    assert clock.now == pytest.approx(0.05)
    loss.backward()
    assert clock.now == pytest.approx(0.2)
    assert [name for name, _ in came][:2] == ["c.weight", "b.weight"]
    assert {name for name, _ in came[2:]} == {"a.weight", "a.bias"}
    assert [at for _, at in came] == pytest.approx([0.1, 0.15, 0.2, 0.2])
    for p in model.parameters():
        assert p.grad is not None
        assert bool((p.grad != 0).all())


def test_dilation_zero_does_not_wait_and_a_delay_moves_every_gradient(clock: Clock) -> None:
    model = ReplayModel(timeline(), 0.0)
    model(torch.zeros(1)).sum().backward()
    assert clock.now == 0
    model.follow(timeline(), 2.0, delay_ms=100.0)
    model(torch.zeros(1)).sum().backward()
    assert clock.now == pytest.approx(2 * 0.14)


def test_names_shapes_and_fractions_are_those_of_the_timeline() -> None:
    t = timelines.load("resnet50_b32_tf32")
    real = ReplayModel(t, 1.0)
    assert [(n, tuple(p.shape)) for n, p in real.named_parameters()] == [(g.name, g.shape) for g in t.gradients]
    part = ReplayModel(timelines.flattened(t, 1 / 32), 1.0)
    assert part.elements == pytest.approx(t.elements / 32, rel=1e-3)
    assert [n for n, _ in part.named_parameters()] == [g.name for g in t.gradients]
    with pytest.raises(ValueError, match="another model"):
        part.follow(timeline(), 1.0)


def _ddp(model: torch.nn.Module, mb: float) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)


def _dense(rank: int, world: int) -> Any:
    model = ReplayModel(timeline(), 0.0)
    optimizer = birder.SGDM(model.parameters(), lr=1.0, momentum=0.0)
    ddp = _ddp(model, SIZES[3] * 4 / 2**20)
    attachment = birder.attach(ddp, optimizer, topology=Topology(world, 1))
    hook: Any = ddp._comm_hooks[0][1]
    original = hook.on_bucket
    orders = []
    for _ in range(3):
        optimizer.zero_grad()
        order: list[int] = []
        hook.on_bucket = lambda b, seen=order: (seen.extend(p.numel() for p in b.parameters()), original(b))[1]
        ddp(torch.zeros(1)).sum().backward()
        orders.append(order)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    same = all(torch.allclose(g, v) for g, v in zip(grads, model._values, strict=True))
    return orders, same, attachment.counter.inter / 3, model.elements


def test_ddp_rebuilds_its_buckets_in_the_order_of_the_timeline() -> None:
    """All ranks' gradients are alike, so that their mean is what was handed out."""
    for orders, same, sent, elements in run_ranks(_dense, 2, ranks_per_node=1):
        assert same
        assert orders[1] == orders[2]
        assert orders[1][:2] == [SIZES[3], SIZES[2]]
        assert sorted(orders[1]) == sorted(SIZES)
        assert sent == pytest.approx(nic_bytes("fp32", elements, 2, 8), rel=1e-3)


HOW = {"ring": ("flat", True), "pairwise": ("flat", False), "hierarchical": ("hierarchical", True)}


def _compressed(rank: int, world: int, optimizer: str) -> dict[str, Any]:
    """For each way to communicate: parameters after three steps, and bytes that the last one sent."""
    found = {}
    for how in ("plain", *HOW):
        model = ReplayModel(timeline(), 0.0)
        made: Any
        if optimizer == "birder":
            made = birder.Birder(model.parameters(), lr=0.1)
        else:
            made = birder.OneBitAdam(model.parameters(), lr=0.1, warmup_steps=1)

        def communicator(group: Any, topology: Topology, how: str = how, model: ReplayModel = model) -> Any:
            if how == "hierarchical":
                return HierarchicalNode(group, topology, model)
            return TwoPhase(group, topology) if how == "plain" else FlatNode(group, topology, 8, ring=how == "ring")

        # One unit: each has scales behind its bits, which the arithmetic leaves out.
        options: Any = {"communicator": communicator, "topology": Topology(world, 1), "unit_mb": 1.0}
        ddp = _ddp(model, 0.02)
        attachment = birder.attach(ddp, made, **options)
        for _ in range(3):
            made.zero_grad()
            attachment.counter.reset()
            ddp(torch.zeros(1)).sum().backward()
            made.step()
        attachment.close()
        x = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
        found[how] = (x, attachment.counter.inter)
    return found


@pytest.mark.parametrize("world", [slow(2), 3])
@pytest.mark.parametrize("optimizer", ["birder", "onebit_adam"])
def test_bytes_are_those_of_eight_gpus_and_bits_those_of_one_worker_per_node(world: int, optimizer: str) -> None:
    for found in run_ranks(_compressed, world, optimizer, ranks_per_node=1):
        plain, _ = found["plain"]
        for how, (traffic, ring) in HOW.items():
            x, sent = found[how]
            assert (x == plain).all()
            assert sent == pytest.approx(nic_bytes(traffic, sum(SIZES), world, 8, ring=ring), rel=0.03)


def test_arithmetic_of_the_nic() -> None:
    """8 nodes of 8: the ring sends 2(N-1)/N of 4 bytes; flat 8(N-1)/N in phase 1 and (n-1)/n in phase 2, of bits."""
    d = 8_000_000
    assert nic_bytes("fp32", d, 8, 8) == pytest.approx(2 * 7 / 8 * 4 * d)
    assert nic_bytes("bf16", d, 8, 8) == pytest.approx(2 * 7 / 8 * 2 * d)
    assert nic_bytes("hierarchical", d, 8, 8) == pytest.approx(2 * 7 / 8 * d / 8)
    assert nic_bytes("flat", d, 8, 8) == pytest.approx((7 + 63 / 64) * d / 8)
    assert nic_bytes("flat", d, 8, 8, ring=False) == pytest.approx(14 * d / 8)
    assert nic_bytes("fp32", d, 1, 8) == nic_bytes("none", d, 4, 8) == 0
    # A node of one GPU is an ordinary rank.
    assert nic_bytes("flat", d, 4, 1) == nic_bytes("hierarchical", d, 4, 1)


def test_the_workload_waits_and_counts_the_samples_of_a_node() -> None:
    w = Replay("resnet50_b32_tf32", dilation=2.0, steps=3)
    w.check()
    model = w.build_model()
    batches = list(w.train_batches(Shard(), 1, seed=0, epoch=0, start=1))
    assert len(batches) == 2
    began = time.perf_counter()
    w.loss(model, batches[0]).backward()
    assert time.perf_counter() - began >= 2 * w.timeline.step_ms / 1000
    assert w.samples(1) == 32 * 8
    assert w.synthetic
    assert Replay("resnet50_b32_tf32").dilation == DILATION
    for bad in ({"dilation": 0}, {"dilation": "slow"}, {"steps": 0}):
        with pytest.raises(UserError, match=r"^workload\."):
            Replay("resnet50_b32_tf32", **bad)  # type: ignore[arg-type]
