"""Learning-rate schedules of the papers, at the steps where a peer would be off by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experiments.config import schedules
from experiments.config.schema import LrSchedule
from experiments.config.validate import check_section
from launch.errors import UserError


def at(schedule: dict[str, Any], *steps: int, total: int = 100, epoch: int = 10) -> list[float]:
    return [schedules.factor(schedule, step, total, epoch) for step in steps]


def test_exponential_as_for_bert_in_0_1_adam() -> None:
    """Linear to the peak in 12,500 steps, then x 0.99 after every 520."""
    schedule = {"name": "exponential", "warmup": 12_500, "gamma": 0.99, "every": 520}
    steps = (1, 6_250, 12_500, 12_501, 13_020, 13_021, 13_541, 118_000)
    expected = [1 / 12_500, 0.5, 1, 1, 1, 0.99, 0.99**2, 0.99 ** ((118_000 - 12_501) // 520)]
    assert at(schedule, *steps, total=118_000) == pytest.approx(expected, rel=1e-12)


def test_fractions_are_of_all_steps() -> None:
    """The same curve at another length of the run."""
    schedule = {"name": "exponential", "warmup": 0.1, "gamma": 0.5, "every": 0.3}
    assert at(schedule, 5, 10, 11, 40, 41, 71) == [0.5, 1, 1, 1, 0.5, 0.25]
    assert at(schedule, 1, 4, 5, total=10) == [1, 1, 0.5]
    shortest = {"name": "exponential", "gamma": 0.5, "every": 0.001}  # less than one step: every step
    assert at(shortest, 1, 2, 3) == [1, 0.5, 0.25]


def test_polynomial_as_for_bert_large_in_slamb() -> None:
    """2,000 warm-up steps of 7,038, then the square root of what is left."""
    schedule = {"name": "polynomial", "warmup": 2_000, "power": 0.5, "final": 0.0}
    left = [(7_038 - s + 1) / 5_038 for s in (2_001, 4_520, 7_038)]
    assert at(schedule, 1_000, 2_000, total=7_038) == [0.5, 1]
    assert at(schedule, 2_001, 4_520, 7_038, total=7_038) == pytest.approx([math.sqrt(x) for x in left])
    linear = {"name": "linear", "warmup": 0.1, "final": 0.2}
    assert at({**linear, "name": "polynomial", "power": 1.0}, 5, 50, 100) == pytest.approx(at(linear, 5, 50, 100))


def test_cosine_falls_to_final() -> None:
    schedule = {"name": "cosine", "warmup": 0.2, "final": 0.1}
    first, middle, last = at(schedule, 21, 61, 100)
    assert (first, middle) == pytest.approx((1, 0.55))
    assert 0.1 < last < 0.102
    rising = at(schedule, *range(1, 21))
    assert rising == pytest.approx([s / 20 for s in range(1, 21)])


def test_steps_as_for_wide_resnet_in_cser() -> None:
    schedule = {"name": "step", "milestones": [60, 120, 160], "gamma": 0.2}
    steps = (600, 601, 1_200, 1_201, 1_601, 2_000)
    expected = [1, 0.2, 0.2, 0.04, 0.008, 0.008]
    assert at(schedule, *steps, total=2_000) == pytest.approx(expected)


def test_a_milestone_may_lie_within_an_epoch() -> None:
    schedule = {"name": "step", "milestones": [0.5, 1.25], "gamma": 0.5}
    assert at(schedule, 5, 6, 10, 13, 14, 20, total=20) == [1, 0.5, 0.5, 0.5, 0.25, 0.25]
    whole = {"name": "step", "milestones": [3], "gamma": 0.5}
    for epoch in (1, 3, 7, 49, 781):
        assert at(whole, 3 * epoch, 3 * epoch + 1, epoch=epoch) == [1, 0.5]


def test_null_is_not_set() -> None:
    """How an experiment takes back a key of its workload's own schedule."""
    assert at({"name": "cosine", "milestones": None, "gamma": None}, 1) == [1]
    assert at({"name": "step", "milestones": [1], "gamma": None}, 11) == [0.1]


def test_a_run_shorter_than_its_warmup_ends_within_it() -> None:
    assert at({"name": "linear", "warmup": 200}, 100) == [0.5]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"name": "cyclic"}, "one of constant, linear, cosine"),
        ({"name": "cosine", "power": 2.0}, "cosine has no power; it takes final, warmup"),
        ({"name": "linear", "every": 3}, "linear has no every"),
        ({"name": "linear", "warmup": 1.0}, "warmup must be a fraction of all steps"),
        ({"name": "linear", "warmup": 2.5}, "or a number of steps, or null, not 2.5"),
        ({"name": "linear", "warmup": -1}, "warmup"),
        ({"name": "exponential", "every": 1.5}, "every must be a number of steps, or a fraction"),
        ({"name": "polynomial", "power": 0}, "power must be a number above 0"),
    ],
)
def test_bad_schedules(schedule: dict[str, Any], words: str) -> None:
    def check() -> None:  # as a run checks its own, once
        check_section(LrSchedule, schedule, "train.lr_schedule")
        schedules.check_keys(schedule)

    with pytest.raises(UserError, match=words):
        check()
