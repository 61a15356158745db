"""Means of floats over ranks, and models that differ between ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer, Plan, Topology, attach
from birder.comm import Hierarchical, Mean, TwoPhase, run
from birder.hooks import attachment
from birder.optim.layout import Unit
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow


def values(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 2)


def mean_of(rank: int, world: int, size: int, hierarchical: bool, wire: torch.dtype) -> tuple:
    cls = Hierarchical if hierarchical else TwoPhase
    comm = cls(dist.group.WORLD, Topology.from_env(world))
    return run(comm, Mean(values(rank, size), wire)).numpy(), comm.counter.total, comm.counter.collectives


@pytest.mark.parametrize("world", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("size", [0, 1, 7, 4096])
def test_the_mean_is_summed_in_rank_order_and_equal_everywhere(world, size):
    expected = values(0, size)
    for rank in range(1, world):
        expected = expected + values(rank, size)
    expected = expected / world
    for got, sent, _ in run_ranks(mean_of, world, size, False, torch.float32):
        assert (got == expected.numpy()).all()
        assert sent == (2 * 4 * (world - 1) * -(-size // world) if size else 0)


def test_half_precision_halves_the_bytes():
    exact, half = (run_ranks(mean_of, 3, 999, False, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half[0][1] * 2 == exact[0][1]
    assert all((r[0] == half[0][0]).all() for r in half)
    # 8 bits of mantissa: each of two roundings is off by at most 2^-9 of the largest summand.
    assert abs(half[0][0] - exact[0][0]).max() <= 2**-8 * abs(values(2, 999)).max()


def test_a_mean_by_nodes_agrees_on_all_ranks():
    results = run_ranks(mean_of, 4, 1001, True, torch.float32, ranks_per_node=2)
    plain = run_ranks(mean_of, 4, 1001, False, torch.float32)
    assert all((r[0] == results[0][0]).all() for r in results)
    assert torch.allclose(torch.from_numpy(results[0][0]), torch.from_numpy(plain[0][0]), atol=1e-5)


class Lonely(BucketOptimizer):
    """SGD without any communication: every step is SKIP."""

    compressed: ClassVar[bool] = True
    local_models: ClassVar[bool] = True

    def __init__(self, params, lr: float = 0.1, **options):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0}, **options)

    def plan(self, step: int) -> Plan:
        return Plan.SKIP

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> None:
        unit.result = grad

    def update(self, step: int, plan: Plan) -> None:
        for unit in self.units:
            for p, g in zip(unit.params, unit.views(unit.result), strict=True):
                p.sub_(unit.group["lr"] * g)


def lonely_run(rank: int, world: int, broken: int | None, clip: float | None) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    ddp = DistributedDataParallel(model)
    optimizer = Lonely(model.parameters(), max_grad_norm=clip)
    attachment = attach(ddp, optimizer)
    before = model.weight.detach().clone()
    x = torch.full((2, 5), float(rank + 1))
    if rank == broken:
        x[0, 0] = float("nan")
    ddp(x).sum().backward()
    optimizer.step()
    moved = (model.weight.detach() - before).numpy()
    counted = attachment.counter.total
    mine = model.weight.detach().clone()
    with optimizer.averaged():
        average = model.weight.detach().clone()
    assert attachment.counter.total == counted
    assert torch.equal(model.weight.detach(), mine)
    return moved, counted, mine.numpy(), average.numpy()


def test_skipped_steps_send_nothing_and_evaluation_takes_the_mean():
    results = run_ranks(lonely_run, 3, None, None)
    total = torch.zeros(3, 5)
    for rank, (moved, sent, mine, _) in enumerate(results):
        assert sent == 0
        assert moved == pytest.approx(-0.1 * 2 * (rank + 1), rel=1e-5)  # the rank's own gradient
        total += torch.from_numpy(mine)
    for _, _, _, average in results:
        assert (average == (total / 3).numpy()).all()


def test_a_gradient_that_is_not_finite_counts_as_nothing():
    results = run_ranks(lonely_run, 2, 1, None)
    moved = results[1][0]
    assert (moved[:, 0] == 0).all()
    assert moved[:, 1:] == pytest.approx(-0.1 * 4, rel=1e-5)


def test_a_skipped_step_is_clipped_by_the_ranks_own_norm():
    for moved, *_ in run_ranks(lonely_run, 2, None, 1e-3):
        assert abs(moved).max() < 1e-4


class OnGpu(Tensor):
    """A tensor of the host that passes for one of a GPU."""

    is_cuda = True


class BeforeTheCopy:
    """gloo's work on tensors of a GPU: the future is there before the copy to the GPU is. Who waits for the work has both."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self.stale = sent.clone()
        dist.all_reduce(sent.as_subclass(Tensor), group=group)

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([self.stale])
        return future


def averaged_on_a_gpu(rank: int, world: int, wire: torch.dtype) -> Tensor:
    ddp = DistributedDataParallel(nn.Linear(4, 1))
    connection = attach(ddp, birder.AdamW(ddp.parameters()))
    buffer = values(rank, 8).as_subclass(OnGpu)

    def all_reduce(sent: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> BeforeTheCopy | None:
        work = BeforeTheCopy(sent, group)
        return work if async_op else None

    kept, attachment.dist = attachment.dist, SimpleNamespace(all_reduce=all_reduce)  # type: ignore[assignment]
    try:
        return connection.all_reduce_mean(buffer, 0, wire).then(lambda f: f.value().clone()).value().as_subclass(Tensor)
    finally:
        attachment.dist = kept


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_a_mean_over_gloo_is_on_the_gpu_before_any_callback_reads_it(wire):
    """Gradients of no optimizer of ours were put back from a copy that was still under way, and differed between ranks."""
    expected = sum((values(rank, 8) / 2).to(wire).float() for rank in range(2))
    for got in run_ranks(averaged_on_a_gpu, 2, wire):
        assert torch.allclose(got, expected, rtol=1e-2)
