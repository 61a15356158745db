"""SLAMB's masks and ages of elements, and single workers: what no other rank is needed for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from birder import SLAMB
from birder.comm import run
from tests.distributed.test_slamb import OPTIONS
from tests.helpers import toy


def bound(form: str, unit_mb: float = 25, **options: Any) -> SLAMB:
    optimizer = SLAMB(toy.make().parameters(), **{**OPTIONS, "form": form, **options})
    optimizer.bind(unit_mb=unit_mb)
    return optimizer


def masks(optimizer: SLAMB, step: int) -> list:
    """In the order of parameters, last first, without padding."""
    return [view.clone() for u in optimizer.units for view in u.views(optimizer.mask(u, step))]


@pytest.mark.parametrize("form", ["paper", "v1"])
def test_masks_do_not_depend_on_the_size_of_units(form: str) -> None:
    whole, cut = bound(form), bound(form, 0.0008)
    assert len(whole.units) == 1 < len(cut.units)
    for step in (1, 2, 1000):
        for a, b in zip(masks(whole, step), masks(cut, step), strict=True):
            assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(masks(whole, 1), masks(bound(form, seed=1), 1), strict=True))


@pytest.mark.parametrize("form", ["paper", "v1"])
def test_staleness_counts_the_steps_since_an_element_was_sent(form: str) -> None:
    optimizer = bound(form)
    (unit,) = optimizer.units
    age = [torch.zeros(p.shape) for p in unit.params]
    for step in range(1, 31):
        run(optimizer.comm, optimizer.exchange(unit, unit.zeros(), step))
        for i, (p, mask) in enumerate(zip(unit.params, masks(optimizer, step), strict=True)):
            age[i] = torch.where(mask, 0, age[i] + 1)
            if not optimizer.is_dense(p):
                assert torch.allclose(optimizer.freshness(unit, i, step), 0.93 ** age[i], rtol=1e-6)
    oldest = max(float(a.max()) for a in age)
    assert oldest == 3 if form == "v1" else oldest > 6  # four chunks; 540 elements, each left out 3 times of 4


def test_staleness_stops_before_it_would_overflow() -> None:
    optimizer = bound("paper")
    (unit,) = optimizer.units
    tau = unit.state["tau"]
    assert tau.dtype == torch.uint8
    tau.fill_(255)
    run(optimizer.comm, optimizer.exchange(unit, unit.zeros(), 999))
    assert set(tau.tolist()) == {0, 255}
    # 8 bits would do neither for so slow a decay nor for so few elements.
    assert bound("paper", beta3=0.999, fraction=0.01).units[0].state["tau"].dtype == torch.int16


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_random_masks_hold_their_share_and_differ_from_step_to_step(fraction: float) -> None:
    x = nn.Parameter(torch.zeros(400, 250))
    optimizer = SLAMB([x], fraction=fraction)
    optimizer.bind()
    first, second = masks(optimizer, 1)[0], masks(optimizer, 2)[0]
    # Six standard deviations of 100,000 draws; false-alarm rate below 1e-8.
    for drawn, expected in ((first, fraction), (second, fraction), (first & second, fraction**2)):
        assert abs(drawn.float().mean().item() - expected) < 6 * (expected / x.numel()) ** 0.5


@pytest.mark.parametrize("chunks", [10, 300])
def test_cyclic_masks_hold_every_element_once_in_a_round(chunks: int) -> None:
    x = nn.Parameter(torch.zeros(71, 101))
    optimizer = SLAMB([x], fraction=1 / chunks, form="v1", dense_below=0)
    optimizer.bind()
    drawn = torch.stack([masks(optimizer, step)[0] for step in range(5, 5 + chunks)])
    assert (drawn.sum(0) == 1).all()
    assert set(drawn.flatten(1).sum(1).tolist()) <= {x.numel() // chunks, x.numel() // chunks + 1}
    assert torch.equal(masks(optimizer, 5)[0], masks(optimizer, 5 + chunks)[0])
    assert optimizer.state_bytes() == (9 if chunks == 10 else 10) * optimizer.units[0].padded


@pytest.mark.parametrize("form", ["paper", "v1"])
def test_alone_with_all_elements_it_is_lamb(form: str) -> None:
    """(1)-(6) with k = 1 and one rank: one ratio for each tensor, no staleness."""
    x = nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10))
    expected, m, v = x.detach().clone(), torch.zeros(6, 10), torch.zeros(6, 10)
    optimizer = SLAMB([x], 0.05, fraction=1.0, dense_below=0, form=form)
    for step in range(1, 6):
        x.grad = torch.sin(x.detach() * 5 + step)
        g = torch.sin(expected * 5 + step)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        r = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6)
        expected = expected - 0.05 * expected.norm() / r.norm() * r
        optimizer.step()
    assert torch.allclose(x, expected, atol=1e-5)


@pytest.mark.parametrize("form", ["paper", "v1"])
def test_elements_without_a_gradient_of_their_own_may_stay(form: str) -> None:
    for unseen in ("step", "hold"):
        x = nn.Parameter(torch.ones(3, 2))
        optimizer = SLAMB([x], 0.1, form=form, unseen=unseen, dense_below=0, fraction=1.0)
        optimizer.bind()
        optimizer.units[0].state["m"][0] = 1e-3  # what other ranks' gradients have left here
        x.grad = torch.zeros(3, 2)
        x.grad[2] = 1.0
        optimizer.step()
        moved = (x.detach() != 1).any(1).tolist()
        assert moved == [unseen == "step", False, True]


@pytest.mark.parametrize("fraction", [0.1, 0.2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_chunk_has_its_turn_where_a_state_was_saved_with_more_of_them(fraction: float) -> None:
    """Elements of chunks beyond the present number, of which there are four, were never averaged again."""
    saved = copy.deepcopy(bound("v1", fraction=fraction).state_dict())
    optimizer, fresh = (bound("v1", fraction=0.25) for _ in range(2))
    optimizer.load_state_dict(saved)
    for step in range(1, 9):
        assert all(torch.equal(a, b) for a, b in zip(masks(optimizer, step), masks(fresh, step), strict=True))


@pytest.mark.parametrize("form", ["paper", "v1", "v2"])
def test_a_parameter_without_gradient_stays_with_its_moments_also_where_models_are_averaged(form: str) -> None:
    x, y = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))
    optimizer = SLAMB([x, y], 0.1, form=form, sync_every=4, sync_phase=0)
    for step in range(1, 9):
        x.grad, y.grad = torch.ones(3, 2), torch.ones(4) if step < 3 else None
        if step == 3:
            kept = [y.detach().clone(), *(optimizer.state[y][name].clone() for name in ("m", "v"))]
        optimizer.step()
    assert all(map(torch.equal, kept, [y, *(optimizer.state[y][name] for name in ("m", "v"))]))
    assert not torch.equal(x[0, :1], y[:1])
