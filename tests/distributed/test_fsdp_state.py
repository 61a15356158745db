"""Checkpoints over shards: gone on with as if nothing had been, on the same shards and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import birder
from birder import attach
from birder.checkpoint import shards as checkpoints
from birder.optim.by_parameter import gathered
from tests.helpers import toy
from tests.helpers.hsdp import full, hsdp, make_mesh, shard, train
from tests.helpers.ranks import run_ranks

METHODS: dict[str, dict[str, Any]] = {
    "Birder": {"lr": 0.01},
    "SigmaDeltaAdam": {"lr": 0.01},
    "OneBitAdam": {"lr": 0.01, "warmup_steps": 2},
    "OneBitLAMB": {"lr": 0.01, "warmup_steps": 2, "coeff_beta": 0.5},
    "LAMB": {"lr": 0.01},
}


def state(model: torch.nn.Module, attachment: Any) -> dict[str, Any]:
    """Every entry of the state, whole."""
    flats = [gathered(attachment.optimizer, unit) for unit in attachment.optimizer.units]
    found = {}
    for key, entries in checkpoints._by_parameter(checkpoints._names(model), attachment, flats, {}).items():
        for name, t in entries.items():
            found[f"{key}.{name}"] = (t.full_tensor() if hasattr(t, "full_tensor") else t).clone().numpy()
    return found


def train_alone(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    """The only rank of a replica takes the mean of what were two. Halves are exact."""
    for step in steps:
        optimizer.zero_grad()
        for k in (0, 1):
            model.set_requires_gradient_sync(k == 1)
            (toy.loss(model, 2 * rank + k, step) / 2).backward()
        optimizer.step()


def saving(rank: int, world: int, folder: str) -> dict[str, Any]:
    """On 2 x 2: five steps, saved, three more; and those three again from what was saved."""
    mesh, out = make_mesh(2, 2), {}
    for method, options in METHODS.items():
        model, optimizer, attachment = hsdp("toy", mesh, method, options, unit_mb=0.001)
        train(model, optimizer, toy.loss, rank, range(1, 6))
        optimizer.param_groups[0]["lr"] = 0.02
        checkpoints.save(f"{folder}/{method}", model, attachment)
        kept = state(model, attachment)
        train(model, optimizer, toy.loss, rank, range(6, 9))
        again, other, attached = hsdp("toy", mesh, method, options, unit_mb=0.001)
        checkpoints.load(f"{folder}/{method}", again, attached)
        assert other.steps == 5
        train(again, other, toy.loss, rank, range(6, 9))
        out[method] = (full(model).numpy(), full(again).numpy(), kept)
    return out


def loading(rank: int, world: int, folder: str, shards: int) -> dict[str, Any]:
    """On other shards: the state as loaded, and on one shard three more steps."""
    mesh, out = make_mesh(world // shards, shards), {}
    for method, options in METHODS.items():
        model, optimizer, attachment = hsdp("toy", mesh, method, options, unit_mb=0.002)
        checkpoints.load(f"{folder}/{method}", model, attachment)
        found = state(model, attachment)
        if shards == 1:
            train_alone(model, optimizer, rank, range(6, 9))
        out[method] = full(model).numpy(), found
    return out


def refused(rank: int, world: int, folder: str) -> list[str]:
    """Three replicas; and the state of another method."""
    mesh, said = make_mesh(world, 1), []
    for method, saved in (("Birder", "Birder"), ("OneBitAdam", "OneBitAdam"), ("LAMB", "Birder"), ("LAMB", "LAMB")):
        model, _, attachment = hsdp("toy", mesh, method, METHODS[method])
        try:
            checkpoints.load(f"{folder}/{saved}", model, attachment)
        except ValueError as e:
            said.append(str(e))
    model = shard(toy.make(), mesh)
    first, *rest = model.parameters()
    optimizer = birder.LAMB([{"params": [first]}, {"params": rest, "lr": 0.1}], lr=0.01)
    try:
        checkpoints.load(f"{folder}/LAMB", model, attach(model, optimizer, mesh=mesh))
    except ValueError as e:
        said.append(str(e))
    return said


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_on_any_number_of_shards(tmp_path: Path) -> None:
    kept = run_ranks(saving, 4, str(tmp_path), ranks_per_node=2)
    for method in METHODS:
        for first, again, _ in (result[method] for result in kept):
            assert (first == again).all(), method
    for n in (1, 3):
        for result in run_ranks(loading, 2 * n, str(tmp_path), n, ranks_per_node=n):
            for method, (x, found) in result.items():
                before = kept[0][method][2]
                assert found.keys() == before.keys()
                assert all((found[k] == before[k]).all() for k in found), method
                if n == 1 and method == "Birder":  # random numbers do not depend on the number of shards
                    assert (x == kept[0][method][0]).all()
    for said in run_ranks(refused, 3, str(tmp_path), ranks_per_node=1):
        one_bit, adam, another, grouped = said  # a dense method takes any number of replicas
        assert "saved by 2 replicas, this run has 3" in one_bit
        assert "parameter groups of [6] tensors, this optimizer of [1, 5]" in grouped
        assert "any number of shards" in adam
        assert "holds what Birder keeps, this optimizer is LAMB" in another


def frozen_meanwhile(rank: int, world: int, folder: str) -> dict[str, tuple[bool, str]]:
    """Saved while a layer is frozen that was trained before; resumed, then unfrozen. Loaded unfrozen it is refused."""
    mesh, out = make_mesh(1, 2), {}

    def begin(method: str, options: dict[str, Any]) -> tuple[Any, Any, Any, list[torch.nn.Parameter]]:
        model, optimizer, attachment = hsdp("toy", mesh, method, options, unit_mb=0.001)
        return (
            model,
            optimizer,
            attachment,
            list(next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).parameters()),
        )

    def freeze(layer: list[torch.nn.Parameter], frozen: bool, model: Any, optimizer: Any) -> Any:
        for p in layer:
            p.requires_grad_(not frozen)
            p.grad = None
        return attach(model, optimizer, mesh=mesh, unit_mb=0.001)

    for method in ("SigmaDeltaAdam", "AdamW", "Birder"):
        options = {"lr": 0.01}
        model, optimizer, attachment, layer = begin(method, options)
        train(model, optimizer, toy.loss, rank, range(1, 4))
        attachment = freeze(layer, True, model, optimizer)
        train(model, optimizer, toy.loss, rank, range(4, 6))
        checkpoints.save(f"{folder}/{method}", model, attachment)
        freeze(layer, False, model, optimizer)
        train(model, optimizer, toy.loss, rank, range(6, 9))
        again, other, attached, layer = begin(method, options)
        said = ""
        try:
            checkpoints.load(f"{folder}/{method}", again, attached)
        except ValueError as e:
            said = str(e)
        attached = freeze(layer, True, again, other)
        checkpoints.load(f"{folder}/{method}", again, attached)
        freeze(layer, False, again, other)
        train(again, other, toy.loss, rank, range(6, 9))
        out[method] = torch.equal(full(model), full(again)), said
    return out


def test_a_layer_that_is_frozen_while_it_is_saved_keeps_its_state(tmp_path: Path) -> None:
    for result in run_ranks(frozen_meanwhile, 2, str(tmp_path), ranks_per_node=2):
        for method, (same, said) in result.items():
            assert same, method
            assert "frozen when it was saved" in said, method


def other_kinds(rank: int, world: int, folder: str) -> list[str]:
    said, mesh = [], make_mesh(1, 1)
    for options in ({"errors": "int8"}, {}, {"reduce": "one_phase"}):
        model, optimizer, attachment = hsdp("toy", mesh, "SigmaDeltaAdam", options)
        if not said:
            train_alone(model, optimizer, rank, range(1, 3))
            checkpoints.save(folder, model, attachment)
        before = full(model)
        try:
            checkpoints.load(folder, model, attachment)
            said.append("")
        except ValueError as e:
            said.append(str(e))
        assert torch.equal(full(model), before)
    return said


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_state_of_another_kind_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """torch converts it, and 127 in int8 is 1 in fp32."""
    ((same, converted, missing),) = run_ranks(other_kinds, 1, str(tmp_path))
    assert same == ""
    assert "server_error (int8), worker_error (int8), this optimizer server_error (float32)" in converted
    assert "this optimizer owner_error (float32): use the options" in missing


def saved_whole(rank: int, world: int, folder: str) -> str:
    model, *_ = hsdp("toy", make_mesh(1, 1), "AdamW", {})
    with pytest.raises(RuntimeError) as error:
        birder.checkpoint.save(folder, 1, {"model": model.state_dict()}, {})
    return str(error.value)


def test_a_sharded_model_is_refused_where_ranks_save_whole_tensors(tmp_path: Path) -> None:
    """safetensors spoke of "an invalid python storage"."""
    (said,) = run_ranks(saved_whole, 1, str(tmp_path))
    assert "is sharded: save model and optimizer of FSDP2 with birder.checkpoint.shards.save" in said
    assert not list(tmp_path.glob("step-*"))


def warmed_up(rank: int, world: int, folder: str) -> int:
    """The warm-up of an optimizer that was made with a longer one than that whose state it has loaded."""
    for warmup in (2, 9):
        model, optimizer, attachment = hsdp("toy", make_mesh(1, 1), "OneBitAdam", {"warmup_steps": warmup})
        if warmup == 2:
            train_alone(model, optimizer, rank, range(1, 4))
            checkpoints.save(folder, model, attachment)
    checkpoints.load(folder, model, attachment)
    return optimizer.warmup_steps  # type: ignore[attr-defined, no-any-return]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_warm_up_that_is_over_stays_over(tmp_path: Path) -> None:
    """Gradients were averaged again, and the frozen variance thawed."""
    assert run_ranks(warmed_up, 1, str(tmp_path)) == [2]
