"""Sigma-delta Adam on one process: its schedule, its arguments, coordinates without gradient, what is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from birder import SigmaDeltaAdam
from birder.comm import Topology
from birder.comm.runtime import OwnTurn, lockstep
from birder.comm.virtual import communicators
from birder.optim.sigma_delta import last_shared


def test_v_is_shared_in_steps_that_grow_by_a_tenth() -> None:
    shared = [step for step in range(1, 2001) if last_shared(step, 1.1) == step]
    assert shared[:24] == [*range(1, 21), 22, 24, 26, 28]
    assert len(shared) == 70
    assert sum(last_shared(step, 1.1) == step for step in range(1, 100_001)) == 111
    assert [step for step in range(1, 40) if last_shared(step, 2.0) == step] == [1, 2, 4, 8, 16, 32]
    assert all(last_shared(step, 1.0) == step for step in (1, 7, 10**6))
    assert all(
        last_shared(step, 1.3) == max(k for k in range(1, step + 1) if last_shared(k, 1.3) == k)
        for step in range(1, 99)
    )


def test_the_schedule_does_not_depend_on_what_was_asked_before() -> None:
    late = last_shared(10**7 + 3, 1.07)
    assert last_shared(5, 1.07) == 5
    assert last_shared(10**7 + 3, 1.07) == late <= 10**7 + 3


@pytest.mark.parametrize(
    "options", [{}, {"variance": "shared"}, {"variance": "local"}, {"reduce": "one_phase"}, {"errors": "int8"}]
)
def test_a_coordinate_moves_from_the_step_of_its_first_gradient(options: dict[str, Any]) -> None:
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = SigmaDeltaAdam([p], lr=1.0, **options)
    for step in range(1, 6):
        p.grad = torch.zeros(40)
        p.grad[step] = 1.0
        before = p.detach().clone()
        optimizer.step()
        assert p[step] != 0
        assert (p[step + 1 :] == 0).all()
        assert p[0] == 0
        assert ((p - before).abs()[1 : step + 1] == 1).all()  # exactly lr


@pytest.mark.parametrize("options", [{}, {"reduce": "one_phase"}, {"errors": "int8"}])
def test_a_parameter_without_gradient_stays_with_all_of_its_state(options: dict[str, Any]) -> None:
    p, q = (torch.nn.Parameter(torch.zeros(64)) for _ in range(2))
    optimizer = SigmaDeltaAdam([p, q], lr=0.1, weight_decay=0.1, **options)
    for step in range(1, 7):
        p.grad = torch.ones(64)
        q.grad = torch.ones(64) if step < 3 else None
        before = q.detach().clone(), [t.clone() for t in states(optimizer, q)] if step > 1 else [], p.detach().clone()
        optimizer.step()
        if step >= 3:
            assert torch.equal(q, before[0])
            assert all(torch.equal(a, b) for a, b in zip(states(optimizer, q), before[1], strict=True))
        assert (p != before[2]).all()


def states(optimizer: SigmaDeltaAdam, p: torch.Tensor) -> list[torch.Tensor]:
    """What is kept of one parameter."""
    (unit,) = optimizer.units
    i = next(i for i, whole in enumerate(unit.wholes) if whole is p)
    return [unit.view(tensor, i) for tensor in unit.state.values()]


def test_what_is_not_finite_counts_as_0() -> None:
    clean, spoilt = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
    first, second = SigmaDeltaAdam([clean], lr=0.1), SigmaDeltaAdam([spoilt], lr=0.1)
    for step in range(1, 6):
        g = torch.randn(64, generator=torch.Generator().manual_seed(step))
        clean.grad, spoilt.grad = g.clone(), g.clone()
        clean.grad[step], spoilt.grad[step] = 0.0, [float("nan"), float("inf")][step % 2]
        first.step()
        second.step()
    assert torch.equal(clean, spoilt)


@pytest.mark.parametrize(
    "options",
    [{}, {"variance": "shared"}, {"variance": "local"}, {"reduce": "one_phase"}, {"errors": "int8"}, {"gamma": 1.0}],
)
def test_it_follows_adam(options: dict[str, Any]) -> None:
    """On one worker the whole run is off Adam's clipped path by a few steps of lr, whatever its length."""
    x, y = (torch.nn.Parameter(torch.zeros(500)) for _ in range(2))
    target = torch.randn(500, generator=torch.Generator().manual_seed(0))
    ours, adam = SigmaDeltaAdam([x], lr=0.01, **options), torch.optim.Adam([y], lr=0.01)
    for p, optimizer in ((x, ours), (y, adam)):
        for _ in range(600):
            optimizer.zero_grad()
            (p - target).square().sum().backward()
            optimizer.step()
    assert (x - y).abs().max() < 0.06
    assert (x - target).abs().mean() < 0.06


def together(optimizers: list[SigmaDeltaAdam], signal: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Trains workers whose gradients are a signal and noise of their own. Yields the mean gradient before each step."""
    comms = communicators(Topology(len(optimizers), 1), False)
    for optimizer, comm in zip(optimizers, comms, strict=True):
        optimizer.bind(comm, OwnTurn())
    noise = torch.Generator().manual_seed(0)
    for _ in range(steps):
        grads = [signal + torch.randn(len(signal), generator=noise) for _ in optimizers]
        for optimizer, grad in zip(optimizers, grads, strict=True):
            optimizer.param_groups[0]["params"][0].grad = grad
        yield torch.stack(grads).mean(0)
        with torch.no_grad():
            lockstep(comms, [optimizer.stepping() for optimizer in optimizers], lambda rank: None)


def test_the_variance_of_the_mean_gradient_is_found_without_sending_it() -> None:
    """From no signal to ten times the noise."""
    workers, d = 4, 4096
    signals = torch.tensor([0.0, 0.1, 1.0, 10.0])
    params = [torch.nn.Parameter(torch.zeros(d)) for _ in range(workers)]
    optimizers = [SigmaDeltaAdam([p], lr=0.0, betas=(0.9, 0.99), share_growth=1.0) for p in params]
    for _ in together(optimizers, signals.repeat_interleave(d // 4), 400):
        pass
    found = optimizers[0].units[0].state["shared_v"][:d].view(4, -1).mean(1) / (1 - 0.99**400)
    assert torch.allclose(found, signals.square() + 1 / workers, rtol=0.1)
    assert all(torch.equal(o.units[0].state["shared_v"], optimizers[0].units[0].state["shared_v"]) for o in optimizers)


def test_with_many_workers_a_bit_has_room_for_their_noise() -> None:
    """A worker's noise is five times the signal: the mean of 32 goes Adam's way, a vote of them half as far."""
    workers, d, steps = 32, 256, 100

    def behind(**options: float) -> float:
        """The share of Adam's way that is missing."""
        params = [torch.nn.Parameter(torch.zeros(d)) for _ in range(workers + 1)]
        adam = torch.optim.Adam(params[-1:], lr=0.01)
        for mean in together(
            [SigmaDeltaAdam([p], lr=0.01, **options) for p in params[:-1]], torch.full((d,), 0.2), steps
        ):
            params[-1].grad = mean
            adam.step()
        assert all(torch.equal(p, params[0]) for p in params[1:-1])
        return 1 - float((params[0].mean() / params[-1].mean()).detach())

    assert abs(behind()) < 0.1
    assert behind(full_scale=1.0) > 0.3
