"""Behind DDP with other numbers: loss scaling, clipped norms, autocast."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import Birder, OneBitAdam, attach
from birder.hooks.attachment import all_finite
from tests.distributed.test_ddp import wrap
from tests.helpers import toy
from tests.helpers.ranks import run_ranks


def scaled(rank: int, world: int, kind: str) -> dict:
    """A GradScaler, with an overflow on rank 1 alone in step 4."""
    model = toy.make()
    ddp = wrap(model)
    if kind == "birder":
        optimizer = Birder(model.parameters(), lr=0.01)
    else:
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup_steps=2)
    attach(ddp, optimizer, overlap=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales, taken = [], []
    for step in range(1, 8):
        optimizer.zero_grad()
        loss = scaler.scale(toy.loss(ddp, rank, step))
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        before = [{k: v.clone() for k, v in u.state.items()} for u in optimizer.units]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        taken.append(optimizer.steps)
        if step == 4:
            kept = all(torch.equal(v, b[k]) for u, b in zip(optimizer.units, before) for k, v in u.state.items())
    return {"x": toy.flat(model).numpy(), "scales": scales, "taken": taken, "kept": kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_element_that_is_no_number_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    for size in (1, 7, 1001):
        for bad in (float("nan"), float("inf"), float("-inf")):
            for at in {0, size // 2, size - 1}:
                values = torch.full((size,), limit, dtype=dtype)
                values[::2] = -limit
                assert all_finite(values)
                values[at] = bad
                assert not all_finite(values)
    assert all_finite(torch.zeros(0, dtype=dtype))


@pytest.mark.parametrize("kind", ["birder", "onebit"])
def test_overflow_on_one_rank_skips_the_step_on_all(kind):
    a, b, c = run_ranks(scaled, 3, kind)
    assert a["taken"] == b["taken"] == c["taken"] == [1, 2, 3, 3, 4, 5, 6]
    assert a["scales"] == b["scales"] == c["scales"]
    assert a["scales"][3] == a["scales"][2] / 2
    assert a["kept"]
    assert b["kept"]
    assert (a["x"] == b["x"]).all()
    assert (a["x"] == c["x"]).all()


def passes_of_each_rank(rank: int, world: int) -> float:
    """Ranks accumulate over other numbers of passes, and the first steps are skipped on all."""
    model = toy.make()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = Birder(model.parameters(), lr=0.01)
    attach(ddp, optimizer, overlap=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for step in range(1, 4):
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(1 + rank):
                scaler.scale(8 * toy.loss(ddp, rank, step)).backward()
        scaler.scale(8 * toy.loss(ddp, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def test_ranks_with_other_numbers_of_passes_do_not_wait_when_the_first_step_is_skipped() -> None:
    one, other = run_ranks(passes_of_each_rank, 2)
    assert one == other <= 2.0**126


def scaler_untold(rank: int, world: int) -> str:
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(model.parameters(), lr=0.01)
    attach(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(toy.loss(ddp, rank, 1)).backward()
    try:
        scaler.step(optimizer)
    except RuntimeError as e:
        return str(e)
    return ""


def test_a_scaler_with_messages_taken_in_backward_is_refused():
    assert all("overlap=False" in said for said in run_ranks(scaler_untold, 2))


def clipped(rank: int, world: int, limit: float | None) -> tuple:
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(model.parameters(), lr=0.01, max_grad_norm=limit)
    attach(ddp, optimizer, unit_mb=0.0008)  # several units
    toy.loss(ddp, rank, 1).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.step()
    total_m = sum(float(u.state["m"].square().sum()) for u in optimizer.units) ** 0.5
    return norm, total_m / 0.05, toy.flat(model).numpy()


def test_max_grad_norm_scales_every_rank_by_one_factor():
    free, tight = run_ranks(clipped, 2, None), run_ranks(clipped, 2, 0.1)
    rms = ((free[0][0] ** 2 + free[1][0] ** 2) / 2) ** 0.5
    for (norm, m, _), (_, m_clipped, x) in zip(free, tight, strict=True):
        assert m == pytest.approx(norm, rel=1e-4)
        assert m_clipped == pytest.approx(norm * 0.1 / rms, rel=1e-4)
        assert (x == tight[0][2]).all()


def precision(rank: int, world: int) -> tuple:
    model = toy.make()
    ddp = wrap(model)
    optimizer = Birder(model.parameters(), lr=0.003)
    attach(ddp, optimizer)
    losses = []
    for step in range(1, 61):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = toy.loss(ddp, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return toy.flat(model).numpy(), sum(losses[:10]), sum(losses[-10:])


def test_bf16_autocast_trains():
    (x, first, last), (y, _, _) = run_ranks(precision, 2)
    assert (x == y).all()
    assert last < first
