"""What would train wrongly without a word is refused: in one line that says what would be right."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import attach
from tests.helpers import toy
from tests.helpers.ranks import run_ranks

METHODS: dict[str, dict[str, Any]] = {
    "SGDM": {},
    "AdamW": {},
    "BertAdam": {},
    "LAMB": {},
    "OneBitAdam": {"warmup_steps": 2},
    "OneBitLAMB": {"warmup_steps": 2},
    "ZeroOneAdam": {"warmup_steps": 2, "local_doubling": 1},
    "Birder": {},
    "SigmaDeltaAdam": {},
    "Lion": {},
    "EfficientAdam": {},
    "CSER": {"block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 2},
    "EFSGD": {"block": 32, "ratio": 2},
    "EF21SGDM": {"block": 32, "ratio": 2},
    "QSparseLocalSGD": {"block": 32, "ratio": 2, "sync_every": 3},
    "SLAMB": {"sync_every": 3},
    "SparseLoCo": {"sync_every": 3, "top_k": 4, "chunk": 32},
}


def make(name: str, model: nn.Module, **options: Any) -> birder.BucketOptimizer:
    optimizer: birder.BucketOptimizer = getattr(birder, name)(model.parameters(), **(METHODS[name] | options))
    return optimizer


def train(model: nn.Module, optimizer: birder.BucketOptimizer, steps: range, worker: int = 0) -> None:
    toy.train(model, optimizer, worker, steps)


# ---- not attached ----------------------------------------------------------------------------------------------------


def unattached(rank: int, world: int) -> list[str]:
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = make("Birder", model)
    said = []
    toy.loss(ddp, rank, 1).backward()
    alone = toy.make()
    control = make("Birder", alone)
    control.bind()
    toy.loss(alone, rank, 1).backward()
    control.step()
    for call in (optimizer.step, lambda: optimizer.load_state_dict(control.state_dict())):
        try:
            call()
        except RuntimeError as e:
            said.append(str(e))
    attach(ddp, optimizer)  # neither call has bound it
    return said


def test_a_step_on_several_ranks_without_attach_is_refused() -> None:
    for said in run_ranks(unattached, 2):
        assert len(said) == 2
        assert all("not attached" in s and "birder.attach" in s for s in said)


# ---- clipping by others ------------------------------------------------------------------------------------------------


def clipped_by_others(rank: int, world: int, name: str, how: dict[str, Any]) -> list[str]:
    model = toy.make()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=how.pop("view", False))
    optimizer = make(name, model)
    attach(ddp, optimizer, **how)
    said = []
    for step in range(1, 7):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        toy.loss(ddp, rank, step).backward()
        if step in (3, 5):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        try:
            optimizer.step()
        except RuntimeError as e:
            said.append(f"{step}: {e}")
    return said


@pytest.mark.parametrize("how", [{}, {"view": True}])
def test_clipping_after_messages_were_taken_is_refused(how: dict[str, Any]) -> None:
    for said in run_ranks(clipped_by_others, 2, "Birder", how):
        assert [s[0] for s in said] == ["3", "5"]
        assert all("max_grad_norm" in s and "overlap=False" in s for s in said)


@pytest.mark.parametrize(("name", "how"), [("SGDM", {}), ("Birder", {"overlap": False})])
def test_clipping_that_has_an_effect_is_not_refused(name: str, how: dict[str, Any]) -> None:
    assert run_ranks(clipped_by_others, 2, name, how) == [[], []]


def poisoned(rank: int, world: int, name: str, where: int | None) -> Any:
    """Two steps with a limit that clips; in the first, one element of rank `where`'s gradient is not finite."""
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = make(name, model, lr=0.01, max_grad_norm=0.5)
    attach(ddp, optimizer)
    for step in (1, 2):
        optimizer.zero_grad()
        loss = toy.loss(ddp, rank, step) * 50
        loss.backward()
        if rank == where and step == 1:
            assert model.first.bias.grad is not None
            model.first.bias.grad[0] = math.inf
        optimizer.step()
    return toy.flat(model).numpy()


@pytest.mark.parametrize("name", ["Birder", "CSER", "SLAMB", "ZeroOneAdam", "OneBitLAMB"])
def test_an_element_that_is_not_finite_does_not_clip_everything_to_nothing(name: str) -> None:
    """It counts as 0, in the norm as everywhere: all but the elements that it reaches move as without it."""
    start = toy.flat(toy.make()).numpy()
    clean, spoilt = run_ranks(poisoned, 2, name, None), run_ranks(poisoned, 2, name, 1)
    for a, b in zip(clean, spoilt, strict=True):
        assert ((a != start) == (b != start)).mean() > 0.98
        assert (b != start).any()


