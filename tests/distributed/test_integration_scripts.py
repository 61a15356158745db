"""What scripts do around the integrations: they save in odd places, on one rank alone, resume on fewer, keep own entries."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import checkpoint
from birder.checkpoint import shards
from birder.integrations import every_rank
from tests.helpers import load, toy
from tests.helpers.integrations import said
from tests.helpers.ranks import run_ranks

LOCAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "CSER": (birder.CSER, {"lr": 0.05, "block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 4}),
    "ZeroOneAdam": (birder.ZeroOneAdam, {"lr": 1e-3, "warmup_steps": 3, "local_doubling": 2, "local_limit": 4}),
    "SLAMB": (birder.SLAMB, {"lr": 1e-2, "sync_every": 3, "dense_below": 40, "fraction": 0.25}),
    "SparseLoCo": (birder.SparseLoCo, {"lr": 1e-3, "sync_every": 4, "top_k": 4, "chunk": 32}),
}


def attached(method: Any, options: dict[str, Any]) -> tuple[DistributedDataParallel, Any]:
    model = toy.make()
    wrapped = DistributedDataParallel(model)
    optimizer = method(model.parameters(), **options)
    birder.attach(wrapped, optimizer)
    return wrapped, optimizer


# ---- state of methods whose models differ, inside `averaged` ---------------------------------------------------------


def saving_inside(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (method, options) in LOCAL.items():
        ends = []
        for inside in (False, True):
            model, optimizer = attached(method, options)
            toy.train(model, optimizer, rank, range(1, 11))
            own = toy.flat(model)
            if inside:
                with optimizer.averaged(), optimizer.averaged():
                    saved = copy.deepcopy(every_rank.rank_state(optimizer))
                    found[f"{name} mean"] = not torch.equal(own, toy.flat(model))
            toy.train(model, optimizer, rank, range(11, 18))
            ends.append(toy.flat(model))
        model, optimizer = attached(method, options)
        every_rank.set_parameters(optimizer, saved)
        optimizer.load_state_dict(saved["optimizer"])
        toy.train(model, optimizer, rank, range(11, 18))
        found[name] = torch.equal(*ends), torch.equal(ends[0], toy.flat(model))
        with optimizer.averaged():
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model, optimizer = attached(method, options)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        found[f"{name} of the mean"] = said(lambda m=model, o=optimizer: toy.train(m, o, rank, [18]))
    return found


def test_state_that_is_saved_inside_averaged_is_that_of_this_ranks_own_model() -> None:
    """It was mixed with the mean's: another run after resuming, and for some methods another run that went on."""
    for mine in run_ranks(saving_inside, 2):
        for name in LOCAL:
            assert mine[name] == (True, True), name
            assert mine[f"{name} mean"], name
            assert mine[f"{name} of the mean"].endswith("and save them outside of averaged()"), name


# ---- rank 0 saves or restores alone ----------------------------------------------------------------------------------


def lone_save(rank: int, world: int, folder: Path) -> dict[str, Any]:
    store = dist.distributed_c10d._get_default_store()
    limit, usual = store.timeout, checkpoint.ALONE_S  # type: ignore[attr-defined] # torch's stubs lack it
    found: dict[str, Any] = {}

    def save(step: int) -> str:
        return said(lambda: checkpoint.save(folder, step, {}, {"rank": rank}))

    found["before"] = save(1)
    if rank == 0:
        store.set_timeout(timedelta(seconds=2))
        checkpoint.ALONE_S = 0.5
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found["alone"] = save(2)
            found["read alone"] = said(lambda: checkpoint.restore(folder))
        checkpoint.ALONE_S = usual
        store.set_timeout(limit)
        found["warned"] = [str(w.message) for w in warned]
    dist.barrier()
    found["after"] = save(3), save(4)
    restored = checkpoint.restore(folder)
    found["restored"] = None if restored is None else (restored.step, restored.local["rank"])
    dist.barrier()
    keys = [f"birder/{what}/{n}{of}" for what in ("save", "restore") for n in range(4) for of in ("", "/all", "/left")]
    found["left"] = any(store.check([key]) for key in keys)
    return found


def test_a_rank_that_saves_or_restores_alone_is_warned(tmp_path: Path) -> None:
    """It met other ranks' collectives of training, or waited without a word."""
    results = run_ranks(lone_save, 2, tmp_path)
    errors = [results[0]["alone"], results[0]["read alone"]]
    assert results[0]["warned"] == [error.removeprefix("RuntimeError: ") for error in errors]
    for error, doing in zip(errors, ("save", "restore"), strict=True):
        assert error.startswith(f"RuntimeError: every rank has to {doing}, and 1 of 2 have not come to it")
    for rank, mine in enumerate(results):
        assert (mine["before"], mine["after"]) == ("", ("", ""))
        assert mine["restored"] == (4, rank)
        assert not mine["left"]


