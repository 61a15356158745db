"""What all frameworks need: state that differs from rank to rank in a checkpoint that has room for one; words on clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from birder import checkpoint
from birder.checkpoint import elastic
from birder.hooks.attachment import unwrap_optimizer
from birder.hooks.other_optimizers import open_attachments
from birder.optim.base import BucketOptimizer

FOLDER = "birder"
"""Below the framework's own checkpoint; a second optimizer has `birder_1`."""


def no_clipping(method: BucketOptimizer, limit: Any = "...") -> str:
    """Why the framework may not clip: it would be in vain, or the optimizer does so."""
    if method.max_grad_norm is None:
        return (
            "clipping by the framework has no effect on messages that were taken during backward: give the optimizer "
            f"max_grad_norm={limit} and turn the framework's clipping off, or attach with overlap=False"
        )
    return (
        f"{method.kind} clips the averaged gradient itself, to max_grad_norm={method.max_grad_norm:g}: turn the framework's "
        "clipping off, which would clip each rank's own gradient first"
    )


def clips_in_vain(method: BucketOptimizer, overlap: bool) -> bool:
    """Whether the framework may not clip what this method sends."""
    return method.compressed and (overlap or method.max_grad_norm is not None)


def averaged(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """`averaged` of what is inside a framework's optimizer; nothing happens where that is none of this package."""
    method = unwrap_optimizer(optimizer)
    return method.averaged() if isinstance(method, BucketOptimizer) else contextlib.nullcontext()


def make_equal(parameters: Iterable[Tensor]) -> None:
    """Gives all ranks the mean of their models where a method has left them different (`local_models`). Every rank calls it.

    To be called before another wrapper gives all ranks the model of rank 0. On some ranks Python may have collected the
    method by then, and its process group.
    """
    mine = [p for p in parameters if p.requires_grad]
    methods = [attachment.optimizer for attachment in open_attachments()]
    left = [m for m in methods if m.local_models and m.steps and any(map(m.holds, mine))]
    for method in left:
        method.pipeline.wait()
    said: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(said, bool(left))
    if any(said):
        make_mean(mine)


def make_mean(tensors: Iterable[Tensor]) -> None:
    """Replaces tensors that every rank has by their means over all ranks. Every rank calls it."""
    world, kinds = dist.get_world_size(), [pair.partition(":")[0] for pair in str(dist.get_backend_config()).split(",")]
    with torch.no_grad():
        for t in tensors:
            x = t.to(t.device if t.device.type in kinds else kinds[0])  # Lightning's fit leaves a GPU's on the CPU
            dist.all_reduce(x)
            t.copy_(x.div_(world))


def in_a_step(optimizer: Any) -> bool:
    """Whether a step is half done: between backward and the end of `step`, with messages taken during backward. A framework
    that saves then, as it does when a signal asks it to stop, has to wait for its end."""
    method = unwrap_optimizer(optimizer)
    return isinstance(method, BucketOptimizer) and (method._feeding or method._stepping)


def rank_state(optimizer: BucketOptimizer) -> dict[str, Any]:
    """What this rank alone has: the optimizer's state, and the parameters where ranks' models differ."""
    own: dict[str, Any] = {"optimizer": optimizer.state_dict()}
    if optimizer.local_models:
        own["parameters"] = [optimizer.own_parameters(unit) for unit in optimizer.units]
    return own


def set_parameters(optimizer: BucketOptimizer, own: dict[str, Any]) -> None:
    """Puts this rank's parameters in place, where `rank_state` kept any. After DDP, which gives all ranks rank 0's."""
    saved = own.get("parameters", [])
    if saved and len(saved) != len(optimizer.units):
        raise ValueError(f"the checkpoint has parameters of {len(saved)} units, here are {len(optimizer.units)}")
    with torch.no_grad():
        for unit, flat in zip(optimizer.units, saved):
            torch._foreach_copy_(unit.params, unit.views(flat.to(unit.device)))


def save(folder: str | Path, optimizer: BucketOptimizer, name: str = FOLDER) -> None:
    """Writes every rank's state below `folder`, as birder.checkpoint does. Every rank calls it. Raises as that does."""
    checkpoint.save(Path(folder) / name, optimizer.steps, {}, rank_state(optimizer), keep=1)


def load(folder: str | Path, optimizer: BucketOptimizer, name: str = FOLDER, any_world: bool = False) -> None:
    """Restores what `save` wrote on the same rank. Every rank calls it, after `attach`.

    any_world: also what another number of ranks wrote (birder/checkpoint/elastic.py). Parameters then stay the framework's,
        the mean of all ranks'.

    Raises ValueError where there is none, and for that of another method or, without `any_world`, number of ranks.
    """
    try:
        found = checkpoint.restore(Path(folder) / name, any_world)
    except checkpoint.Broken:
        raise
    except ValueError as e:
        way = "any_world=True, which makes this number's state of theirs: an option of birder.integrations"
        raise ValueError(f"{e}, or {way}") from e
    if found is None:
        raise ValueError(
            f"{Path(folder).name} has no folder {name!r} with every rank's state of {type(optimizer).__name__}: "
            "birder.integrations did not save it, and training cannot resume from it"
        )
    if found.same_world:
        set_parameters(optimizer, found.local)
    optimizer.load_state_dict(elastic.state(optimizer, found) if any_world else found.local["optimizer"])


def fitting(optimizer: BucketOptimizer, states: list[dict[str, Any]], any_world: bool) -> dict[str, Any]:
    """This rank's state out of those of all ranks: its own where there are as many as now, else as `elastic.resize` says.

    any_world: so too where as many ranks are another number of workers (nodes).
    """
    as_many = len(states) == optimizer.comm.world_size
    own = as_many and (not any_world or elastic.of_this_shape(optimizer, states[0]))
    return states[optimizer.comm.rank] if own else elastic.resize(optimizer, states)


def own_or_of_one(optimizer: BucketOptimizer, state: dict[str, Any], any_world: bool) -> dict[str, Any]:
    """`state`, this rank's own; with `any_world` also where one process has saved it: made to fit."""
    of_one_process = list(state.get("signature", ())) == [1, 1]
    return fitting(optimizer, [state], True) if any_world and of_one_process else state
