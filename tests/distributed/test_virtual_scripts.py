"""What scripts do with `birder.VirtualRanks`: what real ranks do with the same script, or one line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch

import birder
from birder import Topology, VirtualRanks
from tests.distributed.test_virtual import CASES, TWO, backward, make
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

Turn = Callable[[int, int], None]
"""The turn of a rank, with its batch of a step."""
Way = Callable[[VirtualRanks, Turn], None]


def ways(rank: int, world: int, name: str) -> dict[str, str]:
    """By what a script does with virtual ranks: what is said, or "" and nothing is wrong."""
    found = {}
    options = CASES[name][1]

    def both(turn: Turn, step: int) -> None:
        turn(0, step)
        turn(1, step)

    def tried(what: str, way: Way) -> None:
        model, ddp = make()
        ranks = VirtualRanks(
            ddp,
            [getattr(birder, name)(model.parameters(), **options) for _ in range(2)],
            topology=Topology(2, 1),
            unit_mb=0.0008,
        )

        def turn(rank: int, step: int) -> None:
            with ranks.turn(rank):
                backward(ddp, rank, step)

        try:
            for step in (1, 2):
                both(turn, step)
                ranks.step()
            way(ranks, turn)
            found[what] = ""
        except RuntimeError as error:
            found[what] = str(error)
        if not found[what]:
            for step in (5, 6):
                both(turn, step)
                ranks.step()
            if not ranks.optimizers[0].local_models:
                every = []
                for rank in range(2):
                    with ranks.turn(rank):
                        every.append(toy.flat(model))
                assert torch.equal(*every), what

    def scheduled(ranks: VirtualRanks, turn: Turn) -> None:
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in ranks.optimizers]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            both(turn, 3)
            ranks.step()
            for schedule in schedules:
                schedule.step()
        for optimizer in ranks.optimizers:
            assert optimizer.param_groups[0]["lr"] == options["lr"] / 2

    def no_backward(ranks: VirtualRanks, turn: Turn) -> None:
        turn(0, 3)
        with ranks.turn(1):
            pass
        ranks.step()

    def no_sync_alone(ranks: VirtualRanks, turn: Turn) -> None:
        for i in range(2):
            with ranks.turn(i), ranks.model.no_sync():
                backward(ranks.model, i, 3)
        ranks.step()

    def rounds(ranks: VirtualRanks, turn: Turn) -> None:
        both(turn, 3)
        both(turn, 4)

    def left_out(ranks: VirtualRanks, turn: Turn) -> None:
        before = toy.flat(ranks.model.module)
        both(turn, 3)
        ranks.zero_grad()
        assert torch.equal(before, toy.flat(ranks.model.module))

    def nested(ranks: VirtualRanks, turn: Turn) -> None:
        with ranks.turn(0):
            turn(1, 3)

    def step_inside(ranks: VirtualRanks, turn: Turn) -> None:
        turn(0, 3)
        with ranks.turn(1):
            backward(ranks.model, 1, 3)
            ranks.step()

    def own_step(ranks: VirtualRanks, turn: Turn) -> None:
        both(turn, 3)
        ranks.optimizers[1].step()

    def outside(ranks: VirtualRanks, turn: Turn) -> None:
        backward(ranks.model, 0, 3)
        ranks.step()

    def evaluated(ranks: VirtualRanks, turn: Turn) -> None:
        backward(ranks.model, 0, 3)
        ranks.model.zero_grad()
        both(turn, 3)
        ranks.step()

    def schedule_of_one(ranks: VirtualRanks, turn: Turn) -> None:
        both(turn, 3)
        ranks.optimizers[1].param_groups[0]["lr"] /= 2
        try:
            ranks.step()
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    def clamped(ranks: VirtualRanks, turn: Turn) -> None:
        for p in ranks.model.module.parameters():
            p.data.clamp_(-0.05, 0.05)
        try:
            both(turn, 3)
        except RuntimeError:
            both(turn, 3)  # it is refused again
        ranks.step()

    def replaced(ranks: VirtualRanks, turn: Turn) -> None:
        for p in ranks.model.module.parameters():
            p.data = p.data.clamp(-0.05, 0.05)
        with ranks.turn(0):
            assert all(float(p.detach().abs().max()) < 0.0501 for p in ranks.model.module.parameters())
        both(turn, 3)
        ranks.step()

    def of_one(ranks: VirtualRanks, turn: Turn) -> None:
        with ranks.turn(0):
            with torch.no_grad():
                ranks.model.module.second.weight.mul_(0.5)
            backward(ranks.model, 0, 3)
        turn(1, 3)
        ranks.step()

    def of_each(ranks: VirtualRanks, turn: Turn) -> None:
        for i in range(2):
            with ranks.turn(i):
                with torch.no_grad():
                    ranks.model.module.second.weight.mul_(0.5)
                backward(ranks.model, i, 3)
        ranks.step()

    def averaged(ranks: VirtualRanks, turn: Turn) -> None:
        with ranks.averaged():
            backward(ranks.model, 0, 3)
            ranks.model.zero_grad()

    def again(ranks: VirtualRanks, turn: Turn) -> None:
        VirtualRanks(
            ranks.model,
            [getattr(birder, name)(ranks.model.parameters(), **options) for _ in range(2)],
            topology=Topology(2, 1),
        )

    every = (scheduled, no_backward, no_sync_alone, rounds, left_out, nested, step_inside, own_step, outside, evaluated)
    for way in (*every, schedule_of_one, clamped, replaced, of_one, of_each, averaged, again):
        tried(way.__name__, way)
    return found


def loaded(rank: int, world: int, name: str) -> bool:
    """Whether weights that are loaded before the first turn are those of all ranks, as of real ones that all load them."""
    trained = []
    for before in (True, False):
        model, ddp = make()
        weights = {key: value * 0.5 for key, value in model.state_dict().items()}
        if before:
            model.load_state_dict(weights)
        optimizers = [getattr(birder, name)(model.parameters(), **CASES[name][1]) for _ in range(2)]
        ranks = VirtualRanks(ddp, optimizers, topology=Topology(2, 1), unit_mb=0.0008, seeds=[1, 2])
        if not before:
            model.load_state_dict(weights)
        for step in (1, 2, 3):
            for i in range(2):
                with ranks.turn(i):
                    backward(ddp, i, step)
            ranks.step()
        trained.append(toy.flat(model))
    return torch.equal(*trained)


@pytest.mark.parametrize("name", TWO)
def test_what_a_script_does_is_what_real_ranks_do_or_one_line(name: str) -> None:
    (said,) = run_ranks(ways, 1, name)
    apart = {"clamped": "in the turn of every rank", "replaced": "in the turn of every rank"} if name == "CSER" else {}
    words = {
        "scheduled": "^$",
        "no_backward": r"ranks \[1\] had no backward pass",
        "no_sync_alone": r"ranks \[0, 1\] had no backward pass outside of no_sync",
        "rounds": r"step\(\) was not called",
        "left_out": "^$",
        "nested": r"turn\(1\) was called inside turn\(0\)",
        "step_inside": r"step\(\) was called inside turn\(1\)",
        "own_step": "VirtualRanks steps this optimizer",
        "outside": r"before step\(\) a backward pass outside",
        "evaluated": "^$",
        "schedule_of_one": r"ranks \[1\] differ",
        "clamped": "^$",
        "replaced": "^$",
        "of_one": r"ranks \[1\] have other weights" if name == "Birder" else "^$",  # SGDM: there is one model
        "of_each": "^$",
        "averaged": "^$",
        "again": "another communication hook is registered",
    } | apart
    assert {way: text for way, text in said.items() if not re.search(words[way], text)} == {}
    assert set(said) == set(words)


@pytest.mark.parametrize("name", TWO)
def test_weights_loaded_before_the_first_turn_are_those_of_every_rank(name: str) -> None:
    assert run_ranks(loaded, 1, name) == [True]