# ---- learning rates of other types, and a script's own entries ---------------------------------------------------------

RATES = {"tensor": torch.tensor(0.01), "numpy": np.float32(0.01)}


def own_entries(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))

    def sharded(**group: Any) -> tuple[Any, Any]:
        model = fully_shard(toy.make(), mesh=mesh["shard"])
        optimizer = birder.Birder([{"params": list(model.parameters()), **group}])
        attachment = birder.attach(model, optimizer, mesh=mesh)
        toy.train(model, optimizer, rank, [1])
        return model, attachment

    pair = (0.5, 0.25)
    for name, rate in RATES.items():
        model, attachment = sharded(lr=rate, mine=pair)
        shards.save(folder / name, model, attachment)
        attachment.optimizer.param_groups[0]["lr"] = rate * 2
        shards.load(folder / name, model, attachment)
        lr = attachment.optimizer.param_groups[0]["lr"]
        found[name] = type(lr), float(lr), attachment.optimizer.param_groups[0]["mine"]
        checkpoint.save(folder / f"{name} tree", 1, {}, {"lr": rate})
        restored = checkpoint.restore(folder / f"{name} tree")
        found[f"{name} tree"] = None if restored is None else float(restored.local["lr"])
    model, attachment = sharded(schedule=len)
    found["function"] = said(lambda: shards.save(folder / "function", model, attachment))
    groups = attachment.optimizer.state_dict()["param_groups"]
    found["function tree"] = said(lambda: checkpoint.save(folder / "function tree", 1, {}, {"groups": groups}))
    return found


def test_checkpoints_take_the_learning_rates_that_optimizers_take(tmp_path: Path) -> None:
    """Tensors and numpy's numbers; they were not JSON serializable, nor was what else a script keeps, without its name."""
    for mine in run_ranks(own_entries, 2, tmp_path):
        for name, rate in RATES.items():
            assert mine[name][:2] == (type(rate), float(rate)), name
            assert mine[name][2] == (0.5, 0.25), name
            assert mine[f"{name} tree"] == float(rate), name
        assert mine["function"].startswith(
            "TypeError: param_groups[0]['schedule'] is of type builtin_function_or_method"
        )
        assert "groups/0/schedule is of type builtin_function_or_method" in mine["function tree"]


# ---- shards in the middle of a step ------------------------------------------------------------------------------------


def in_mid_step(rank: int, world: int, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(toy.make(), mesh=mesh["shard"])
    optimizer = birder.Birder(model.parameters())
    attachment: Any = birder.attach(model, optimizer, mesh=mesh)

    def whole() -> torch.Tensor:
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    toy.train(model, optimizer, rank, [1, 2])
    shards.save(folder / "whole", model, attachment)
    toy.train(model, optimizer, rank, [3, 4])
    there = whole()
    toy.loss(model, rank, 5).backward()
    found: dict[str, Any] = {"saved": said(lambda: shards.save(folder / "half", model, attachment))}
    found["loaded"] = said(lambda: shards.load(folder / "whole", model, attachment))
    toy.train(model, optimizer, rank, [3, 4])
    found["again"] = torch.equal(whole(), there)
    optimizer.param_groups[0]["params"].pop()
    found["taken out"] = said(lambda: shards.save(folder / "part", model, attachment))
    return found


def test_shards_are_not_saved_in_the_middle_of_a_step_and_may_be_loaded_there(tmp_path: Path) -> None:
    """Half of a step was saved without a word; to go back to a checkpoint failed, with its parameters in the model."""
    for mine in run_ranks(in_mid_step, 2, tmp_path):
        assert mine["saved"].startswith("RuntimeError: state_dict() between backward and step()")
        assert (mine["loaded"], mine["again"]) == ("", True)
        assert mine["taken out"].startswith("RuntimeError: parameters were taken out of the optimizer's groups")


# ---- in one process --------------------------------------------------------------------------------------------------


def test_lightning_attaches_once_after_a_fit_that_failed_early() -> None:
    """Before the strategy was set up: the second fit then had two layers around it, of which each took away the other."""
    pytest.importorskip("lightning")
    from birder.integrations.lightning import BirderCallback

    class Strategy:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def setup(self, trainer: Any) -> None:
            self.calls.append("setup")

    strategy: Any = Strategy()
    for callback in (BirderCallback(), BirderCallback()):
        callback._attach = lambda trainer: strategy.calls.append("attach")  # type: ignore[method-assign]
        callback._attach_after_setup(strategy)
    strategy.setup(None)
    assert strategy.calls == ["setup", "attach"]
    assert "setup" not in vars(strategy)


def test_one_rank_refuses_a_checkpoint_of_several() -> None:
    """The note in the place of the state was said to lack steps, signature and units."""
    optimizer = birder.Birder(toy.make().parameters())
    with pytest.raises(ValueError, match="several ranks saved this checkpoint"):
        optimizer.load_state_dict({"every_rank": "birder", "state": {}, "param_groups": []})


def test_the_norm_of_gradients_in_fp16_is_without_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer clips, accelerator.clip_grad_norm_ and the Trainer's log gave 65536 times the norm."""
    integration = pytest.importorskip("birder.integrations.accelerate")
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 65536.0)
    optimizer = birder.Birder([p], max_grad_norm=1.0)
    optimizer.bind()
    here = SimpleNamespace(optimizer=optimizer, overlap=False)
    monkeypatch.setattr(integration, "open_attachments", lambda: [here])
    accelerator = SimpleNamespace(clip_grad_norm_=None, clip_grad_value_=None)
    accelerator.unscale_gradients = lambda: p.grad.div_(65536.0)  # what it does with a GradScaler, on a GPU alone
    integration.refuse_clipping(accelerator)
    assert accelerator.clip_grad_norm_([p], float("inf")) == 2.0


