"""Whole cycles: how many steps a method's turn has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import birder
from birder import BucketOptimizer
from experiments.timing import cycles
from launch.errors import UserError


def made(name: str, **options: Any) -> BucketOptimizer:
    optimizer: BucketOptimizer = getattr(birder, name)([torch.nn.Parameter(torch.zeros(64))], **options)
    return optimizer


@pytest.mark.parametrize(
    ("name", "options", "warm_up", "period"),
    [
        ("SGDM", {}, 3, 1),
        ("Birder", {}, 3, 1),
        ("OneBitAdam", {"warmup_steps": 2}, 3, 1),
        ("OneBitAdam", {"warmup_steps": 7}, 8, 1),  # seven dense steps, one of its own kind
        ("OneBitLAMB", {"warmup_steps": 7}, 8, 1),
        ("OneBitAdam", {"warmup_steps": cycles.LONGEST}, cycles.LONGEST + 1, 1),
        ("CSER", {"reset_every": 6}, 3, 6),
        ("CSER", {"reset_every": 6, "gradient_ratio": None}, 3, 6),
        ("QSparseLocalSGD", {"sync_every": 4}, 3, 4),
        ("SLAMB", {"sync_every": 20}, 3, 20),
    ],
)
def test_warm_up_and_period(name: str, options: dict[str, Any], warm_up: int, period: int) -> None:
    optimizer = made(name, **options)
    assert cycles.warm_up(optimizer, 3) == warm_up
    assert cycles.cycle(optimizer, warm_up + 2) == period


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLAMB", "ZeroOneAdam"])
def test_a_warm_up_that_is_too_long_to_be_run_is_refused(name: str) -> None:
    """Its row would be of dense steps, under the name of the method."""
    with pytest.raises(UserError, match=r"warms up for 600 steps or more, .* set optimizer\.warmup_steps"):
        cycles.warm_up(made(name, warmup_steps=600), 3)


def test_local_steps_of_0_1_adam_in_their_last_stage_repeat() -> None:
    optimizer = made("ZeroOneAdam", warmup_steps=1, local_doubling=1, local_limit=4)
    assert cycles.cycle(optimizer, 200) == 4


@pytest.mark.parametrize(
    ("period", "rounds", "steps"), [(1, 10, 2), (4, 10, 2), (8, 10, 2), (3, 7, 2), (32, 10, 2), (100, 6, 2)]
)
def test_rounds_hold_whole_cycles(period: int, rounds: int, steps: int) -> None:
    found = cycles.lengths(period, rounds, steps)
    assert len(found) == rounds
    assert min(found) >= 1
    assert sum(found) % period == 0
    if period <= cycles.WHOLE * steps:
        assert all(n % period == 0 and n >= steps for n in found)
    else:
        assert max(found) - min(found) <= 1
    again = cycles.lengths(period, rounds, steps, held=False)  # each round begins the training again
    assert all(n % period == 0 and n >= steps for n in again)
