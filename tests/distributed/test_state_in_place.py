"""Tensors of a state that are changed where they are: loaded by torch.distributed.checkpoint, copied by hand, set to 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from birder.optim.watch import ONE_OF
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

FIRST, STEPS = 6, 12
METHODS: dict[str, Callable[..., Any]] = {
    "torch": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW": lambda p: birder.AdamW(p, lr=0.01),
    "Birder": lambda p: birder.Birder(p, lr=0.01),
    "SigmaDeltaAdam": lambda p: birder.SigmaDeltaAdam(p, lr=0.01),
    "OneBitAdam": lambda p: birder.OneBitAdam(p, lr=0.01, warmup_steps=3),
    "ZeroOneAdam": lambda p: birder.ZeroOneAdam(p, lr=0.01, warmup_steps=3),
    "CSER": lambda p: birder.CSER(p, lr=0.01, gradient_ratio=2, model_ratio=2, reset_every=4, block=8),
}
FROZEN = {
    "OneBitAdam": METHODS["OneBitAdam"],
    "OneBitLAMB": lambda p: birder.OneBitLAMB(p, lr=0.01, warmup_steps=3),
    "ZeroOneAdam": METHODS["ZeroOneAdam"],
}
"""Methods whose variance does not change any more after the warm-up."""


def by_hand(live: Any, saved: Any) -> None:
    """Copies every tensor of `saved` into that of `live`, and takes all else from `saved`."""
    for key in saved if isinstance(saved, dict) else range(len(saved)):
        if isinstance(saved[key], Tensor):
            live[key].copy_(saved[key])
        elif isinstance(saved[key], (dict, list)) and saved[key]:
            by_hand(live[key], saved[key])
        else:
            live[key] = saved[key]


@pytest.mark.parametrize("way", ["copied", "checkpoint"])
@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_is_loaded_in_place_is_that_of_its_step(method: str, way: str, tmp_path: Path) -> None:
    """Moments were there, and the number of steps was that of the new optimizer: warm-ups and corrections began again."""
    model = toy.make()
    optimizer = METHODS[method](model.parameters())
    toy.train(model, optimizer, 0, range(FIRST))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if way == "checkpoint":
        dcp.save(saved, checkpoint_id=tmp_path)
    else:
        torch.save(saved, tmp_path / "saved")
    toy.train(model, optimizer, 0, range(FIRST, STEPS))
    again = toy.make(5)
    other = METHODS[method](again.parameters())
    toy.train(again, other, 0, range(1))  # before its first step torch's optimizer has no state to load into
    live = {"model": again.state_dict(), "optimizer": other.state_dict()}
    if way == "checkpoint":
        dcp.load(live, checkpoint_id=tmp_path)
    else:
        by_hand(live, torch.load(tmp_path / "saved"))
    again.load_state_dict(live["model"])
    other.load_state_dict(live["optimizer"])
    toy.train(again, other, 0, range(FIRST, STEPS))
    assert torch.equal(toy.flat(again), toy.flat(model))


def test_a_state_that_was_kept_without_a_copy_is_the_present_one() -> None:
    """As with torch's optimizers: loading it changes nothing."""
    model = toy.make()
    optimizer = METHODS["AdamW"](model.parameters())
    toy.train(model, optimizer, 0, range(2))
    kept = optimizer.state_dict()
    toy.train(model, optimizer, 0, range(2, 4))
    optimizer.load_state_dict(kept)
    assert [optimizer.steps, int(kept["steps"])] == [4, 4]


def merged(rank: int, world: int, folder: str) -> str:
    """torch.distributed.checkpoint keeps what ranks have under one name once; what is said where that is loaded."""

    def wrapped() -> tuple[Any, DistributedDataParallel]:
        ddp = DistributedDataParallel(toy.make())
        optimizer = METHODS["OneBitAdam"](ddp.parameters())
        attach(ddp, optimizer)
        return optimizer, ddp

    optimizer, ddp = wrapped()
    toy.train(ddp, optimizer, rank, range(FIRST))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    optimizer, ddp = wrapped()
    live = {"optimizer": optimizer.state_dict()}
    dcp.load(live, checkpoint_id=folder)
    try:
        optimizer.load_state_dict(live["optimizer"])
    except ValueError as error:
        return str(error)
    return ""


def test_the_state_of_another_rank_that_is_loaded_in_place_is_refused(tmp_path: Path) -> None:
    """All ranks would have had pieces of each other's errors."""
    said = [one for one in run_ranks(merged, 2, str(tmp_path)) if one]
    assert len(said) == 1
    assert "differs from rank to rank" in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_variance_that_is_set_to_0_is_refused_in_the_next_step(method: str) -> None:
    """The parameter moved by its momentum over eps, a million times too far, without a word."""
    model = toy.make()
    optimizer = FROZEN[method](model.parameters())
    toy.train(model, optimizer, 0, range(FIRST))
    for state in optimizer.state[model.second.weight].values():
        state.zero_()
    before = toy.flat(model)
    with pytest.raises(RuntimeError, match="would never move"):
        toy.train(model, optimizer, 0, range(FIRST, FIRST + 1))
    assert torch.equal(toy.flat(model), before)


@pytest.mark.parametrize("method", FROZEN)
def test_numbers_whose_frozen_variance_is_set_to_0_stay_and_are_warned_of(method: str) -> None:
    """As numbers that had no gradient in the warm-up: others of the parameter go on."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5), torch.randn(4 * ONE_OF, 4, 6)
    optimizer = FROZEN[method](model.parameters())

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(x[step]).square().mean().backward()
            optimizer.step()

    train(range(FIRST))
    for state in optimizer.state[model.weight].values():
        if state.shape == model.weight.shape:
            state[2].zero_()
    before = model.weight.detach().clone()
    with pytest.warns(RuntimeWarning, match="6 numbers of a parameter of shape"):
        train(range(FIRST, 4 * ONE_OF))
    assert (model.weight.detach() != before).any(1).tolist() == [True, True, False, True, True]