def test_a_norm_beyond_fp32_clips_to_the_limit() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = birder.EFSGD([p], lr=1.0, momentum=0.0, ratio=1, max_grad_norm=1.0)
    p.grad = torch.full((4,), 1e30)  # its squares are infinite in fp32
    optimizer.step()
    assert p.detach() == pytest.approx(-0.5)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_state_dict_does_not_bind(name: str) -> None:
    model = toy.make()
    optimizer = make(name, model)
    state = optimizer.state_dict()
    assert state["units"] is None
    optimizer.load_state_dict(state)
    assert optimizer.units == []
    optimizer.bind()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_the_original(name: str, how: str) -> None:
    model = toy.make()
    optimizer = make(name, model, lr=0.01)
    train(model, optimizer, range(1, 5))
    # Model and optimizer together, so that the copy holds the copied parameters.
    pair = (model, optimizer)
    other, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copied.state_dict()["steps"] == 4
    for m, o in ((model, optimizer), (other, copied)):
        train(m, o, range(5, 9))
    assert torch.equal(toy.flat(model), toy.flat(other))


def test_what_is_no_state_and_what_is_another_methods_is_refused() -> None:
    ours = make("CSER", toy.make())
    ours.bind()
    theirs = make("EFSGD", toy.make())
    theirs.bind()
    with pytest.raises(
        ValueError, match="this is not the state of CSER: it lacks steps, signature, units, param_groups"
    ):
        ours.load_state_dict({})
    with pytest.raises(ValueError, match="holds what EFSGD keeps, this optimizer is CSER"):
        ours.load_state_dict(theirs.state_dict())
    torchs = torch.optim.SGD((model := toy.make()).parameters(), 0.1, momentum=0.9)
    train(model, torchs, range(1, 2))
    with pytest.raises(ValueError, match=r"this is not the state.*load the model of that checkpoint alone"):
        ours.load_state_dict(torchs.state_dict())
    by_parameter = {key: ours.state_dict()[key] for key in ("state", "param_groups")}
    with pytest.raises(ValueError, match=r"this is not the state.*this optimizer keeps it by unit"):
        ours.load_state_dict(by_parameter)


def state_of_another(rank: int, world: int, name: str) -> str:
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = make(name, model, lr=0.01)
    attach(ddp, optimizer)
    train(ddp, optimizer, range(1, 4), rank)
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, optimizer.state_dict())
    try:
        optimizer.load_state_dict(everyone[0])
    except ValueError as e:
        return str(e)
    return ""


def test_the_state_of_another_rank_is_refused() -> None:
    first, second = run_ranks(state_of_another, 2, "Birder")
    assert first == ""
    assert "saved by rank 0, this is rank 1" in second
    assert "on every rank" in second
    assert run_ranks(state_of_another, 2, "SGDM") == ["", ""]  # the same on all ranks


def loaded_too_early(rank: int, world: int, early: bool) -> str:
    model = toy.make()
    ddp = DistributedDataParallel(model)
    optimizer = make("ZeroOneAdam", model, lr=0.01, local_limit=4)
    attach(ddp, optimizer)
    step = 1
    # Of a step in which ranks meet, the other rank would wait for the one that is told.
    while step < 5 or optimizer.synced(step - 1) or optimizer.synced(step):  # type: ignore[attr-defined]
        train(ddp, optimizer, range(step, step + 1), rank)
        step += 1
    parameters, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = toy.make()
    if early:
        again.load_state_dict(parameters)
    ddp = DistributedDataParallel(again)
    optimizer = make("ZeroOneAdam", again, lr=0.01, local_limit=4)
    attach(ddp, optimizer)
    optimizer.load_state_dict(state)
    if not early:
        again.load_state_dict(parameters)  # after the state: the order does not matter
    optimizer.zero_grad()
    toy.loss(ddp, rank, step).backward()
    try:
        optimizer.step()
    except RuntimeError as e:
        return str(e)
    return ""


def test_parameters_loaded_before_ddp_gave_all_ranks_those_of_rank_0_are_noticed() -> None:
    assert run_ranks(loaded_too_early, 2, False) == ["", ""]
    first, second = run_ranks(loaded_too_early, 2, True)
    assert first == ""
    assert "after DistributedDataParallel has been built" in second


