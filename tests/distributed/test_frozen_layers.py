"""Layers that are frozen, unused, unfrozen or added in an ordinary script: torch's behaviour, or one line in the first step.

One world of two ranks for all of it: each scenario is a function of the rank, and the tests read what it found.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import Plan, Topology, VirtualRanks, attach
from tests.helpers.ordinary import LOCAL, METHODS, Trunk, apart, batches, said, state_of, train, values
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow_unless

FEW = ("Birder", "OneBitAdam", "CSER", "ZeroOneAdam with local steps")
"""Of the scenarios of every method what `make test` runs."""


def chosen(methods: dict[str, Callable[..., Any]], few: bool) -> dict[str, Callable[..., Any]]:
    return {name: make for name, make in methods.items() if (name in FEW) == few}


def frozen(rank: int, few: bool) -> dict[str, Any]:
    """A layer is frozen or unused from step 4 on, then comes back."""
    found = {}
    for name, make in chosen({**METHODS, **LOCAL}, few).items():
        for overlap in (True, False):
            model = Trunk()
            optimizer = make(model.parameters())
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            attachment = attach(ddp, optimizer, overlap=overlap)
            train(ddp, optimizer, rank, 4)
            before, state = values(model), state_of(optimizer, model.first.weight)
            for p in model.first.parameters():
                p.requires_grad_(False)
                p.grad = None
            train(ddp, optimizer, rank, 5, seed=1, aux=False)
            after = values(model)
            stays = {k: torch.equal(before[k], after[k]) for k in before}
            now = state_of(optimizer, model.first.weight)
            kept = all(torch.equal(state[k], now[k]) for k in state if k not in ("common", "last"))
            for p in model.first.parameters():
                p.requires_grad_(True)
            train(ddp, optimizer, rank, 4, seed=2)
            with optimizer.averaged():
                spread = max(apart(p) for p in model.parameters())
            moves = not torch.equal(model.first.weight, after["first.weight"])
            attachment.close()
            found[f"{name}, overlap={overlap}"] = (
                all(stays[k] for k in stays if not k.startswith("last")),
                not stays["last.weight"],
                kept,
                moves,
                spread,
            )
    return found


def used_on_one_rank(rank: int) -> dict[str, float]:
    """A layer that one rank uses and the other does not moves, alike on both."""
    found = {}
    for overlap in (True, False):
        model = Trunk()
        optimizer = METHODS["Birder"](model.parameters())
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        attachment = attach(ddp, optimizer, overlap=overlap)
        before = values(model)
        train(ddp, optimizer, rank, 3, aux=rank == 0)
        found[f"moved {overlap}"] = float((model.aux.weight - before["aux.weight"]).abs().max())
        found[f"apart {overlap}"] = apart(model.aux.weight)
        attachment.close()
    return found


def used_by_turns(rank: int) -> dict[str, float]:
    """A layer that rank 1 uses in every second step: how far from torch's SGD is what sends all of the gradient."""
    ends = []
    for overlap in (None, True, False):
        model = Trunk()
        options: dict[str, Any] = {"lr": 0.1} if overlap is None else {"lr": 0.1, "momentum": 0.0, "ratio": 1}
        optimizer = (torch.optim.SGD if overlap is None else birder.EFSGD)(model.parameters(), **options)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if overlap is not None:
            attachment = attach(ddp, optimizer, overlap=overlap)
        for step, x in enumerate(batches(rank, 6)):
            optimizer.zero_grad()
            ddp(x, aux=rank == 0 or step % 2 == 0).square().mean().backward()
            optimizer.step()
        ends.append(model.aux.weight.detach())
        if overlap is not None:
            attachment.close()
    return {
        f"{overlap}": float((end - ends[0]).abs().max()) for overlap, end in zip((True, False), ends[1:], strict=True)
    }


