"""A saved state belongs to the layers that it was saved of: with others frozen it is loaded as torch does it, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from tests.distributed.test_elastic import bound
from tests.helpers.ordinary import said
from tests.helpers.ranks import run_ranks

DENSE = {
    "AdamW": (birder.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0}),
    "SGDM": (birder.SGDM, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
}


def make(frozen: int | None, width: int = 8) -> nn.Sequential:
    """Two layers of the same size; one may be frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, width))
    if frozen is not None:
        net[frozen].requires_grad_(False)
    return net


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def resumed(kind: Any, options: dict[str, Any], first: int | None, then: int | None, unfrozen: bool) -> Tensor:
    """The parameters of a run that was saved with layer `first` frozen and resumed with layer `then` frozen."""
    net = make(first)
    optimizer = kind(net.parameters(), **options)
    train(net, optimizer, range(4))
    weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net = make(then)
    net.load_state_dict(weights)
    optimizer = kind(net.parameters(), **options)
    optimizer.load_state_dict(state)
    train(net, optimizer, range(4, 8))
    if unfrozen:
        net.requires_grad_(True)
        train(net, optimizer, range(8, 12))
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("unfrozen", [False, True])
@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("name", DENSE)
def test_every_layer_gets_its_own_state_as_with_torch(
    name: str, first: int | None, then: int | None, unfrozen: bool
) -> None:
    ours, torchs, options = DENSE[name]
    mine, control = (resumed(kind, options, first, then, unfrozen) for kind in (ours, torchs))
    torch.testing.assert_close(mine, control, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DENSE)
def test_a_state_of_frozen_layers_alone_is_loaded_as_with_torch(name: str) -> None:
    ends = []
    for kind in DENSE[name][:2]:
        net, frozen = make(None), make(None).requires_grad_(False)
        state = kind(frozen.parameters(), **DENSE[name][2])
        state.step()
        optimizer = kind(net.parameters(), **DENSE[name][2])
        train(net, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(state.state_dict()))
        train(net, optimizer, range(2, 4))
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


COMPRESSED = ("Birder", "OneBitAdam", "SigmaDeltaAdam", "Lion", "CSER", "SLAMB")


def build(name: str, net: nn.Module) -> Any:
    return getattr(birder, name)(net.parameters(), lr=1e-3, **({"warmup_steps": 2} if name == "OneBitAdam" else {}))


@pytest.mark.parametrize("name", COMPRESSED)
def test_units_of_other_layers_are_refused(name: str) -> None:
    saved_of, other = make(0), make(2)
    optimizer = build(name, saved_of)
    train(saved_of, optimizer, range(4))
    state, loading = copy.deepcopy(optimizer.state_dict()), build(name, other)
    refused = said(lambda: loading.load_state_dict(state))
    assert "lacks parameter 0, parameter 1" in refused
    assert "does not train, parameter 2, parameter 3" in refused
    same = make(0)
    loading = build(name, same)
    loading.load_state_dict(state)
    train(same, loading, range(4, 6))


@pytest.mark.parametrize("name", ["AdamW", *COMPRESSED])
def test_another_shape_within_the_padding_is_refused(name: str) -> None:
    net = make(None, width=1)
    optimizer = build(name, net)
    train(net, optimizer, range(4))
    other = build(name, make(None, width=3))
    assert "another shape of parameter 2, parameter 3" in said(lambda: other.load_state_dict(optimizer.state_dict()))


def test_a_state_that_is_saved_after_layers_were_taken_out_is_of_those_that_are_left() -> None:
    """With 8 ranks the state of a layer that was taken out was loaded as another's: both fit into the padding."""
    net = make(None)
    optimizer = birder.AdamW(net.parameters())
    train(net, optimizer, range(2))
    del optimizer.param_groups[0]["params"][2:]
    kept, loading = optimizer.state[net[0].weight]["m"].clone(), birder.AdamW(net[0].parameters())
    loading.load_state_dict(optimizer.state_dict())
    assert loading.state[net[0].weight]["m"].equal(kept)
    several = bound("Birder", 8, 1, 0)
    several.param_groups[0]["params"].pop()
    assert "call birder.attach(model, optimizer) again" in said(several.state_dict)


def on_ranks(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name in ("Birder", "OneBitAdam"):
        net = make(0)
        optimizer = build(name, net)
        ddp = DistributedDataParallel(net)
        birder.attach(ddp, optimizer)
        train(ddp, optimizer, range(4))
        state, other = copy.deepcopy(optimizer.state_dict()), make(2)
        loading = build(name, other)
        birder.attach(DistributedDataParallel(other), loading)
        found[name] = said(lambda optimizer=loading, state=state: optimizer.load_state_dict(state))
    return found


def test_every_rank_refuses_with_names() -> None:
    for found in run_ranks(on_ranks, 2):
        for refused in found.values():
            assert "lacks 0.bias, 0.weight" in refused or "lacks 0.weight, 0.bias" in refused
