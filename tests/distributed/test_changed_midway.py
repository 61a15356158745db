"""What a script changes while it trains: groups that join, layers that come back, momentum, clipping, states not copied.

The control of the dense methods is torch's own optimizer with the same script. Other methods are compared with what
they are without the change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from birder.checkpoint import elastic
from birder.optim.contract import Plan
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.virtual import World

STEPS = 12
DENSE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (birder.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGDM": (birder.SGDM, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}
Script = Callable[[nn.Module, Any, int], None]


def steps(model: nn.Module, optimizer: Any, change: Script) -> Iterator[int]:
    """One process's script, with `change` before each step."""
    for step in range(1, STEPS + 1):
        change(model, optimizer, step)
        optimizer.zero_grad()
        toy.loss(model, 0, step).backward()
        optimizer.step()
        yield step


def joins(model: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        del optimizer.param_groups[1:]
    if step == 6:
        optimizer.add_param_group({"params": list(model.second.parameters())})


def unfreezes(model: Any, optimizer: Any, step: int) -> None:
    model.second.requires_grad_(step > 5)
    if step == 1:
        optimizer.zero_grad()


def comes_back(model: Any, optimizer: Any, step: int) -> None:
    """Frozen for four steps, while the optimizer is bound again, as a new attachment does."""
    frozen = 4 <= step < 8
    if step in (4, 8):
        model.second.requires_grad_(not frozen)
        for p in model.second.parameters():
            p.grad = None
        if isinstance(optimizer, birder.BucketOptimizer):
            optimizer.bind()


def taken_out_and_back(model: Any, optimizer: Any, step: int) -> None:
    group = optimizer.param_groups[1]["params"]
    if step == 5:
        optimizer.out = group.pop()
    if step == 8:
        group.append(optimizer.out)


def taken_out_and_forgotten(model: Any, optimizer: Any, step: int) -> None:
    """With its state: when it comes back it begins afresh."""
    taken_out_and_back(model, optimizer, step)
    if step == 5:
        del optimizer.state[optimizer.out]


def grows(model: Any, optimizer: Any, step: int) -> None:
    """Another parameter takes the place of one, and its state, as where points are added to a scene."""
    if step == 6:
        old = model.second.bias
        model.second.bias = optimizer.param_groups[1]["params"][1] = nn.Parameter(old.detach() * 0.5)
        optimizer.state[model.second.bias] = {
            name: t.flip(0) if t.shape == old.shape else t for name, t in optimizer.state.pop(old).items()
        }


def momentum_off_and_on(model: Any, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.0 if 4 <= step < 8 else 0.9


def state_not_copied(model: Any, optimizer: Any, step: int) -> None:
    if step == 4:
        optimizer.kept = optimizer.state_dict()
    if step == 8:
        optimizer.load_state_dict(optimizer.kept)


def rolls_back(model: Any, optimizer: Any, step: int) -> None:
    """To the state of before a layer was frozen for two steps."""
    model.second.requires_grad_(step not in (5, 6))
    if step == 4:
        optimizer.kept = copy.deepcopy(optimizer.state_dict())
    if step == 7:
        optimizer.load_state_dict(optimizer.kept)


CHANGES: list[Script] = [
    joins, unfreezes, comes_back, taken_out_and_back, taken_out_and_forgotten, grows, momentum_off_and_on,
    state_not_copied, rolls_back,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", DENSE)
def test_a_dense_method_does_what_torch_does(method: str, change: Script) -> None:
    ours, torchs, options = DENSE[method]
    models = [toy.make() for _ in range(2)]
    for model, make in zip(models, (ours, torchs), strict=True):
        trunk = [*model.embed.parameters(), *model.first.parameters(), model.scale]
        optimizer = make([{"params": trunk}, {"params": list(model.second.parameters())}], **options)
        for _ in steps(model, optimizer, change):
            pass
    torch.testing.assert_close(*map(toy.flat, models), rtol=0, atol=1e-6)


def test_a_state_of_another_shape_is_refused_before_anything_is_laid_out() -> None:
    model = toy.make()
    optimizer = birder.SGDM(model.parameters())
    for _ in steps(model, optimizer, lambda *_: None):
        pass
    before, old = toy.flat(model), model.second.bias
    model.second.bias = optimizer.param_groups[0]["params"][-1] = nn.Parameter(old.detach().clone())
    optimizer.state[model.second.bias] = {"momentum": torch.zeros(1)}
    for _ in range(2):
        optimizer.zero_grad()
        toy.loss(model, 0, 1).backward()
        with pytest.raises(ValueError, match=r"momentum of shape \(1,\).*give it that shape"):
            optimizer.step()
    del optimizer.state[model.second.bias]
    optimizer.step()
    assert not torch.equal(before, toy.flat(model))


LOCAL: dict[str, dict[str, Any]] = {
    "QSparseLocalSGD": {"ratio": 8, "sync_every": 4, "block": 8},
    "SparseLoCo": {"sync_every": 4, "top_k": 2, "chunk": 32},
}


@pytest.mark.parametrize("method", LOCAL)
def test_weights_that_join_within_an_interval_are_kept(method: str) -> None:
    """The rate is so small that nothing else moves them."""
    model = toy.make()
    before = model.second.weight.detach().clone()
    optimizer = getattr(birder, method)([p for p in model.parameters() if p.dim() < 3], lr=1e-7, **LOCAL[method])
    optimizer.param_groups[0]["params"] = [model.embed.weight, *model.first.parameters(), model.scale]
    for step in steps(model, optimizer, lambda *_: None):
        if step == 6:
            optimizer.add_param_group({"params": list(model.second.parameters())})
    torch.testing.assert_close(model.second.weight.detach(), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["CSER", "EFSGD", "QSparseLocalSGD"])
def test_momentum_that_begins_later_is_there(method: str) -> None:
    """As of an optimizer that was bound with it, and whose momentum is 0 until then."""
    found = []
    for early in (0.0, 0.9):
        model = toy.make()
        options: dict[str, Any] = {"ratio": 8} if method != "CSER" else {"gradient_ratio": 2, "model_ratio": 2}
        optimizer = getattr(birder, method)(model.parameters(), lr=0.05, momentum=early, block=8, **options)

        optimizer.bind()

        def change(model: nn.Module, optimizer: Any, step: int) -> None:
            optimizer.param_groups[0]["momentum"] = 0.0 if step < 4 else 0.9

        list(steps(model, optimizer, change))
        saved = optimizer.state_dict()
        again = getattr(birder, method)(model.parameters(), lr=0.05, momentum=early, block=8, **options)
        again.load_state_dict(saved)
        assert torch.equal(again.state_dict()["units"][0]["momentum"], saved["units"][0]["momentum"])
        found.append(toy.flat(model))
    assert torch.equal(*found)


def test_a_parameter_that_shares_memory_moves_where_the_other_is_unused() -> None:
    for make in (birder.Birder, birder.AdamW, birder.QSparseLocalSGD):
        used, unused = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        unused.weight.data = used.weight.data
        before = used.weight.detach().clone()
        optimizer = make([used.weight, unused.weight], lr=0.1)
        for _ in range(3):
            used(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert not torch.equal(used.weight.detach(), before)


def test_states_of_other_worlds_are_read_on_the_cpu() -> None:
    """Whatever device a script makes tensors on by default."""
    model = toy.make()
    optimizer = birder.Birder(model.parameters(), lr=0.01)
    toy.train(model, optimizer, 0, range(1, 3))
    state = optimizer.state_dict()
    with torch.device("meta"):
        resized = elastic.resize(optimizer, [state])
    assert all(not t.is_meta for unit in resized["units"] for t in unit.values())


# ---- under DDP ---------------------------------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> dict[str, str]:
    """What is said in the first step of scripts that would go wrong."""

    def said(script: Callable[[Any, DistributedDataParallel, Any], None], **ddp: Any) -> str:
        model = toy.make()
        wrapped, optimizer = DistributedDataParallel(model, **ddp), birder.Birder(model.parameters(), lr=0.01)
        try:
            script(model, wrapped, optimizer)
        except RuntimeError as error:
            return str(error)
        return ""

    def sgd(model: Any, ddp: Any, optimizer: Any, **options: Any) -> None:
        attach(ddp, optimizer, **options)
        other = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            other.zero_grad()
            loss = toy.loss(ddp, rank, 1)
            loss.backward()
            return loss

        other.step(closure)

    def clips_later(model: Any, ddp: Any, optimizer: Any) -> None:
        attach(ddp, optimizer)
        optimizer.max_grad_norm = 1.0
        toy.loss(ddp, rank, 1).backward()
        optimizer.step()

    def skips(model: Any, ddp: Any, optimizer: Any) -> None:
        attach(ddp, optimizer)

    def delays(model: Any, ddp: Any, optimizer: Any) -> None:
        late = [("second.weight", model.second.weight)]
        attach(
            DistributedDataParallel(
                model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model.first.weight
            ),
            optimizer,
        )

    return {
        "delays": said(delays),
        "closure": said(sgd),
        "closure in step": said(lambda *a: sgd(*a, overlap=False)),
        "clips": said(clips_later),
        "skips": said(skips, skip_all_reduce_unused_params=True, find_unused_parameters=True),
    }


def test_what_would_go_wrong_is_refused_in_the_first_step() -> None:
    for of_rank in run_ranks(refusals, 2):
        for name, words in {
            "delays": "delay_all_reduce_named_params",
            "closure": "SGD steps",
            "closure in step": "SGD steps",
            "clips": "max_grad_norm was set after attach",
            "skips": "skip_all_reduce_unused_params",
        }.items():
            assert words in of_rank[name], (name, of_rank[name])
            assert "\n" not in of_rank[name]


def accepted(rank: int, world: int) -> list[bool]:
    """A forward pass between backward and step, which changes the gradient tensors; an attribute that ranks differ in."""
    same = []
    for name, options in {"Birder": {}, "CSER": {"gradient_ratio": 2}, "OneBitAdam": {"warmup_steps": 1}}.items():
        ends = []
        for between in (False, True):
            model = toy.make(width=3000)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.05)
            optimizer = getattr(birder, name)(model.parameters(), lr=0.01, **options)
            optimizer.local_rank = rank
            attachment = attach(ddp, optimizer)
            for step in range(1, 4):
                optimizer.zero_grad()
                toy.loss(ddp, rank, step).backward()
                if between:
                    toy.loss(ddp, rank, 100 + step)
                optimizer.step()
            attachment.close()
            ends.append(toy.flat(model))
        same.append(torch.equal(*ends))
    return same


def test_a_forward_pass_before_step_and_a_ranks_own_attribute_change_nothing() -> None:
    assert run_ranks(accepted, 2) == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("AdamW", {"lr": 0.01}),
        ("Birder", {"lr": 0.01}),
        ("SigmaDeltaAdam", {"lr": 0.01}),
        ("CSER", {"lr": 0.01, "gradient_ratio": 2, "reset_every": 3, "block": 8}),
    ],
)
def test_a_run_resumed_while_a_layer_is_frozen_is_the_uninterrupted_one(method: str, options: dict[str, Any]) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = toy.make()
        return model, getattr(birder, method)(model.parameters(), **options)

    model, optimizer = make()
    for step in steps(model, optimizer, comes_back):
        if step == 6:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = make()
    again.load_state_dict(saved[0])
    again.second.requires_grad_(False)
    resumed.load_state_dict(saved[1])

    for step in range(7, STEPS + 1):
        comes_back(again, resumed, step)
        resumed.zero_grad()
        toy.loss(again, 0, step).backward()
        resumed.step()
    assert torch.equal(toy.flat(again), toy.flat(model))


APART: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "QSparseLocalSGD": (birder.QSparseLocalSGD, {"sync_every": 8}, "sync_every", 5),
    "QSparseLocalSGD, always": (birder.QSparseLocalSGD, {"sync_every": 8}, "sync_every", 1),
    "SparseLoCo": (birder.SparseLoCo, {"sync_every": 8, "chunk": 32, "top_k": 8}, "sync_every", 5),
    "ZeroOneAdam": (
        birder.ZeroOneAdam,
        {"warmup_steps": 1, "local_doubling": 1, "local_limit": 8, "eps": 1e-3},
        "local_limit",
        1,
    ),
}


def meetings(rank: int, world: int, case: str, loaded: bool) -> list[bool]:
    """Whether ranks have one model after each step that ends an interval, whose length changed within one."""
    method, options, name, after = APART[case]
    run = World(lambda params: method(params, lr=0.01, **options), 2)
    run.train(range(1, 6))
    assert run.optimizers[0].plan(5) is Plan.SKIP
    if loaded:
        saved = run.saved()
        run = World(lambda params: method(params, lr=0.01, **(options | {name: after})), 2)
        run.load(saved)
    else:
        for optimizer in run.optimizers:
            setattr(optimizer, name, after)
    same = []
    for step in range(6, 14):
        run.train([step])
        if run.optimizers[0].plan(step) is not Plan.SKIP:
            one, two = run.models()
            same.append(torch.equal(one, two))
    return same


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("case", APART)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranks_meet_where_an_interval_was_changed_within_one(case: str, loaded: bool) -> None:
    """By the new schedule an interval begins where by the old one models were apart: they stayed so for good."""
    (same,) = run_ranks(meetings, 1, case, loaded)
    assert len(same) > 0
    assert all(same)