def frozen_at_attach(rank: int, few: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in chosen(METHODS, few).items():
        for refuse in (True, False):
            model = Trunk()
            model.first.requires_grad_(False)
            optimizer = make(model.parameters())
            ddp = DistributedDataParallel(model)
            attach(ddp, optimizer)
            train(ddp, optimizer, rank, 2)
            model.first.requires_grad_(True)
            if refuse:
                found[name] = [said(lambda d=ddp, o=optimizer: train(d, o, rank, 1, seed=1))]  # type: ignore[misc]
        steps, first = optimizer.steps, values(model)
        kept = state_of(optimizer, model.last.weight)
        ddp = DistributedDataParallel(model)
        optimizer.zero_grad()
        attach(ddp, optimizer)
        now = state_of(optimizer, model.last.weight)
        found[name].append(all(torch.equal(kept[k], now[k]) for k in kept))
        found[name].append(optimizer.steps == steps)
        train(ddp, optimizer, rank, 3, seed=2)
        with optimizer.averaged():
            found[name].append(apart(model.first.weight))
        found[name].append(float((model.first.weight - first["first.weight"]).abs().max()) > 0)
    return found


def frozen_between_meetings(rank: int) -> dict[str, tuple[float, float]]:
    """How far ranks are apart in a layer that is frozen between two synchronisations, once they attach again; and later."""
    found = {}
    for name, make in (LOCAL | {"CSER": METHODS["CSER"], "SLAMB": METHODS["SLAMB"]}).items():
        model = Trunk()
        optimizer = make(model.parameters())
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        attach(ddp, optimizer)
        train(ddp, optimizer, rank, 5)
        optimizer.zero_grad()
        model.first.requires_grad_(False)
        attach(ddp, optimizer)
        train(ddp, optimizer, rank, 3, seed=1)
        while_frozen = apart(model.first.weight)
        model.first.requires_grad_(True)
        attachment = attach(ddp, optimizer)
        train(ddp, optimizer, rank, 4, seed=2)
        found[name] = while_frozen, apart(model.first.weight)
        attachment.close()
    return found


def unused_and_laid_out_again(rank: int) -> dict[str, tuple[float, float]]:
    """How far a layer that is not used moves once ranks have met, and how far they are apart in it. Meanwhile the state is
    loaded again, by a new optimizer too, or the model is attached again."""
    found = {}
    for name, make in (LOCAL | {n: METHODS[n] for n in ("Birder", "CSER", "OneBitAdam", "SLAMB")}).items():
        for again in ("loaded", "resumed", "attached"):
            model = Trunk()
            optimizer = make(model.parameters())
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            attachment = attach(ddp, optimizer)
            train(ddp, optimizer, rank, 5)  # the last one alone, where steps are local
            for seed in (1, 2):
                weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                if again == "resumed":
                    attachment.close()
                    model = Trunk()
                    optimizer = make(model.parameters())
                    ddp = DistributedDataParallel(model, find_unused_parameters=True)
                    attachment = attach(ddp, optimizer)
                    model.load_state_dict(weights)
                if again != "attached":
                    optimizer.load_state_dict(state)
                else:
                    optimizer.zero_grad()
                    attachment = attach(ddp, optimizer)
                before = model.aux.weight.detach().clone()
                train(ddp, optimizer, rank, 4 if seed == 1 else 3, seed=seed, aux=False)
            moved = float((model.aux.weight.detach() - before).abs().max())
            found[f"{name}, {again}"] = moved, apart(model.aux.weight)
            attachment.close()
    return found


def frozen_with_a_gradient(rank: int) -> str:
    """What the layer's last step left, zeroed: torch moves it on by its momentum."""
    model = Trunk()
    optimizer = METHODS["Birder"](model.parameters())
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    train(ddp, optimizer, rank, 2)
    optimizer.zero_grad(set_to_none=False)
    model.first.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    ddp(torch.ones(4, 6)).square().sum().backward()
    return said(optimizer.step)


def ignored_by_ddp(rank: int) -> str:
    model = Trunk()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["aux.weight"])
    optimizer = METHODS["Birder"](model.parameters())
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    return said(lambda: train(ddp, optimizer, rank, 1))


def added_group(rank: int) -> dict[str, Any]:
    model = Trunk()
    optimizer = METHODS["Birder"]([*model.first.parameters(), *model.last.parameters()])
    ddp = DistributedDataParallel(model)
    attach(ddp, optimizer)
    train(ddp, optimizer, rank, 2)
    optimizer.add_param_group({"params": list(model.aux.parameters()), "lr": 5e-3})
    line = said(lambda: train(ddp, optimizer, rank, 1, seed=1))
    before = values(model)
    optimizer.zero_grad()
    attach(ddp, optimizer)
    train(ddp, optimizer, rank, 2, seed=2)
    moved = float((model.aux.weight - before["aux.weight"]).abs().max())
    return {"line": line, "moved": moved, "apart": apart(model.aux.weight)}


