"""Hugging Face Accelerate: `attach` after `prepare`. Its `save_state` and `load_state` then keep every rank's state.

    accelerator = Accelerator()
    model, optimizer, batches = accelerator.prepare(model, Birder(model.parameters(), lr=1e-3), batches)
    attach(accelerator, model, optimizer)

The loop does not change: `accelerator.accumulate`, `accelerator.backward`, `optimizer.step`. One process attaches nothing.
Runnable: examples/accelerate_loop.py.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

import birder
from birder.hooks.attachment import unwrap_method, unwrap_optimizer
from birder.hooks.ddp import Attachment
from birder.hooks.other_optimizers import open_attachments
from birder.integrations import every_rank
from birder.optim.base import BucketOptimizer


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer, any_world: bool = False, **options: Any
) -> Attachment | None:
    """Connects what `accelerator.prepare` returned, as `birder.attach` does, which takes `options`. Every rank calls it.

    For a method that compresses: `accelerator.clip_grad_norm_` and `clip_grad_value_` of its parameters raise RuntimeError,
    unless overlap=False; with `max_norm` infinite the former still returns the norm of this rank's own gradient. The state
    of every rank is written with `accelerator.save_state`, below `birder` in its folder, and read with `load_state`. The
    accelerator's optimizer then has the method's `averaged`, too.

    any_world: `load_state` takes the states of another number of ranks, too (birder/checkpoint/elastic.py).

    Returns None on one process. Raises as `birder.attach` does, ValueError for an optimizer that was not prepared, and
    RuntimeError where Accelerate takes each of several ranks for the only one.
    """
    if accelerator.num_processes == 1 and dist.is_initialized() and (world := dist.get_world_size()) > 1:
        raise RuntimeError(
            f"Accelerate has found no accelerator and would train each of the {world} ranks alone: on CPUs say "
            "Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
        )
    method = unwrap_method(optimizer)
    wrapper = next((found for found in accelerator._optimizers if unwrap_optimizer(found) is method), None)
    if wrapper is None:
        raise ValueError("prepare the optimizer first: model, optimizer = accelerator.prepare(model, optimizer)")
    wrapper.averaged = method.averaged
    attachment = None
    if accelerator.num_processes > 1:
        attachment = birder.attach(model, method, **options)
        if every_rank.clips_in_vain(method, attachment.overlap):
            refuse_clipping(accelerator)
    elif any_world and not method.units:  # in the units of several ranks
        method.bind(**{k: v for k, v in options.items() if k == "unit_mb"})
    if method.compressed and (attachment or any_world):
        keep_every_rank(accelerator, wrapper, method, any_world)
    return attachment


def refuse_clipping(accelerator: Accelerator) -> None:
    """Makes the accelerator's clipping raise RuntimeError for parameters whose messages an attachment takes in backward.

    Asked for a norm alone, it changes no gradient of theirs. Other parameters are clipped as ever.
    """
    if "_birder_refuses" in vars(accelerator):
        return
    accelerator._birder_refuses = True
    by_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    def taken(parameters: Iterable[Tensor] | Tensor) -> tuple[list[Tensor], BucketOptimizer | None]:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        methods = [a.optimizer for a in open_attachments() if every_rank.clips_in_vain(a.optimizer, a.overlap)]
        return several, next((method for method in methods if any(map(method.holds, several))), None)

    def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        several, method = taken(parameters)
        if method is None:
            return by_norm(several, max_norm, norm_type)
        if max_norm != math.inf:
            raise RuntimeError(every_rank.no_clipping(method, max_norm))
        accelerator.unscale_gradients()  # as its own: with fp16 the norm would be that of scaled gradients
        return torch.nn.utils.get_total_norm([p.grad for p in several if p.grad is not None], norm_type)

    def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float) -> Any:
        several, method = taken(parameters)
        if method is not None:
            raise RuntimeError(every_rank.no_clipping(method))
        return by_value(several, clip_value)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_


def keep_every_rank(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, method: BucketOptimizer, any_world: bool = False
) -> None:
    """Puts a note in the place of the state that the accelerator saves for one rank, and every rank's state next to it.

    In the place of an earlier optimizer, too, that `accelerator.free_memory` has thrown away: its hooks do nothing then,
    and hold no memory.
    """
    number = accelerator._optimizers.index(optimizer)
    kept = EveryRank(method, every_rank.FOLDER + (f"_{number}" if number else ""), any_world)
    optimizer.every_rank = kept
    optimizer.state_dict = kept.note
    optimizer.load_state_dict = kept.load
    wrapper = weakref.ref(optimizer)

    def present() -> EveryRank | None:
        there = wrapper()
        return there.every_rank if there is not None and there in accelerator._optimizers else None

    def save(models: Any, weights: list[dict[str, Tensor]], folder: str) -> None:
        if (one := present()) is not None:
            one.save(folder, weights)

    def look_in(models: Any, folder: str) -> None:
        if (one := present()) is not None:
            one.look_in(folder)

    hooks = vars(accelerator).setdefault("_birder_hooks", {})
    for earlier in hooks.pop(kept.name, ()):
        earlier.remove()
    hooks[kept.name] = (
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(look_in),
    )
    save_last(accelerator)


def save_last(accelerator: Accelerator) -> None:
    """Lets every hook that the script registers run before those of `keep_every_rank`: it may ask for `state_dict`."""
    if "register_save_state_pre_hook" in vars(accelerator):
        return
    register = accelerator.register_save_state_pre_hook

    def register_before(hook: Callable[..., None]) -> Any:
        handle = register(hook)
        for ours, _ in accelerator._birder_hooks.values():
            accelerator._save_model_state_pre_hook.move_to_end(ours.id)
        return handle

    accelerator.register_save_state_pre_hook = register_before


class EveryRank:
    """Saving and loading of one optimizer with Accelerate's hooks."""

    def __init__(self, method: BucketOptimizer, name: str, any_world: bool = False) -> None:
        self.method, self.name, self.any_world = method, name, any_world
        self.folder: Path | None = None
        self._saved_at = -1
        """The step after which `save` was called, and `note` was not yet; -1: none."""

    def save(self, folder: str, weights: list[dict[str, Tensor]] | None = None) -> None:
        """Every rank's state below `folder`. weights: what is saved of the models; the mean, where ranks' models differ."""
        every_rank.save(folder, self.method, self.name)
        self._saved_at = self.method.steps
        if weights and self.method.local_models:
            mine = {p.data_ptr() for unit in self.method.units for p in unit.params if p.numel()}
            copies: dict[int, Any] = {}
            with self.method.averaged():  # what is another method's stays the model's own, to be averaged by that one
                for state in weights:
                    found = {k: t for k, t in state.items() if isinstance(t, Tensor) and t.data_ptr() in mine}
                    state.update({k: copy.deepcopy(t, copies) for k, t in found.items()})

    def look_in(self, folder: str | None) -> None:
        """Where the next `load` is to look."""
        self.folder = None if folder is None else Path(folder)

    def note(self) -> dict[str, Any]:
        """Once after `save`: what stands where the framework keeps one rank's state. To others this rank's own state."""
        saved_at = self._saved_at
        self.saved()
        if saved_at != self.method.steps:
            return self.method.state_dict()
        return {"every_rank": self.name, "state": {}, "param_groups": []}

    def saved(self) -> None:
        """The framework has written its checkpoint: on some ranks it may not have called `note`."""
        self._saved_at = -1

    def load(self, state: dict[str, Any]) -> None:
        """Every rank's state where the folder has it, else this rank's own. Raises ValueError for any other."""
        folder, self.folder = self.folder, None  # a later call may be the script's own
        if folder is not None and (folder / self.name).is_dir():  # whatever stands in the place of the note
            every_rank.load(folder, self.method, self.name, self.any_world)
        elif "units" in state:  # this rank's own, or that of one process
            self.method.load_state_dict(every_rank.own_or_of_one(self.method, state, self.any_world))
        elif folder is None or "every_rank" not in state:
            raise ValueError(
                f"the state of {type(self.method).__name__} differs from rank to rank, and this is that of one: load a "
                "checkpoint that was saved with birder.integrations, by accelerator.load_state or the Trainer"
            )
        else:
            every_rank.load(folder, self.method, self.name)  # says what is missing
