"""Variants of a method: an argument of the constructor makes the class that has their rules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from birder import SLAMB, DeepSpeedZeroOneAdam, SLAMBv1, SLAMBv2, ZeroOneAdam

CASES: list[tuple[type, dict[str, Any], type]] = [
    (SLAMB, {}, SLAMB),
    (SLAMB, {"form": "paper"}, SLAMB),
    (SLAMB, {"form": "v1"}, SLAMBv1),
    (SLAMB, {"form": "v2"}, SLAMBv2),
    (ZeroOneAdam, {"warmup_steps": 2}, ZeroOneAdam),
    (ZeroOneAdam, {"warmup_steps": 2, "variant": "deepspeed"}, DeepSpeedZeroOneAdam),
]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(64))]


@pytest.mark.parametrize(("method", "options", "wanted"), CASES)
def test_an_argument_makes_the_class_that_it_names(method: type, options: dict[str, Any], wanted: type) -> None:
    made = method(parameters(), **options)
    assert type(made) is wanted
    assert type(pickle.loads(pickle.dumps(made))) is wanted


def test_a_class_of_ones_own_stays_what_it_is() -> None:
    class Mine(SLAMB):
        pass

    assert type(Mine(parameters(), form="v1")) is Mine


def test_a_name_that_nobody_has_is_refused_by_the_method() -> None:
    with pytest.raises(ValueError, match="form must be paper, v1 or v2"):
        SLAMB(parameters(), form="v3")
    with pytest.raises(ValueError, match="variant must be paper or deepspeed"):
        ZeroOneAdam(parameters(), warmup_steps=2, variant="v1")