def test_a_fingerprint_is_of_every_parameter() -> None:
    model = toy.make()
    optimizer = make("ZeroOneAdam", model)
    optimizer.bind(unit_mb=0.0008)
    assert len(optimizer.units) > 1
    seen = {optimizer.fingerprint()}
    for p in model.parameters():
        p.data.view(-1)[-1] += 1
        seen.add(optimizer.fingerprint())
    assert len(seen) == 1 + len(list(model.parameters()))


# ---- arguments ---------------------------------------------------------------------------------------------------------


def refusal(name: str, params: Any, **options: Any) -> str:
    try:
        make(name, params, **options)
    except ValueError as e:
        return str(e)
    return "nothing"


@pytest.mark.parametrize("name", METHODS)
def test_no_method_takes_nonsense_for_a_number(name: str) -> None:
    for option in ("lr", "weight_decay"):
        for value in (math.inf, math.nan, True, "0.1", 1e300, -1.0, None):
            said = refusal(name, toy.make(), **{option: value})
            assert said.startswith(f"{option} must be at least 0"), (option, value, said)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_takes_nonsense_for_the_common_options(name: str) -> None:
    for option, value in {"max_grad_norm": math.inf, "seed": True, "wire": "fp64"}.items():
        with pytest.raises(ValueError, match=f"^{option} must be"):
            make(name, toy.make(), **{option: value})


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_float32(name: str) -> None:
    """bf16 parameters hardly move at usual rates, of complex ones the real part alone would be trained."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        said = refusal(name, nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=dtype))]))
        assert said.startswith("parameters must be float32, got"), (dtype, said)
    assert said.endswith("torch.view_as_real of it the parameter")  # model.float() leaves complex ones as they are


@pytest.mark.parametrize("name", ["Birder", "OneBitAdam", "SGDM"])
def test_sparse_gradients_are_refused(name: str) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = make(name, model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        optimizer.step()


def sparse_under_ddp(rank: int, world: int) -> dict[str, str]:
    said = {}
    for name in ("Birder", "OneBitAdam", "AdamW"):
        ddp = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
        optimizer = make(name, ddp.module)
        attach(ddp, optimizer)
        try:
            ddp(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        except RuntimeError as e:
            said[name] = str(e)
    return said


def test_sparse_gradients_are_refused_in_the_first_backward_pass_of_ddp() -> None:
    for said in run_ranks(sparse_under_ddp, 2):
        assert len(said) == 3
        assert all("gradients must be dense" in line for line in said.values())


# ---- one rank refuses a step -------------------------------------------------------------------------------------------


def one_refuses(rank: int, world: int) -> dict[str, list[str]]:
    """What each rank hears of steps that rank 1 alone cannot take, and whether they go on together afterwards."""
    found = {}
    for name, options in (("Birder", {}), ("OneBitAdam", {}), ("Birder", {"max_grad_norm": 1.0})):
        model = toy.make()
        ddp = DistributedDataParallel(model)
        optimizer = make(name, model, lr=0.01, **options)
        attachment = attach(ddp, optimizer, overlap=False)
        train(ddp, optimizer, range(1, 4), rank)
        heard = []
        for what in ("sparse", "none", "option"):
            optimizer.zero_grad()
            toy.loss(ddp, rank, 4).backward()
            first = next(iter(model.parameters()))
            kept = first.grad
            if rank == 1 and what == "sparse":
                first.grad = kept.to_sparse()  # type: ignore[union-attr]
            elif rank == 1 and what == "none":
                optimizer.zero_grad()
            elif rank == 1:
                optimizer.state[first]["m"] = torch.zeros_like(first)
            try:
                optimizer.step()
            except RuntimeError as e:
                heard.append(str(e))
            if what == "option":
                optimizer.load_state_dict(optimizer.state_dict())
        train(ddp, optimizer, range(4, 6), rank)
        found[f"{name} {options}"] = [*heard, str(toy.flat(model).tolist())]
        attachment.close()
    return found


def test_a_step_that_one_rank_refuses_is_refused_by_all_and_nobody_waits() -> None:
    first, second = run_ranks(one_refuses, 2)
    for case, heard in first.items():
        theirs = second[case]
        assert heard[0] == heard[2] == "rank 1 has refused this step, and says why: no rank has taken it"
        assert "gradients must be dense" in theirs[0]
        assert heard[1] == theirs[1] == "rank 1 has no gradient at all in this step, rank 0 has some"
        assert "optimizer.state cannot be replaced" in theirs[2]
        assert heard[3] == theirs[3]
