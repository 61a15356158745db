"""What would train wrongly over shards is refused in one line; and the example runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import birder
from birder import attach
from birder.hooks.fsdp import _check_parameters
from tests.helpers import ROOT, load, toy
from tests.helpers.hsdp import hsdp, make_mesh, shard, train
from tests.helpers.ranks import run_ranks, run_script


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AssertionError, RuntimeError, TypeError, ValueError) as e:
        return str(e)
    return ""


def try_attach(model: nn.Module, method: str = "Birder", **how: Any) -> str:
    optimizer = getattr(birder, method)(model.parameters(), lr=0.01)
    return said(lambda: attach(model, optimizer, **how))


def before_training(rank: int, world: int) -> dict[str, str]:
    mesh = make_mesh(2, 1)
    two = toy.make()
    fully_shard(two, mesh=mesh)
    other = fully_shard(toy.make(), mesh=mesh["replicate"])
    late = toy.make()
    optimizer = birder.Birder(late.parameters(), lr=0.01)
    shard(late, mesh)
    alone = birder.Birder(shard(toy.make(), mesh).parameters(), lr=0.01)
    odd = shard(toy.make(), mesh)
    columns = fully_shard(toy.make(), mesh=mesh["shard"], shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None)
    mixed = toy.make()
    fully_shard(mixed.first, mesh=mesh["replicate"])
    fully_shard(mixed, mesh=mesh["shard"])
    away = shard(toy.make(), mesh)
    with torch.device("meta"):
        unset = toy.Net()
    shard(unset, mesh)
    divided = shard(toy.make(), mesh)
    divided.second.set_gradient_divide_factor(1.0)  # type: ignore[union-attr, operator]
    hooked = shard(toy.make(), mesh)
    hooked.second.set_all_reduce_hook(lambda reduced: None)  # type: ignore[union-attr, operator]
    return {
        "columns": try_attach(columns, mesh=mesh),
        "hooked": try_attach(hooked, mesh=mesh),
        "meshes": try_attach(mixed, mesh=mesh),
        "offload": said(lambda: _check_parameters(away, birder.Birder(away.parameters()), OfAGpu(mesh))),  # type: ignore[arg-type]
        "divided": try_attach(divided, mesh=mesh),
        "meta": try_attach(unset, mesh=mesh),
        "2-D": try_attach(two, mesh=mesh),
        "part": try_attach(fully_shard_only(toy.make(), mesh), mesh=mesh),
        "other": try_attach(other, mesh=mesh),
        "late": said(lambda: attach(late, optimizer, mesh=mesh)),
        "1-D": try_attach(shard(toy.make(), mesh), mesh=mesh["shard"]),
        "no mesh": try_attach(shard(toy.make(), mesh)),
        "plain": try_attach(toy.make(), mesh=mesh),
        "hierarchical": try_attach(shard(toy.make(), mesh), mesh=mesh, hierarchical=True),
        "method": try_attach(shard(toy.make(), mesh), "EFSGD", mesh=mesh),
        "bind": said(alone.bind),
        "step": said(alone.step),
        "ranks": said(lambda: attach(odd, birder.Birder(odd.parameters(), lr=0.01 + rank), mesh=mesh)),
    }


class OfAGpu:
    """The mesh, as if its ranks had GPUs: parameters on the CPU are then those that CPUOffloadPolicy keeps there."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.device_type = mesh, "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mesh, name)

    def __getitem__(self, name: str) -> DeviceMesh:
        return self.mesh[name]


def fully_shard_only(model: nn.Module, mesh: Any) -> nn.Module:
    """Sharded, but for one parameter that FSDP is told to ignore."""
    return fully_shard(model, mesh=mesh["shard"], ignored_params={model.scale})  # type: ignore[arg-type]


WORDS = {
    "columns": "leave out shard_placement_fn",
    "meshes": 'is sharded over ranks [0, 1], mesh["shard"] has',
    "offload": "is on cpu, the mesh on cuda: leave out CPUOffloadPolicy",
    "hooked": "set_all_reduce_hook",
    "divided": "leave it out and scale the loss instead",
    "meta": "is on the meta device: call model.to_empty(device=...)",
    "2-D": 'use fully_shard(module, mesh=mesh["shard"]), and give the 2-D mesh to attach alone',
    "part": "scale is not sharded",
    "other": 'is sharded over ranks [0, 1], mesh["shard"] has',
    "late": "build it from model.parameters() after fully_shard",
    "1-D": "mesh must be replicas x shards",
    "no mesh": "needs mesh=",
    "plain": "needs DDP or a model that fully_shard made, got Net",
    "hierarchical": "leave out hierarchical",
    "method": "EFSGD works on whole parameters",
    "bind": "birder.attach(model, optimizer, mesh=mesh)",
    "step": "the optimizer is not attached",
    "ranks": "differ from rank 0",
}


def test_what_cannot_work_is_refused_before_the_first_step() -> None:
    for result in run_ranks(before_training, 2, ranks_per_node=1):
        assert {key: result[key] for key, words in WORDS.items() if words not in result[key]} == {}
        assert not any("\n" in line for line in result.values())


