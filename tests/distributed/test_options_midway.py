"""Hyper-parameters that change between backward and `step`, and a GradScaler: what torch gives, or a refusal in that step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import birder
from birder import attach
from tests.distributed.test_ddp import wrap
from tests.distributed.test_guards import METHODS, make
from tests.helpers import toy
from tests.helpers.ordinary import said
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "Birder, coupled decay": ("Birder", {"decoupled": False}),
    "Birder, beta2": ("Birder", {"beta2": 0.99}),
    "0/1 Adam, released": ("ZeroOneAdam", {"variant": "deepspeed"}),
    "CSER, released": ("CSER", {"variant": "released"}),
    "EF-SGD, released": ("EFSGD", {"variant": "released"}),
    "SLAMB, v1": ("SLAMB", {"form": "v1"}),
    "SLAMB, v2": ("SLAMB", {"form": "v2"}),
}
USE_LR_EARLY = {"EfficientAdam", "ZeroOneAdam", "CSER", "EFSGD", "QSparseLocalSGD", "SparseLoCo"}
FEW = ("AdamW", "OneBitAdam", "ZeroOneAdam", "Birder", "CSER")
"""What `make test` runs on ranks."""
CHANGES = {
    "lr": lambda group, step: 0.01 / (step + 1),
    "weight_decay": lambda group, step: 0.02 * step,
    "betas": lambda group, step: (0.9 - 0.05 * step, 0.99),
    "beta": lambda group, step: 0.9 - 0.05 * step,
    "eps": lambda group, step: 1e-3 * step,
    "momentum": lambda group, step: 0.9 - 0.1 * step,
}
STEPS = 3


def run(variant: str, rank: int, option: str, late: bool, overlap: bool = True) -> torch.Tensor | tuple[int, str]:
    """Parameters after STEPS steps, in which `option` changed before or after backward; or the step that refused, and why."""
    name, options = VARIANTS[variant]
    model = toy.make()
    ddp = wrap(model)
    optimizer = make(name, model, lr=0.01, weight_decay=0.1, **options)
    attachment = attach(ddp, optimizer, overlap=overlap)

    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group[option] = CHANGES[option](group, step)

    try:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss = toy.loss(ddp, rank, step)
            if not late:
                change(step)
            loss.backward()
            if late:
                change(step)
            optimizer.step()
    except RuntimeError as e:
        return step, str(e)
    finally:
        attachment.close()
    return toy.flat(model)


def all_options(rank: int, world: int, few: bool) -> dict[tuple[str, str], tuple[Any, Any, Any]]:
    ends = {}
    for variant, (name, options) in VARIANTS.items():
        if (variant in FEW) != few:
            continue
        for option in CHANGES:
            known = make(name, toy.make()).param_groups[0]
            if option not in known or (option != "lr" and options):
                continue
            early = run(variant, rank, option, late=False)
            late = run(variant, rank, option, late=True)
            inside = run(variant, rank, option, late=True, overlap=False)
            ends[variant, option] = tuple(x if isinstance(x, tuple) else x.numpy() for x in (early, late, inside))
    return ends


@pytest.mark.parametrize("few", [True, slow(False)])
def test_an_option_of_this_step_counts_or_is_refused_in_this_step(few: bool) -> None:
    refused = set()
    for of_rank in run_ranks(all_options, 2, few):
        for (variant, option), (early, late, inside) in of_rank.items():
            assert (inside == early).all(), (variant, option)  # inside `step` everything is read there
            if isinstance(late, tuple):
                step, said = late
                assert step == 1, (variant, option)
                assert f"{option} changed between backward and step()" in said
                assert "\n" not in said
                refused.add((VARIANTS[variant][0], option))
            else:
                assert (late == early).all(), (variant, option)
    tried = {name for variant, (name, _) in VARIANTS.items() if (variant in FEW) == few}
    assert {name for name, option in refused if option == "lr"} == USE_LR_EARLY & tried
    assert not {name for name, _ in refused} & {"SGDM", "AdamW", "BertAdam", "LAMB"}


def rates_midway(rank: int, world: int) -> dict[str, str]:
    """What is said where a rate changes after backward: a tensor in place, as torch's schedules do, or a later group's."""
    found = {}
    for case in ("in place", "second group"):
        model = toy.make()
        rates = [torch.tensor(0.01), torch.tensor(0.01)]
        layers = [list(model.first.parameters()), list(model.second.parameters())]
        groups = [{"params": p, "lr": lr} for p, lr in zip(layers, rates, strict=True)]
        ddp, optimizer = wrap(model), birder.EFSGD(groups, ratio=2, block=32)
        attach(ddp, optimizer)
        toy.loss(ddp, rank, 1).backward()
        if case == "in place":
            rates[0].fill_(0.02)
        else:
            optimizer.param_groups[1]["lr"] = 0.02
        found[case] = said(optimizer.step)
    return found


def test_a_rate_that_changes_in_place_or_in_a_later_group_is_refused_too() -> None:
    (found,) = run_ranks(rates_midway, 1)
    for case, line in found.items():
        assert "lr changed between backward and step()" in line, case


class Watched(dict):
    """A parameter group that notes what is read of it."""

    def __init__(self, group: dict[str, Any], seen: set[str]) -> None:
        super().__init__(group)
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_only_the_update_reads_is_named_as_such(variant: str) -> None:
    """`read_in_update` stands against what `exchange` really reads."""
    name, options = VARIANTS[variant]
    model = toy.make()
    optimizer = make(name, model, weight_decay=0.1, **options)
    optimizer.bind()
    early: set[str] = set()
    for step in range(1, 7):
        toy.loss(model, 0, step).backward()
        for unit in optimizer.units:
            unit.group = Watched(optimizer.param_groups[0], early)
        if optimizer.plan(step).own:
            with torch.no_grad():
                optimizer.feed(list(model.parameters()), [p.grad for p in model.parameters()])
        for unit in optimizer.units:
            unit.group = optimizer.param_groups[0]
        optimizer.step()
        optimizer.zero_grad()
    assert not early & optimizer.read_in_update
