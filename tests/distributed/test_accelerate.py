"""Accelerate, the real one, on 2 ranks: the example's own code is what runs.

Its cases run one after the other in one pair of processes, which is where the time goes. Two rounds of them: what protects a
change, and the runs that are interrupted and resumed.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import birder
from birder.hooks.attachment import unwrap_optimizer
from tests.helpers import load, toy
from tests.helpers.integrations import METHODS, Found, both, check_resumed, said
from tests.helpers.ranks import run_ranks


def in_accelerate(rank: int, world: int, folder: Path, resume: bool) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    from accelerate.state import AcceleratorState

    loop = load("examples/accelerate_loop.py")
    torch.manual_seed(0)
    found: dict[str, Any] = {}

    def run(name: str, where: str, epochs: int, **options: Any) -> Any:
        AcceleratorState._reset_state(True)
        method, arguments = METHODS[name]
        return loop.train(folder / where, epochs, method, arguments, **options)

    if resume:
        for name in METHODS:
            found[name] = toy.flat(run(name, f"{name} a", 2)[0]).numpy()
            run(name, f"{name} b", 1)
            found[f"{name} resumed"] = toy.flat(run(name, f"{name} b", 2)[0]).numpy()
        return found
    for name in ("Birder", "OneBitAdam"):
        found[f"{name} half"] = toy.flat(run(name, f"{name} half", 1)[0]).numpy()
    loop.POINTS, loop.BATCH = 48, 8  # three batches an epoch, and two steps
    for epochs in (3, 4):
        found["odd epochs"] = unwrap_optimizer(run("Birder", "odd", epochs)[1]._optimizers[0]).steps
    loop.POINTS, loop.BATCH = 512, 16
    net, accelerator = run("Birder", "clipping", 0)
    found["start"] = toy.flat(net).numpy()
    loss = net(torch.ones(2, 2)).sum()
    accelerator.backward(loss)
    found["clip"] = said(lambda: accelerator.clip_grad_norm_(net.parameters(), 1.0))
    found["clip value"] = said(lambda: accelerator.clip_grad_value_(net.parameters(), 1.0))
    found["norm"] = float(accelerator.clip_grad_norm_(net.parameters(), float("inf")))
    found["true norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    critic = nn.Linear(2, 2)
    critic(torch.full((2, 2), 9.0)).sum().backward()
    found["another's clip"] = said(lambda: accelerator.clip_grad_norm_(critic.parameters(), 1.0))
    accelerator.clip_grad_value_(list(critic.parameters()), 0.01)
    found["another's largest"] = max(float(p.grad.abs().max()) for p in critic.parameters() if p.grad is not None)
    unwrap_optimizer(accelerator._optimizers[0]).attachment.close()
    found["closed clip"] = said(lambda: accelerator.clip_grad_norm_(net.parameters(), 1.0))
    found["bf16"] = toy.flat(run("OneBitAdam", "bf16", 1, mixed_precision="bf16")[0]).numpy()
    found["compiled"] = toy.flat(run("Birder", "compiled", 1, dynamo_backend="aot_eager")[0]).numpy()
    found["one rank's"] = said(lambda: accelerator._optimizers[0].load_state_dict({"state": {}, "param_groups": []}))
    found |= saved_by_hand(rank, loop, accelerator, folder)
    found["two models"] = two_models(rank, loop, accelerator, folder / "two")
    found["each alone"] = each_alone(loop)
    return found


def each_alone(loop: ModuleType) -> str:
    """The error when Accelerate finds no GPU and `cpu=True` is missing: every rank would train alone."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = loop.Accelerator()
    assert accelerator.num_processes == 1
    net = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(net, birder.Birder(net.parameters()))
    return said(lambda: loop.attach(accelerator, model, optimizer))


