"""Variants of a method are classes; the arguments that named them before still do, and say what to use."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from birder import SLAMB, DeepSpeedZeroOneAdam, SLAMBv1, SLAMBv2, ZeroOneAdam
from birder.optim.checks import warn_of_old_way

FEW = {"dense_below": 0, "sync_every": 3, "fraction": 0.25, "weight_decay": 0.1}
ROUNDS = {"warmup_steps": 4, "kappa": 1, "local_doubling": 2, "local_limit": 2, "weight_decay": 0.1}
OLD: list[tuple[type, dict[str, Any], type, dict[str, Any]]] = [
    (SLAMB, {"form": "v1"}, SLAMBv1, FEW),
    (SLAMB, {"form": "v2"}, SLAMBv2, FEW),
    (ZeroOneAdam, {"variant": "deepspeed"}, DeepSpeedZeroOneAdam, ROUNDS),
]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16)), nn.Parameter(torch.ones(7))]


def trained(method: Any, options: dict[str, Any], like: dict[str, Any] | None = None) -> tuple[torch.Tensor, Any]:
    params = parameters()
    optimizer = method(params, **options)
    if like is not None:
        optimizer.load_state_dict(copy.deepcopy(like))
    for step in range(8):
        for p in params:
            p.grad = (p.detach() + step).sin()
        optimizer.step()
    return torch.cat([p.detach().view(-1) for p in params]), optimizer


@pytest.mark.parametrize(("method", "old", "wanted", "options"), OLD)
def test_the_old_argument_trains_as_the_class_that_it_names(
    method: type, old: dict[str, Any], wanted: type, options: dict[str, Any]
) -> None:
    warn_of_old_way.cache_clear()
    with pytest.warns(FutureWarning, match=f"use that|{wanted.__name__}") as said:
        (mine, optimizer), _ = [trained(method, options | old) for _ in range(2)]
    assert len(said) == 1  # once in a process
    theirs, other = trained(wanted, options)
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, trained(method, options)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(trained(wanted, options | old)[0], theirs)
    # What one has saved the other loads; the paper's form does not.
    assert torch.equal(
        *(trained(m, o, optimizer.state_dict())[0] for m, o in ((wanted, options), (method, options | old)))
    )
    with pytest.raises(ValueError, match=f"holds what {wanted.__name__} keeps"):
        method(parameters(), **options).load_state_dict(optimizer.state_dict())
    assert pickle.loads(pickle.dumps(optimizer)).kind == wanted.__name__ == other.kind


def test_a_class_of_ones_own_says_itself_from_which_form_it_is_derived() -> None:
    class Mine(SLAMB):
        pass

    class First(SLAMBv1):
        pass

    with pytest.raises(ValueError, match=r"form='v1' is an old way to say birder.SLAMBv1: derive Mine from that"):
        Mine(parameters(), **FEW, form="v1")
    values, optimizer = trained(First, FEW | {"form": "v1"})
    assert (type(optimizer), optimizer.kind) == (First, "First")
    assert torch.equal(values, trained(SLAMBv1, FEW)[0])