def while_training(rank: int, world: int) -> dict[str, str]:
    mesh, out = make_mesh(2, 1), {}
    model, _, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01})
    toy.loss(model, rank, 1).backward()
    out["twice"] = said(toy.loss(model, rank, 2).backward)

    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01})
    train(model, optimizer, toy.loss, rank, range(1, 3))
    toy.loss(model, rank, 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    out["clipped"] = said(optimizer.step)

    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01}, overlap=False)
    toy.loss(model, rank, 1).backward()
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]  # as a GradScaler hands it over
    assert optimizer._step_supports_amp_scaling
    out["scaler"] = said(optimizer.step)

    frozen = toy.make()
    frozen.second.requires_grad_(False)
    shard(frozen, mesh)
    birders = birder.Birder(frozen.parameters(), lr=0.01)
    attach(frozen, birders, mesh=mesh)
    train(frozen, birders, toy.loss, rank, range(1, 3))
    frozen.second.requires_grad_(True)
    toy.loss(frozen, rank, 3).backward()
    out["unfrozen"] = said(birders.step)
    birders.zero_grad()
    attach(frozen, birders, mesh=mesh)
    train(frozen, birders, toy.loss, rank, range(3, 5))

    model, optimizer, _ = hsdp("toy", mesh, "SGDM", {"lr": 0.01})
    train(model, optimizer, toy.loss, rank, range(1, 2))
    out["bind"] = said(optimizer.bind)
    train(model, optimizer, toy.loss, rank, range(2, 3))  # what was bound stays
    model.set_gradient_divide_factor(2.0)  # type: ignore[operator]
    out["divided"] = said(toy.loss(model, rank, 2).backward)

    for method in ("SGDM", "Birder"):
        model, optimizer, _ = hsdp("toy", mesh, method, {"lr": 0.01})
        model.set_all_reduce_hook(lambda reduced: None)  # type: ignore[operator]
        out[f"hook of {method}"] = said(toy.loss(model, rank, 1).backward)

    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01}, overlap=False)
    out["symmetric"] = said(model.set_symm_mem_for_comm)  # type: ignore[operator]
    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01})
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out["compiled autograd"] = said(toy.loss(model, rank, 1).backward)

    model, optimizer, _ = hsdp("toy", mesh, "Birder", {"lr": 0.01})
    train(model, optimizer, toy.loss, rank, range(1, 2))
    kept: list[Any] = [None, None]
    torch.distributed.all_gather_object(kept, optimizer.state_dict())
    optimizer.load_state_dict(kept[rank])
    out["state"] = said(lambda: optimizer.load_state_dict(kept[1 - rank]))

    divided = make_mesh(1, 2)
    small = fully_shard(nn.Linear(3, 3), mesh=divided["shard"])
    optimizer = birder.Birder(small.parameters())
    attach(small, optimizer, mesh=divided)
    torch.distributed.all_gather_object(kept, optimizer.state_dict())
    out["shard"] = said(lambda: optimizer.load_state_dict(kept[1 - rank]))
    alone = birder.Birder(nn.Linear(3, 3).parameters())
    alone.bind()  # its units are of the same length
    out["whole"] = said(lambda: optimizer.load_state_dict(alone.state_dict()))
    return out


def test_what_goes_wrong_in_training_is_refused() -> None:
    for result in run_ranks(while_training, 2, ranks_per_node=1):
        assert "set_requires_gradient_sync(False)" in result["twice"]
        assert "max_grad_norm" in result["clipped"]
        assert "MixedPrecisionPolicy" in result["scaler"]
        assert "cannot call set_symm_mem()" in result["symmetric"]  # torch's own: the collectives are this project's
        assert "call birder.attach(model, optimizer, mesh=mesh) again" in result["unfrozen"]
        assert "DistributedDataParallel" not in result["unfrozen"]
        assert "FSDP has sharded the parameters" in result["bind"]
        assert "scale the loss instead" in result["divided"]
        assert "set_all_reduce_hook" in result["hook of SGDM"]
        assert result["hook of Birder"] == result["hook of SGDM"]
        assert "compile forward only" in result["compiled autograd"]
        assert "saved by rank" in result["state"]
        assert "saved by rank" in result["shard"]
        assert "saved with 1 workers x 1 shards, this run has 1 x 2" in result["whole"]


def test_the_example_refuses_ranks_that_make_no_two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 3):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with pytest.raises(SystemExit, match="error: 2 replicas of equal size need a multiple of 2 ranks"):
            load("examples/fsdp.py").main()


@pytest.mark.slow
def test_the_example_runs_on_two_replicas_of_two_shards() -> None:
    printed = "".join(run_script(ROOT / "examples/fsdp.py", 4))
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < 0.6 * losses[0], printed
    sums = set(re.findall(r"sum of all parameters (-?\d+\.\d{12})", printed))
    assert len(sums) == 1
    assert printed.count("sum of all parameters") == 4
