"""Wrappers and helpers of PyTorch that would train or save wrongly without a word are refused in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from tests.distributed.test_guards import METHODS, make, train
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

# ---- state by parameter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_state_by_parameter_is_refused_and_no_step_is_made(name: str) -> None:
    model = toy.make()
    optimizer = make(name, model, lr=0.01)
    train(model, optimizer, range(1, 4))
    optimizer.zero_grad()
    parameters, state = copy.deepcopy((toy.flat(model), optimizer.state_dict()))
    calls: list[Any] = [
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: get_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
    ]
    for call in calls:
        with pytest.raises(
            (KeyError, ValueError), match=r"by unit, .* use optimizer.state_dict\(\) and birder.checkpoint"
        ):
            call()
    assert optimizer.steps == 3
    assert torch.equal(parameters, toy.flat(model))
    for before, unit in zip(state["units"], optimizer.units, strict=True):
        assert all(torch.equal(tensor, unit.state[key]) for key, tensor in before.items())
    assert len(get_model_state_dict(model)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", METHODS)
def test_state_shows_views_of_what_is_kept_by_unit(name: str) -> None:
    """What others see there is what training uses, before and after a load, an attachment and a copy."""
    model = toy.make()
    optimizer = make(name, model, lr=0.01)
    assert dict(optimizer.state) == {}
    train(model, optimizer, range(1, 4))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    shown = 0
    for unit in optimizer.units:
        for i, p in enumerate(unit.params):
            for key, tensor in optimizer.state[p].items():
                if key in optimizer.by_tensor:
                    continue
                assert tensor.shape == p.shape
                tensor.fill_(1)
                assert bool((unit.view(unit.state[key], i) == 1).all())
                shown += 1
    assert shown >= len(list(model.parameters()))
    assert not copy.deepcopy(optimizer).state
    saved = optimizer.state_dict()
    assert [k for k, kept in saved["state"].items() if not isinstance(k, str) and any(kept.values())] == []
    optimizer.bind()
    train(model, optimizer, range(4, 6))
    for entry in optimizer.state.values():
        entry.clear()
        break
    with pytest.raises(RuntimeError, match=r"optimizer.state cannot be replaced or emptied.*change them in place"):
        train(model, optimizer, range(6, 7))


# ---- parameters that become bf16 -----------------------------------------------------------------------------------------


def test_a_model_converted_after_its_optimizer_was_built_is_refused() -> None:
    model = toy.make()
    optimizer = make("Birder", model)
    model.bfloat16()
    with pytest.raises(ValueError, match=r"^parameters must be float32, got bfloat16: keep the model in float32"):
        optimizer.bind()


# ---- reducers without buckets --------------------------------------------------------------------------------------------


class TorchftDDP(DistributedDataParallel):
    """Stands for that of torchft: DDP with a hook of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_comm_hook(None, noop)


TorchftDDP.__module__ = "torchft.ddp"


def noop(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


noop.__annotations__.clear()  # DDP wants classes there, not their names


def without_buckets(rank: int, world: int) -> list[str]:
    from torch import _dynamo

    said = []
    for kind in ("python_reducer", "torchft", "hooked"):
        model = toy.make()
        optimizer = birder.Birder(model.parameters())
        if kind == "python_reducer":
            with _dynamo.config.patch(optimize_ddp="python_reducer"):
                ddp = DistributedDataParallel(model)
        else:
            ddp = TorchftDDP(model) if kind == "torchft" else DistributedDataParallel(model)
            if kind == "hooked":
                ddp.register_comm_hook(None, noop)
        try:
            attach(ddp, optimizer)
        except RuntimeError as e:
            said.append(str(e))
        attach(DistributedDataParallel(model), optimizer)  # the refusal has not bound it
    return said


def divided_by_zero_redundancy(rank: int, world: int) -> str:
    model = toy.make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), birder.Birder, lr=0.01)
    with pytest.raises(TypeError) as caught:
        attach(DistributedDataParallel(model), optimizer)
    return str(caught.value)


def test_an_optimizer_whose_parameters_are_divided_between_ranks_is_refused() -> None:
    for said in run_ranks(divided_by_zero_redundancy, 2):
        assert "each rank some of the parameters" in said
        assert "FSDP2" in said


def test_ddp_that_gives_hooks_no_buckets_is_refused() -> None:
    for compiled, torchft, hooked in run_ranks(without_buckets, 2):
        assert "compiled autograd" in compiled
        assert "leave optimize_ddp at its default" in compiled
        assert "torchft" in torchft
        assert "another communication hook" in hooked
