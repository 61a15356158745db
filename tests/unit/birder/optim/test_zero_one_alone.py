"""0/1 Adam of one worker, and its schedule: what no other rank is needed for."""

from __future__ import annotations

import pytest
import torch

from birder import Plan, ZeroOneAdam
from birder.optim import zero_one_schedule as schedule
from tests.distributed.test_zero_one_adam import VARIANTS
from tests.helpers.reference_zero_one_adam import ZeroOneAdam as Reference

# ---- one process ---------------------------------------------------------------------------------------------------------


def lonely(size: int, lr: float = 0.01, **options) -> tuple[torch.nn.Parameter, ZeroOneAdam]:
    x = torch.nn.Parameter(torch.zeros(size))
    return x, ZeroOneAdam([x], lr, **{"warmup_steps": 8, "kappa": 2, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_coordinate_joins_after_its_first_variance_round(variant):
    x, optimizer = lonely(96, eps=1e-2, variant=variant)
    rounds = sorted(schedule.variance_steps(8, 2, variant == "deepspeed"))
    assert rounds == ([1, 2, 4, 6, 8] if variant == "deepspeed" else [1, 2, 3, 5, 7])
    # Coordinate 0 from the start; 1 from step 4 on; 2 only after the freeze; 3 never.
    moved: dict[int, int] = {}
    for step in range(1, 31):
        x.grad = torch.zeros(96)
        x.grad[0] = 1.0
        x.grad[1] = float(step >= 4)
        x.grad[2] = float(step > 8)
        before = x.detach().clone()
        optimizer.step()
        for i in (x.detach() != before).nonzero().flatten().tolist():
            moved.setdefault(i, step)
    # paper: the model moves before the variance is refreshed. deepspeed: after it.
    assert moved == ({0: 1, 1: 4} if variant == "deepspeed" else {0: 2, 1: 6})


@pytest.mark.parametrize(("warmup", "kappa", "rounds", "times"), [(12_500, 16, 153, 2.7), (41, 4, 14, 8.5)])
def test_steps_are_larger_than_adams_by_the_bias_of_the_variance(warmup, kappa, rounds, times):
    """What the docstring tells of k rounds, for a gradient of 1, whose variance is 1."""
    assert len(schedule.variance_steps(warmup, kappa)) == rounds
    x, optimizer = lonely(
        64, lr=1.0, warmup_steps=rounds, kappa=rounds, local_limit=1
    )  # the same rounds, one after the other
    for step in range(rounds + 200):
        if step == rounds + 199:
            x.data.zero_()
        x.grad = torch.ones(64)
        optimizer.step()
    assert torch.allclose(-x, torch.full((64,), times), atol=0.05)


def test_what_was_not_sent_is_kept():
    """sum of what was applied + errors = sum of the buffers: with v frozen, over syncs of every interval."""
    x, optimizer = lonely(256, lr=0.1, warmup_steps=4, local_doubling=10, local_limit=4)
    buffers = torch.zeros(256, dtype=torch.float64)
    original = optimizer.onebit_mean

    def recorded(unit, message):
        buffers.add_(message)
        return original(unit, message)

    generator = torch.Generator().manual_seed(1)
    for step in range(1, 61):
        x.grad = torch.randn(256, generator=generator) + 0.5
        if step == 5:
            state = optimizer.units[0].state
            errors = state["worker_error"].double() + state["server_error"].double()
            start = x.detach().double()
            optimizer.onebit_mean = recorded
        optimizer.step()
        if step > 5 and optimizer.synced(step):
            applied = (start - x.detach().double()) * (state["v"].double().sqrt() + 1e-8)
            left = state["worker_error"].double() + state["server_error"].double() - errors
            # fp32 rounding of x, 60 times, times the denominator.
            assert torch.allclose(applied + left, buffers, rtol=0, atol=1e-4)
    assert buffers.abs().max() > 0.1


def test_steps_without_learning_rate_change_nothing_but_the_variance():
    x, optimizer = lonely(64)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        x.grad = torch.ones(64)
        optimizer.step()
    state = optimizer.units[0].state
    assert (x == 0).all()
    assert (state["m"] == 0).all()
    assert (state["v"] > 0).all()


def test_a_layer_that_joins_again_brings_no_rates_of_another_interval():
    """What is divided by their sum became too large: the momentum of all layers of its unit grew."""
    first, second = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
    optimizer = ZeroOneAdam([first, second], 0.5, warmup_steps=2, local_doubling=1, local_limit=8)
    for step in range(1, 31):
        if step in (17, 28):  # three steps after a synchronisation, and six after another one
            first.requires_grad_(step == 28)
            optimizer.bind()
        for p in (first, second):
            p.grad = torch.ones(64) if p.requires_grad else None
        optimizer.step()
        state = optimizer.units[0].state
        if optimizer.synced(step):
            assert state["m"].max() < 1.5
            begun = step
        elif step > 16:
            assert state["sums"][0] == 0.5 * (step - begun)


def test_it_converges():
    for variant in VARIANTS:
        torch.manual_seed(0)
        target = torch.randn(1000)
        options = {"warmup_steps": 60, "kappa": 16, "local_doubling": 80, "local_limit": 4}
        x, optimizer = lonely(1000, eps=1e-2, variant=variant, **options)
        for step in range(600):
            optimizer.param_groups[0]["lr"] = 0.02 * min(1, step / 60) * 0.5 ** (max(0, step - 60) / 80)
            x.grad = x.detach() - target
            optimizer.step()
        assert (x - target).abs().mean() < 0.1  # 0.8 at the start, 0.04 at the end


@pytest.mark.parametrize("aligned", [False, True])
def test_the_schedule_by_counting(aligned):
    """Closed forms against the reference's counters, with a limit that is no power of two as well."""
    for warmup, kappa, doubling, limit in ((12, 3, 11, 4), (40, 1, 7, 16), (1, 1, 1, 16), (9, 16, 5, 6), (7, 2, 3, 1)):
        oracle = Reference(
            torch.zeros(1), 1, warmup=warmup, kappa=kappa, doubling=doubling, limit=limit, deepspeed=aligned
        )
        for step in range(1, 200):
            oracle.steps = step
            oracle.rounds_now()
            assert oracle.had["variance"] == (step in schedule.variance_steps(warmup, kappa, aligned))
            assert oracle.had["sync"] == schedule.sync(step, warmup, doubling, limit, aligned), (step, warmup)


def test_the_plan_is_a_function_of_the_step_alone():
    _, optimizer = lonely(1, local_doubling=4, local_limit=4)
    plans = [optimizer.plan(t) for t in range(1, 40)]
    assert plans == [optimizer.plan(t) for t in range(39, 0, -1)][::-1]
    assert plans[:12] == [Plan.COMPRESSED] * 12
    assert {Plan.SKIP, Plan.COMPRESSED} == set(plans[12:])


@pytest.mark.parametrize("loaded", [False, True])
def test_a_layer_that_is_unfrozen_between_two_syncs_goes_on_from_where_it_is(loaded: bool) -> None:
    """The next sync put back what it was before it was frozen."""
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(64)) for _ in range(2))
    options = {"warmup_steps": 20, "local_doubling": 4, "local_limit": 8}
    optimizer = ZeroOneAdam([a, b], lr=1e-3, eps=1e-2, **options)

    def step() -> None:
        for p in (a, b):
            p.grad = p.detach() + 3 * torch.randn(64) if p.requires_grad else None
        optimizer.step()

    while optimizer.steps < 60 or not optimizer.synced(optimizer.steps):
        step()
    b.requires_grad_(False)
    b.grad = None
    optimizer.bind()
    if loaded:
        b.data.fill_(5.0)
    for _ in range(3):
        step()
    b.requires_grad_(True)
    optimizer.bind()
    begun, other = b.detach().clone(), a.detach().clone()

    def to_the_sync() -> None:
        step()
        while not optimizer.synced(optimizer.steps):
            step()

    with pytest.warns(RuntimeWarning, match="parameters were changed between two synchronisations"):
        to_the_sync()
    assert float((b.detach() - begun).abs().mean()) < 2 * float((a.detach() - other).abs().mean())


@pytest.mark.parametrize(("decay", "eps"), [(0.0, 1e-3), (2.0, 1e3)], ids=["steps", "decay"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_a_script_adds_within_an_interval_stays_and_decays_in_each_step_after_it(decay: float, eps: float) -> None:
    """With the same gradients nothing else differs. With the large eps all else is too small to matter."""
    ends = []
    for added in (0.0, 1.0):
        options = {"warmup_steps": 2, "local_doubling": 1, "local_limit": 4}
        x, optimizer = lonely(64, lr=0.1, weight_decay=decay, eps=eps, **options)
        since = -1
        for step in range(1, 40):
            x.grad = torch.full((64,), 1.0 + step % 3)
            optimizer.step()
            since += since >= 0
            if since > 0 and optimizer.synced(step):
                break
            if since < 0 and step > 20 and optimizer.synced(step - 1):  # the first local step of four is over
                since = 0
                x.data.add_(added)
        ends.append(x.detach().clone())
    assert since == 3
    expected = torch.full((64,), (1 - 0.1 * decay) ** since)
    torch.testing.assert_close(ends[1] - ends[0], expected, rtol=0, atol=1e-3 if decay else 1e-5)
