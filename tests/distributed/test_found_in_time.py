"""What a script does in few steps, or on one rank, is found before long: masks by .data, rates from p.grad, late rows."""

from __future__ import annotations

import contextlib
import gc
import warnings
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from birder.optim.watch import FIRST, ONE_OF, looked_at
from tests.helpers.ordinary import said
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.waiting import until

WARMUP, LATE = 5, 10
METHODS: dict[str, dict[str, Any]] = {
    "Birder": {},
    "SigmaDeltaAdam": {},
    "OneBitAdam": {"warmup_steps": WARMUP},
    "OneBitLAMB": {"warmup_steps": WARMUP},
    "ZeroOneAdam": {"warmup_steps": WARMUP},
}


def rates(rank: int, world: int, overlap: bool) -> dict[str, tuple[str, int]]:
    """lr by the norm of p.grad, after backward."""
    found = {}
    for name, options in METHODS.items():
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        optimizer = getattr(birder, name)(model.parameters(), lr=0.05, **options)
        ddp = DistributedDataParallel(model)
        attachment = attach(ddp, optimizer, overlap=overlap)
        random, error = torch.Generator().manual_seed(rank), ""
        for _ in range(3 * ONE_OF):
            optimizer.zero_grad()
            ddp(torch.randn(16, 8, generator=random)).square().mean().backward()
            assert model.weight.grad is not None
            optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, 0.1 / float(model.weight.grad.norm()))
            try:
                optimizer.step()
            except RuntimeError as e:
                error = str(e)
                break
        found[name] = error, optimizer.steps
        if not error:
            attachment.close()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_a_learning_rate_computed_from_each_ranks_own_gradient_is_refused_on_all_ranks(overlap: bool) -> None:
    """Ranks drifted apart without a word."""
    first, second = run_ranks(rates, 2, overlap)
    assert first == second
    for name, (error, steps) in first.items():
        lr_read_early = overlap and "lr changed between backward and step()" in error
        assert lr_read_early or error.startswith("ranks have other values of lr: a loss and"), (name, error)
        assert steps <= (WARMUP if name.startswith(("One", "Zero")) else 0), name


def lowered_once(rank: int, world: int, name: str, overlap: bool) -> tuple[str, int]:
    """A guard against spikes: in one late step, whose gradient is large on rank 1 alone, the rate is a tenth."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = getattr(birder, name)(model.parameters(), lr=0.05, **METHODS[name] | OTHERS.get(name, {}))
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer, overlap=overlap)
    random = torch.Generator().manual_seed(rank)
    for step in range(1, SPIKE + 10):
        optimizer.zero_grad()
        scale = 100.0 if (rank, step) == (1, SPIKE) else 1.0
        (ddp(torch.randn(16, 8, generator=random)) * scale).square().mean().backward()
        spike = float(model.weight.grad.norm()) > 50  # type: ignore[union-attr]
        optimizer.param_groups[0]["lr"] = 0.005 if spike else 0.05
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error), step
    return "", 0


SPIKE = 23
"""No step in which ranks looked at rates when they did so in some steps alone."""
OTHERS: dict[str, dict[str, Any]] = {"ZeroOneAdam": {"local_doubling": 1, "local_limit": 4}}


@pytest.mark.parametrize(
    ("name", "overlap"), [("Birder", True), ("OneBitAdam", True), ("Birder", False), ("ZeroOneAdam", False)]
)
def test_a_rate_that_differs_in_one_step_alone_is_refused(name: str, overlap: bool) -> None:
    """Replicas stayed apart for good, without a word. Where ranks do not meet in that step, they say so when they do."""
    first, second = run_ranks(lowered_once, 2, name, overlap)
    for error, step in (first, second):
        assert error.startswith("ranks have other values of lr:"), error
        assert SPIKE <= step <= SPIKE + (4 if name == "ZeroOneAdam" else 0)


def apart_in_a_later_group(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = birder.Birder([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}], lr=0.05)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    ddp(torch.ones(2, 8)).square().mean().backward()
    optimizer.param_groups[1]["lr"] *= 1 + rank
    return said(optimizer.step)


def test_a_rate_of_a_later_group_that_ranks_differ_in_is_refused() -> None:
    for error in run_ranks(apart_in_a_later_group, 2):
        assert error.startswith("ranks have other values of lr:"), error


def apart_in_a_local_step(rank: int, world: int) -> tuple[str, int]:
    """The step of what is said, where ranks have other rates in the second of four steps alone."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = birder.QSparseLocalSGD(model.parameters(), lr=1e-3, sync_every=4, block=8)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    for step in range(1, 9):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 5e-4 if (rank, step) == (1, 2) else 1e-3
        ddp(torch.ones(2, 8)).square().mean().backward()
        if line := said(optimizer.step):
            return line, step
    return "", 0


def test_a_rate_that_differs_in_a_local_step_alone_is_refused_when_ranks_meet() -> None:
    for error, step in run_ranks(apart_in_a_local_step, 2):
        assert error.startswith("ranks have other values of lr:"), error
        assert step == 4