def saved_by_hand(rank: int, loop: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """Two attempts with one accelerator, as in a search for a batch size; states by torch.save next to save_state."""

    def attempt() -> tuple[nn.Module, Any]:
        accelerator.free_memory()
        net = nn.Linear(2, 2)
        plain = birder.Birder(net.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(net, plain)
        loop.attach(accelerator, model, plain)  # either does: the prepared one has it inside
        return model, optimizer

    def step(model: nn.Module, optimizer: Any) -> None:
        accelerator.backward(model(torch.full((2, 2), 1.0 + rank)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = attempt()
    for _ in range(3):
        step(model, optimizer)
    model, optimizer = attempt()
    step(model, optimizer)
    asked: list[bool] = []
    hook = accelerator.register_save_state_pre_hook(lambda *_: asked.append("units" in optimizer.state_dict()))
    accelerator.save_state(str(folder / "state"))
    hook.remove()
    path = folder / f"by hand {rank}.pt"
    torch.save(optimizer.state_dict(), path)
    saved = {"weights": toy.flat(model), "momentum": unwrap_optimizer(optimizer).units[0].state["m"].clone()}

    def there() -> bool:
        now = unwrap_optimizer(optimizer)
        return now.steps == 1 and torch.equal(now.units[0].state["m"], saved["momentum"])

    found: dict[str, Any] = {}
    step(model, optimizer)
    optimizer.load_state_dict(torch.load(path))
    found["by hand"] = there()
    step(model, optimizer)
    accelerator.load_state(str(folder / "state"))
    found["second attempt"] = there() and torch.equal(toy.flat(model), saved["weights"])
    with optimizer.averaged():  # the models are equal
        found["second attempt"] &= torch.equal(toy.flat(model), saved["weights"])
    torch.distributed.barrier()
    other = torch.load(folder / f"by hand {1 - rank}.pt")
    loose = birder.Birder(toy.make().parameters())
    found["own hook"] = asked, "every_rank" in torch.load(folder / "state/optimizer.bin")
    torch.distributed.barrier()
    if rank == 0:  # as versions without the order of hooks have left it, in which a script's hook was given the note
        torch.save(torch.load(path), folder / "state/optimizer.bin")
    torch.distributed.barrier()
    step(model, optimizer)
    accelerator.load_state(str(folder / "state"))
    found["rank 0's in the file"] = there()
    found["not prepared"] = said(lambda: loop.attach(accelerator, model, loose))
    found["other rank's"] = said(lambda: optimizer.load_state_dict(other))
    return found


def two_models(rank: int, loop: ModuleType, accelerator: Any, folder: Path) -> list[float]:
    """Of each of two models with local steps, how far the saved weights are from the mean of the ranks'."""
    from safetensors.torch import load_file

    accelerator.free_memory()
    nets, (method, arguments) = [toy.make(), toy.make()], METHODS["CSER"]
    plain = [method(net.parameters(), **arguments) for net in nets]
    first, second, *optimizers = accelerator.prepare(*nets, *plain)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        loop.attach(accelerator, model, optimizer)
        for step in range(3):
            accelerator.backward(toy.loss(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    torch.distributed.barrier()
    found = []
    for net, one, name in zip(nets, plain, ("model.safetensors", "model_1.safetensors"), strict=True):
        saved = load_file(folder / name)
        own = toy.flat(net)
        with one.averaged():
            mean = {k: v.clone() for k, v in net.state_dict().items()}
            assert not torch.equal(own, toy.flat(net))
        found.append(max(float((saved[k] - mean[k]).abs().max()) for k in mean))
    return found


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("accelerate")
    return run_ranks(in_accelerate, 2, tmp_path_factory.mktemp("accelerate"), False)


@pytest.fixture(scope="module")
def accelerated_resumed(accelerated: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(accelerated, run_ranks(in_accelerate, 2, tmp_path_factory.mktemp("accelerate"), True))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_accelerate_resumes_bit_for_bit(accelerated_resumed: Found, method: str) -> None:
    """With two micro-batches a step, and dropout."""
    check_resumed(accelerated_resumed, method)


def test_the_example_resumes_at_the_right_epoch_where_batches_are_odd(accelerated: Found) -> None:
    for mine in accelerated:
        assert mine["odd epochs"] == 8


def test_accelerate_refuses_clipping_and_still_gives_the_norm(accelerated: Found) -> None:
    for mine in accelerated:
        assert mine["clip"].startswith("RuntimeError: clipping by the framework has no effect")
        assert "max_grad_norm=1.0" in mine["clip"]
        assert mine["clip value"].startswith("RuntimeError: clipping by the framework has no effect")
        assert mine["norm"] == mine["true norm"] > 0


def test_accelerate_clips_what_no_message_is_taken_from(accelerated: Found) -> None:
    """Another model's parameters, and those whose attachment is closed; every clipping was refused, for good."""
    for mine in accelerated:
        assert mine["another's clip"] == mine["closed clip"] == ""
        assert mine["another's largest"] == pytest.approx(0.01)


def test_accelerate_refuses_the_state_of_one_rank(accelerated: Found) -> None:
    for mine in accelerated:
        assert mine["one rank's"].startswith("ValueError: the state of Birder differs from rank to rank")


def test_accelerates_state_dict_is_the_state_of_this_rank(accelerated: Found) -> None:
    """To scripts that save it by hand; they were given a note in its place, and lost the state without a word."""
    for mine in accelerated:
        assert mine["by hand"]
        assert "accelerator.prepare(model, optimizer)" in mine["not prepared"]
        assert "it differs from rank to rank, so save and load it on every rank" in mine["other rank's"]


def test_ranks_that_accelerate_takes_for_one_process_each_are_refused(accelerated: Found) -> None:
    for mine in accelerated:
        assert "would train each of the 2 ranks alone: on CPUs say Accelerator(cpu=True)" in mine["each alone"]


def test_a_scripts_own_hook_of_save_state_is_given_this_ranks_state(accelerated: Found) -> None:
    """It was given the note, and the file rank 0's state, which rank 0 alone could load."""
    for mine in accelerated:
        assert mine["own hook"] == ([True], True)
        assert mine["rank 0's in the file"]


def test_accelerate_saves_the_optimizer_of_the_second_attempt(accelerated: Found) -> None:
    assert all(mine["second attempt"] for mine in accelerated)


def test_accelerate_saves_the_mean_of_each_of_two_models(accelerated: Found) -> None:
    assert [mine["two models"] for mine in accelerated] == [[0.0, 0.0]] * 2


def test_accelerate_trains_in_bf16_autocast(accelerated: Found) -> None:
    first, second = accelerated
    assert np.array_equal(first["bf16"], second["bf16"])
    assert not np.array_equal(first["bf16"], first["OneBitAdam half"])


def test_accelerate_compiled_equals_eager(accelerated: Found) -> None:
    for mine in accelerated:
        assert np.array_equal(mine["compiled"], mine["Birder half"])