def frozen_variance(rank: int) -> dict[str, str]:
    found = {}
    for name in ("OneBitAdam", "OneBitLAMB", "ZeroOneAdam"):
        model = Trunk()
        optimizer = METHODS[name](model.parameters())
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        attach(ddp, optimizer)
        train(ddp, optimizer, rank, 5, aux=False)
        found[name] = said(lambda d=ddp, o=optimizer: train(d, o, rank, 1, seed=3))  # type: ignore[misc]
    return found


def dense_against_torch(rank: int) -> float:
    """A layer that comes late, and goes, and comes: every parameter counts its own steps, as in torch."""
    ends = []
    for ours in (False, True):
        model = Trunk()
        optimizer: Any = (birder.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=1e-2, weight_decay=0.1)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if ours:
            attach(ddp, optimizer)
        optimizer.step()  # without any gradient
        for step, x in enumerate(batches(rank, 8)):
            optimizer.zero_grad()
            ddp(x, aux=step in (3, 4, 7)).square().mean().backward()
            optimizer.step()
            if ours and step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


OF_EVERY_METHOD = (frozen, frozen_at_attach)
SCENARIOS: dict[str, Callable[[int], Any]] = {
    f.__name__: f
    for f in (
        used_on_one_rank,
        used_by_turns,
        ignored_by_ddp,
        frozen_between_meetings,
        unused_and_laid_out_again,
        frozen_with_a_gradient,
        added_group,
        frozen_variance,
        dense_against_torch,
    )
}


def everything(rank: int, world: int, few: bool) -> dict[str, Any]:
    found = {f.__name__: f(rank, few) for f in OF_EVERY_METHOD}
    return found | ({name: scenario(rank) for name, scenario in SCENARIOS.items()} if few else {})


@functools.cache
def world(few: bool) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, few)


def of(scenario: Callable[..., Any], few: bool = True) -> Any:
    """What rank 0 found."""
    return world(few)[0][scenario.__name__]


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, [*METHODS, *LOCAL]))
def test_a_parameter_without_gradient_stays(name: str) -> None:
    for overlap in (True, False):
        stays, others_move, state_stays, comes_back, spread = of(frozen, name in FEW)[f"{name}, overlap={overlap}"]
        assert others_move
        assert comes_back
        assert spread == 0.0
        if name not in LOCAL:  # ranks that differed when it was frozen meet once more
            assert stays
            assert state_stays


def test_a_layer_that_one_rank_uses_moves_on_both() -> None:
    found = of(used_on_one_rank)
    assert found["moved True"] > 0.005
    assert found["moved False"] > 0.005
    assert found["apart True"] == found["apart False"] == 0.0


def test_a_rank_that_does_not_use_a_layer_in_a_step_adds_nothing() -> None:
    """As under torch, where its share of the mean is 0; not what it had in the step before."""
    assert max(of(used_by_turns).values()) < 1e-6


@pytest.mark.parametrize("name", slow_unless(FEW.__contains__, METHODS))
def test_unfreezing_is_refused_until_the_model_is_attached_again(name: str) -> None:
    line, kept, steps, spread, moved = of(frozen_at_attach, name in FEW)[name]
    assert "first.weight" in line
    assert "attach" in line
    assert kept
    assert steps
    assert spread == 0.0
    assert moved


def test_a_gradient_that_was_left_when_its_layer_was_frozen_is_named() -> None:
    line = of(frozen_with_a_gradient)
    assert "first.weight is frozen and still has a gradient" in line
    assert "p.grad = None" in line


def test_ranks_agree_on_a_layer_that_was_frozen_between_two_synchronisations() -> None:
    for name, (while_frozen, later) in of(frozen_between_meetings).items():
        assert while_frozen == 0.0, name
        if name != "CSER":  # whose ranks differ after every step; the others have just met, in step 12
            assert later == 0.0, name