@pytest.mark.parametrize("rows", [20, 5])
@pytest.mark.parametrize("name", ["AdamW", "Birder", "SGDM", "torch"])
def test_parameters_of_another_shape_are_refused(name: str, rows: int) -> None:
    """torch raises too. AdamW wrote beyond its state, or past a shorter one in silence."""
    model = nn.Linear(4, 9)
    make = torch.optim.AdamW if name == "torch" else getattr(birder, name)
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(2):
        if step:
            model.weight.data, model.bias.data = torch.randn(rows, 4), torch.randn(rows)
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"size of tensor|of shape \(9") if step else contextlib.nullcontext():
            optimizer.step()


def used() -> int:
    """Threads and open files."""
    return psutil.Process().num_threads() + psutil.Process().num_fds()


def wrapped_often(rank: int, world: int) -> None:
    """Models that are dropped without close(). What the first two have left is as much as there may be."""
    for number in range(6):
        model = nn.Linear(8, 3)
        optimizer = birder.Birder(model.parameters(), lr=0.05)
        ddp = DistributedDataParallel(model)
        attach(ddp, optimizer)
        ddp(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        del model, optimizer, ddp
        gc.collect()
        if number == 1:
            most = used() + 1
    until(lambda: used() <= most, used)  # what ends may need a moment


def test_models_that_are_dropped_leave_no_threads_and_no_connections() -> None:
    run_ranks(wrapped_often, 2)


def left_alone(rank: int, world: int, overlap: bool) -> str:
    """Rank 1 leaves its loop because its own gradient is small. Only messages of attachments are waited for so shortly."""
    dist.init_process_group("gloo")
    store, default = dist.distributed_c10d._get_default_store(), dist.distributed_c10d._get_default_group()
    default._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=15)
    model = nn.Linear(8, 3)
    optimizer = birder.Birder(model.parameters(), lr=0.05)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer, overlap=overlap)
    for step in range(1, 6):
        ddp(torch.ones(4, 8) * (0.0 if (rank, step) == (1, 3) else 1.0)).square().mean().backward()
        if float(model.weight.grad.norm()) < 1e-9:  # type: ignore[union-attr]
            store.wait(["said"])
            store.set("heard", "")
            return "left"
        try:
            optimizer.step()
        except RuntimeError as error:
            store.set("said", "")
            store.wait(["heard"])  # the store ends with this process
            return str(error)
        optimizer.zero_grad()
    return "never"


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_waits_for_a_rank_that_has_left_says_so(overlap: bool) -> None:
    """torch's message was of a receive operation."""
    waited, left = fresh_world(left_alone, 2, overlap, grouped=False)
    assert left == "left"
    assert waited.startswith("other ranks did not come to step 3 in time")


def masked(rank: int, world: int, name: str) -> int:
    """In odd steps from LATE on a column's gradient is set to 0. The step of the refusal."""
    torch.manual_seed(0)
    model = nn.Embedding(1000, 16)
    optimizer = getattr(birder, name)(model.parameters(), lr=0.05, **METHODS[name])
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    random = torch.Generator().manual_seed(rank)
    for step in range(1, 8 * ONE_OF):
        optimizer.zero_grad()
        ddp(torch.randint(0, 50, (64,), generator=random)).sub(1).square().sum().backward()
        if step >= LATE and step % 2:
            model.weight.grad.data[:, 5] = 0  # type: ignore[union-attr]
        try:
            optimizer.step()
        except RuntimeError as error:
            return step if "gradients were changed after backward" in str(error) else 0
    return 0


def one_of_three(rank: int, world: int) -> list[str]:
    """What is said where one element of a gradient of odd length is changed, by its place."""
    found = []
    for place in range(3):
        model = nn.Linear(3, 1, bias=False)
        ddp, optimizer = DistributedDataParallel(model), birder.Birder(model.parameters())
        attach(ddp, optimizer)
        ddp(torch.ones(2, 3)).sum().backward()
        model.weight.grad.data[0, place] += 1  # type: ignore[union-attr]
        found.append(said(optimizer.step))
    return found


def test_a_change_of_any_element_is_found() -> None:
    (found,) = run_ranks(one_of_three, 1)
    assert ["gradients were changed after backward" in line for line in found] == [True] * 3


@pytest.mark.parametrize("name", ["Birder", "OneBitAdam"])
def test_a_mask_that_begins_late_and_comes_every_other_step_is_found(name: str) -> None:
    """Whole looks were at every sixteenth step, and samples at the same places."""
    assert all(LATE < step <= 3 * ONE_OF for step in run_ranks(masked, 2, name))


def test_no_period_of_a_script_escapes() -> None:
    seen = [t for t in range(FIRST + 1, 200 * ONE_OF) if looked_at(t)]
    assert len(seen) == pytest.approx(200, rel=0.1)
    for period in range(2, 33):
        assert {t % period for t in seen} == set(range(period))


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_a_frozen_variance_keeps_from_moving_are_warned_of(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(40, 8)
    before = model.weight.detach().clone()
    optimizer = getattr(birder, name)(model.parameters(), lr=0.01, **METHODS[name])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4 * ONE_OF):
            optimizer.zero_grad()
            ids = torch.randint(0, 20, (64,)) + (20 if step >= 2 * WARMUP else 0)
            model(ids).sub(1).square().mean().backward()
            optimizer.step()
    moved = bool((model.weight.detach() - before)[20:].any())
    warned = [str(w.message) for w in said if "of the warm-up" in str(w.message)]
    assert len(warned) == (not moved)
    assert moved is (name in ("Birder", "SigmaDeltaAdam"))
