"""What this package uses of torch without torch promising it. Each test says what is missing, and who would miss it."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[3]


def needs(there: bool, what: str, used_by: str) -> None:
    assert there, (
        f"torch {torch.__version__} has no {what} as {used_by} uses it: lower the bound in pyproject.toml or adapt"
    )


@pytest.fixture
def world(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_this_torch_is_one_that_pyproject_allows_and_there_is_an_upper_bound() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (wanted,) = (r for r in map(Requirement, listed) if r.name == "torch")
    assert wanted.specifier.contains(torch.__version__.split("+")[0])
    assert {s.operator for s in wanted.specifier} == {">=", "<"}


def test_a_process_group_has_a_store_with_its_timeout(world: Any) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    needs(store.timeout.total_seconds() > 0, "store of the default process group", "birder/checkpoint/__init__.py")


def test_a_hook_can_tell_that_it_runs_inside_backward() -> None:
    ask = getattr(torch._C, "_current_graph_task_id", None)
    needs(ask is not None, "torch._C._current_graph_task_id", "birder/optim/guards.py")
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(ask()))
    (x * 2).sum().backward()
    needs(seen[0] >= 0 and ask() == -1, "torch._C._current_graph_task_id", "birder/optim/guards.py")


def test_callbacks_at_the_end_of_backward_run_in_the_order_in_which_they_are_queued() -> None:
    """`queue_after_backward`, and in `_after_ddp` once more from inside of a callback."""
    engine = torch.autograd.Variable._execution_engine
    needs(hasattr(engine, "queue_callback"), "engine.queue_callback", "birder/hooks/attachment.py")
    seen: list[str] = []

    def again() -> None:
        seen.append("first")
        engine.queue_callback(lambda: seen.append("queued by the first"))

    def hook(grad: torch.Tensor) -> None:
        engine.queue_callback(again)
        engine.queue_callback(lambda: seen.append("second"))

    x = torch.ones(1, requires_grad=True)
    x.register_hook(hook)
    (x * 2).sum().backward()
    needs(
        seen == ["first", "second", "queued by the first"],
        "double queue of queue_callback",
        "birder/hooks/ddp.py (_after_ddp)",
    )


def test_ddp_knows_its_hooks_and_its_reducer(world: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    needs(isinstance(getattr(ddp, "_comm_hooks", None), list), "DDP._comm_hooks", "birder/hooks/attachment.py")
    needs(hasattr(ddp, "_use_python_reducer"), "DDP._use_python_reducer", "birder/hooks/attachment.py")

    def hook(state, bucket):  # DDP looks at annotations
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook("state", hook)
    needs(len(ddp._comm_hooks) == 1, "DDP._comm_hooks with the registered hook", "birder/hooks/attachment.py")
    needs(len(ddp._comm_hooks[0]) == 2, "DDP._comm_hooks of (hook, state)", "birder/hooks/attachment.py")


def test_process_groups(world: Any) -> None:
    needs(hasattr(world, "bound_device_id"), "ProcessGroup.bound_device_id", "birder/comm/collectives.py")
    numbered: Any = dist.distributed_c10d._world
    needs(isinstance(getattr(numbered, "group_count", None), int), "_world.group_count", "birder/comm/collectives.py")
    before = world.bound_device_id
    world.bound_device_id = None
    world.bound_device_id = before
    made = inspect.signature(dist.new_group).parameters
    needs("use_local_synchronization" in made, "new_group(use_local_synchronization)", "birder/comm/collectives.py")
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    needs(timeout.total_seconds() > 0, "backend.options._timeout", "birder/comm/collectives.py")
    config = str(dist.get_backend_config(world))
    needs(
        "cpu:gloo" in config.split(","),
        f"get_backend_config as a list (it is {config!r})",
        "birder/comm/collectives.py",
    )
    if dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        needs(hasattr(options, "_timeout"), "ProcessGroupNCCL.Options._timeout", "birder/comm/collectives.py")


def test_a_generator_shows_what_it_holds() -> None:
    """Python's, not torch's: `StreamPipeline._hold`."""

    def inner():
        held = "inner"
        yield held

    def outer():
        mine = "outer"
        yield from inner()
        return mine

    started = outer()
    next(started)
    assert started.gi_frame.f_locals["mine"] == "outer"
    assert started.gi_yieldfrom.gi_frame.f_locals["held"] == "inner"


def test_compiled_autograd_says_whether_it_is_on() -> None:
    from torch._dynamo import compiled_autograd

    for name in ("compiled_autograd_enabled", "in_compiled_autograd_region"):
        needs(hasattr(compiled_autograd, name), f"torch._dynamo.compiled_autograd.{name}", "birder/hooks/fsdp.py")


def test_changes_in_place_are_counted() -> None:
    x = torch.zeros(2)
    before = x._version
    x.mul_(2)
    needs(x._version > before, "Tensor._version", "birder/optim/watch.py")


def test_fsdp_takes_hooks_and_collectives() -> None:
    from torch.distributed.fsdp import FSDPModule

    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        needs(hasattr(FSDPModule, name), f"FSDPModule.{name}", "birder/hooks/fsdp.py")


def test_fsdp_says_by_what_it_divides(world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state() if hasattr(model, "_get_fsdp_state") else None
    group: Any = getattr(state, "_fsdp_param_group", None)
    needs(group is not None, "FSDPModule._get_fsdp_state()._fsdp_param_group", "birder/hooks/fsdp.py")
    needs(getattr(group, "gradient_divide_factor", 0) is None, "gradient_divide_factor of None", "birder/hooks/fsdp.py")
    model.set_all_reduce_hook(needs)
    needs(getattr(group, "_all_reduce_hook", None) is needs, "_all_reduce_hook that was set", "birder/hooks/fsdp.py")
    model.set_gradient_divide_factor(2.0)
    needs(group.gradient_divide_factor == 2.0, "gradient_divide_factor that was set", "birder/hooks/fsdp.py")


def test_fsdp_says_that_the_end_of_its_pass_is_still_to_come(world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    seen: list[bool] = []

    def ask(*_: Any) -> None:
        context = getattr(model._get_fsdp_state(), "_state_ctx", None)
        seen.append(getattr(context, "post_backward_final_callback_queued", None))

    def hook(reduced: torch.Tensor) -> None:
        ask()
        torch.autograd.Variable._execution_engine.queue_callback(ask)

    model.set_all_reduce_hook(hook)
    model(torch.ones(1, 2)).sum().backward()
    needs(seen == [True, False], "post_backward_final_callback_queued", "birder/hooks/fsdp.py")


def test_a_compiled_model_has_the_model_inside() -> None:
    model = nn.Linear(1, 1)
    needs(getattr(torch.compile(model), "_orig_mod", None) is model, "_orig_mod", "birder/hooks/attachment.py")


def test_a_grad_scaler_asks_and_hands_over() -> None:
    """`BucketOptimizer._step_supports_amp_scaling`: only so can `step` tell that a scaler drives it."""

    class Asked(torch.optim.SGD):
        _step_supports_amp_scaling = True
        handed: bool = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.handed = hasattr(self, "found_inf") and hasattr(self, "grad_scale")

    p = nn.Parameter(torch.ones(1))
    optimizer = Asked([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    needs(optimizer.handed, "GradScaler that hands over found_inf", "birder/optim/guards.py")


def test_adamw_is_one_pass() -> None:
    needs(hasattr(torch, "_fused_adamw_"), "torch._fused_adamw_", "birder/optim/adam.py")