def test_a_layer_that_is_not_used_stays_where_the_state_is_loaded_or_laid_out_again() -> None:
    for how, (moved, spread) in of(unused_and_laid_out_again).items():
        assert moved == 0.0, how
        if not how.startswith("CSER"):  # whose ranks differ after every step
            assert spread == 0.0, how


def test_what_ddp_ignores_is_refused() -> None:
    assert "aux.weight" in of(ignored_by_ddp)


def test_a_group_that_was_added_takes_part_after_attach() -> None:
    found = of(added_group)
    assert "attach" in found["line"]
    assert found["moved"] == pytest.approx(1e-2, rel=0.1)  # two steps of its own lr, and weight decay
    assert found["apart"] == 0.0


def test_a_parameter_whose_variance_was_frozen_at_0_is_named() -> None:
    for line in of(frozen_variance).values():
        assert "warm-up" in line
        assert "aux." in line


def test_dense_methods_count_steps_as_torch() -> None:
    assert of(dense_against_torch) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_one_process_lays_itself_out_anew(name: str) -> None:
    model = Trunk()
    model.first.requires_grad_(False)
    optimizer = METHODS[name](model.parameters())
    train(model, optimizer, 0, 2)
    model.first.requires_grad_(True)
    before = values(model)
    optimizer.zero_grad()
    refused = said(lambda: train(model, optimizer, 0, 3, seed=1))
    assert not refused
    assert not torch.equal(before["first.weight"], model.first.weight)
    assert optimizer.steps == 5


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.filterwarnings("error:parameters were changed:RuntimeWarning")
def test_a_layer_without_gradient_stays_in_a_local_step_too(name: str) -> None:
    """It has moved in the interval before. That it is put back is no change of a script's."""
    model = Trunk()
    optimizer = LOCAL[name](model.parameters())
    stayed = []
    for step in range(1, 13):
        idle = Plan.SKIP is optimizer.plan(step) is optimizer.plan(step - 1)
        before = model.aux.weight.detach().clone()
        train(model, optimizer, 0, 1, seed=step, aux=not idle)
        if idle or step > 1:  # in the first step 0/1 Adam has no variance
            assert torch.equal(model.aux.weight, before) is idle
        stayed.append(idle)
    assert any(stayed)


class Three(nn.Module):
    """The one in the middle lies on both sides of the border between two shards, the last one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(50), torch.ones(200), torch.ones(40)])

    def forward(self, slope: float, without: int | None) -> Tensor:
        return slope * sum(p.square().sum() for i, p in enumerate(self.parts) if i != without)  # type: ignore[return-value]


def unused_by_nodes(rank: int, world: int, name: str) -> list[tuple[bool, bool]]:
    """Of each virtual rank: whether all states of a parameter that is not used stay, and the moments of all others change."""
    found = []
    for without in (1, 2):
        model = Three()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizers = [getattr(birder, name)(model.parameters(), lr=0.01) for _ in range(4)]
        ranks = VirtualRanks(ddp, optimizers, topology=Topology(2, 2), hierarchical=True)
        for step in range(1, 4):
            before = [{k: t.clone() for k, t in o.units[0].state.items()} for o in optimizers]
            for turn in range(4):
                with ranks.turn(turn):
                    ddp(1.0 + turn / (step + turn), without if step == 3 else None).backward()
            ranks.step()
        for optimizer, states in zip(optimizers, before, strict=True):
            (unit,), comm, stays = optimizer.units, optimizer.comm, True
            there, used = (unit.zeros(dtype=torch.bool) for _ in range(2))
            for i, p in enumerate(unit.wholes):
                unit.view(there if p is model.parts[without] else used, i).fill_(True)
            changed = unit.state["m"] != states["m"]
            for key in ("m", "worker_error", "server_error") if name == "SigmaDeltaAdam" else ("m", "b"):
                held = (comm.chunk_of if key == "server_error" else comm.shard_of)(unit.padded)
                stays = stays and torch.equal(unit.state[key][there[held]], states[key][there[held]])
            found.append((stays, bool(changed[used[comm.shard_of(unit.padded)]].all())))
    return found


@pytest.mark.parametrize("name", ["Birder", "SigmaDeltaAdam"])
def test_the_state_of_what_is_not_used_stays_in_every_shard(name: str) -> None:
    (found,) = run_ranks(unused_by_nodes, 1, name)
    assert found == [(True, True)] * 8