def test_freed_memory_is_that_of_an_optimizer_with_every_ranks_state_too(tmp_path: Path) -> None:
    """accelerator.free_memory left its state and parameters there, and later calls of save_state wrote that as well."""
    accelerate = pytest.importorskip("accelerate")
    from birder.integrations.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True)

    def attached_one() -> tuple[Any, weakref.ref[Any]]:
        net = toy.make()
        optimizer = birder.Birder(net.parameters())
        model, prepared = accelerator.prepare(net, optimizer)
        attach(accelerator, model, prepared, any_world=True)
        return net, weakref.ref(optimizer)

    net, left = attached_one()
    accelerator.save_state(str(tmp_path / "first"))
    assert (tmp_path / "first/birder").is_dir()
    accelerator.free_memory()
    accelerator.prepare(net, torch.optim.SGD(net.parameters()))
    gc.collect()
    accelerator.save_state(str(tmp_path / "second"))
    assert left() is None
    assert not (tmp_path / "second/birder").exists()


def test_models_are_made_equal_where_ranks_can_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's fit leaves a GPU's model on the CPU, for which NCCL has nothing: the validate after it failed."""

    class Sent(Exception):
        pass

    def all_gather_object(said: list[bool], mine: bool) -> None:
        said[:] = [True, True]

    def all_reduce(x: torch.Tensor) -> None:
        raise Sent(x.device.type)

    monkeypatch.setattr(every_rank.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(every_rank.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(every_rank.dist, "all_reduce", all_reduce)
    for backends, where in (("cpu:gloo,cuda:nccl", "cpu"), ("meta:nccl", "meta")):
        monkeypatch.setattr(every_rank.dist, "get_backend_config", lambda b=backends: b)
        with pytest.raises(Sent, match=where):
            every_rank.make_equal([torch.nn.Parameter(torch.ones(1))])


def test_models_are_averaged_where_their_optimizer_was_bound() -> None:
    """The same for save_checkpoint after a fit: what ranks send each other lay where the model had been put by then."""
    optimizer = birder.ZeroOneAdam([torch.nn.Parameter(torch.ones(8, device="meta"))], warmup_steps=1)
    optimizer.bind()
    (unit,) = optimizer.units
    unit.params = [torch.ones(8)]  # as `module.cpu()` leaves a GPU's
    assert next(optimizer.average_parameters()).args[0].device.type == "meta"


def test_the_example_for_accelerate_begins_in_a_folder_that_is_there(tmp_path: Path) -> None:
    """Made beforehand and empty, it was taken for a checkpoint: FileNotFoundError."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    loop = load("examples/accelerate_loop.py")
    loop.train(tmp_path, 0)


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_the_trainer_does_not_leave_out_every_ranks_state(missing: str, tmp_path: Path) -> None:
    """Where one of its files is missing it loads no state, and trained with a fresh one."""
    pytest.importorskip("accelerate")
    from birder.integrations.transformers import BirderTrainer

    trainer: Any = object.__new__(BirderTrainer)
    trainer.optimizer = SimpleNamespace(
        every_rank=SimpleNamespace(name="birder", any_world=False, look_in=lambda _: None)
    )
    (tmp_path / "birder").mkdir()
    for name in {"optimizer.pt", "scheduler.pt"} - {missing}:
        (tmp_path / name).touch()
    trainer.is_deepspeed_enabled = trainer.is_fsdp_xla_v1_enabled = False
    with pytest.raises(ValueError, match=f"has no {missing}"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))
