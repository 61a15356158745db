"""1-bit LAMB of one worker: what no other rank is needed for."""

from __future__ import annotations

import copy

import pytest
import torch

from birder import LAMB, OneBitAdam, OneBitLAMB
from birder.optim.onebit import OneBitMethod
from tests.helpers import toy


def alone(*params: torch.nn.Parameter, **options) -> OneBitLAMB:
    return OneBitLAMB(params, 0.01, **{"warmup_steps": 5, **options})


def grads(step: int, size: int, length: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step)) * length


def test_tensors_are_scaled_to_one_size_before_they_share_a_message() -> None:
    lengths = (1e-4, 1.0, 30.0)
    params = [torch.nn.Parameter(grads(50 + k, 200 + 31 * k)) for k in range(3)]
    optimizer = alone(*params)
    for step in range(1, 6):
        for k, p in enumerate(params):
            p.grad = grads(step * 10 + k, p.numel(), lengths[k])
        optimizer.step()
    (unit,) = optimizer.units
    rms = [float(m.square().mean().sqrt()) for m in unit.views(unit.state["m"])]
    scaled = [a * float(s) for a, s in zip(rms, unit.state["scale"], strict=True)]
    assert scaled == pytest.approx([sum(rms) / 3] * 3, rel=1e-5)
    assert max(rms) > 1e5 * min(rms)


@pytest.mark.parametrize("kind", ["never used", "used long ago"])
def test_a_tensor_without_momentum_at_the_freeze_stays_and_spoils_nothing(kind: str) -> None:
    """Its scale would be infinite, and every message of its unit with it."""

    def run(*params: torch.nn.Parameter) -> list[torch.Tensor]:
        optimizer = alone(*params)
        frozen = params
        for step in range(1, 21):
            params[0].grad = grads(step, 64)
            if params[1:]:
                quiet = step == 5 or kind == "never used"  # a first gradient after the freeze would be refused
                params[1].grad = torch.zeros(40) if quiet else grads(step + 100, 40)
            if step == 5 and kind == "used long ago" and params[1:]:
                (unit,) = optimizer.units
                unit.view(unit.state["m"], 0).fill_(1e-30)  # the last parameter is the first of its unit
            optimizer.step()
            if step == 5:
                frozen = tuple(p.detach().clone() for p in params)
        return [*(p.detach() for p in params), *frozen]

    alone_end, _ = run(torch.nn.Parameter(torch.ones(64)))
    end, idle, _, idle_before = run(torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.full((40,), 2.0)))
    assert torch.equal(idle, idle_before)
    assert torch.equal(end, alone_end)


def test_before_the_freeze_it_is_lamb() -> None:
    """One worker's warm-up, bit for bit LAMB with the same bounds and without bias correction."""
    bounds = {"min_coeff": 0.01, "max_coeff": 0.3, "eps": 1e-8, "weight_decay": 0.02}
    lamb = toy.trained(lambda p: LAMB(p, 0.01, bias_correction=False, **bounds), 15)
    warm_up = toy.trained(lambda p: OneBitLAMB(p, 0.01, warmup_steps=15, **bounds), 15)
    assert torch.equal(lamb, warm_up)


def test_the_loss_falls_on_in_the_compressed_stage() -> None:
    p = torch.nn.Parameter(grads(1, 500))
    target = grads(2, 500)
    optimizer = OneBitLAMB([p], 0.05, warmup_steps=40)
    losses = []
    for step in range(1, 201):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 201)
        optimizer.zero_grad()
        loss = (p - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[39] / 10


@pytest.mark.parametrize("bounds", [{"max_coeff": 1.0}, {"min_coeff": 1.0, "max_coeff": 2.0}])
def test_a_bound_of_1_is_refused(bounds: dict[str, float]) -> None:
    """Ratios that it holds at 1 would be left out of their average, and the tensor would not move after the warm-up."""
    with pytest.raises(ValueError, match="_coeff must be another number than 1"):
        alone(torch.nn.Parameter(torch.ones(4)), **bounds)


@pytest.mark.parametrize("method", [OneBitAdam, OneBitLAMB])
@pytest.mark.parametrize(("saved", "present", "counts"), [(3, 8, 3), (5, 8, 5), (8, 3, 6), (8, 5, 6), (8, 9, 9)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_saved_variance_has_had_the_warm_up_that_it_has_had(
    method: type[OneBitMethod], saved: int, present: int, counts: int
) -> None:
    """Saved after step 5. 1-bit LAMB would never move again where it had no last step of the warm-up."""

    def trained(warmup: int, state: dict | None = None) -> tuple[OneBitMethod, torch.Tensor]:
        p = torch.nn.Parameter(grads(0, 64) if state is None else start.clone())
        optimizer = method([p], lr=0.01, warmup_steps=warmup)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(optimizer.steps + 1, optimizer.steps + 6):
            p.grad = grads(step, 64)
            optimizer.step()
        return optimizer, p.detach()

    first, start = trained(saved)
    state = copy.deepcopy(first.state_dict())
    resumed, end = trained(present, state)
    assert resumed.warmup_steps == counts
    assert torch.equal(end, trained(counts, state)[1])
    assert not torch.equal(end, start)


def test_a_tensor_that_has_no_gradient_in_the_last_step_of_the_warm_up_moves_after_it() -> None:
    """What is frozen then is of all tensors: its scale and its fresh variance are not those of before."""
    p, q = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizer = OneBitLAMB([p, q], lr=0.01, warmup_steps=4)
    for step in range(1, 7):
        p.grad, q.grad = grads(step, 64), None if step == 4 else grads(step + 100, 64)
        before = q.detach().clone()
        optimizer.step()
        assert torch.equal(q, before) is (step == 4)
    state = optimizer.units[0].state
    assert (state["scale"] > 0).all()
    assert (optimizer.units[0].view(state["fresh"], 0) > 0).all()
