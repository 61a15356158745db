"""What a checkpoint of a run holds, and how a run resumes from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from birder import checkpoint
from birder.checkpoint import elastic
from birder.optim.layout import local as held
from experiments.training.method import AttachedMethod
from experiments.training.sharded import ShardedModel
from launch.errors import UserError


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores a training below `folder`: its model, optimizer, workload, loss scale and random states.

    nodes:  of the run, for what is counted by nodes.
    resize: takes checkpoints of another number of ranks too (birder/checkpoint/elastic.py).
    """

    folder: Path
    keep: int
    method: AttachedMethod
    nodes: int
    resize: bool = False

    def save(self, step: int, traffic: dict[str, int | None]) -> None:
        """Every rank calls it after step `step`. traffic: `Traffic.sums`. Raises UserError when the disk is full."""
        local: dict[str, Any] = {
            "optimizer": self.method.optimizer.state_dict(),
            "workload": self.method.workload.state_dict(),
            "traffic": traffic,
            "nodes": self.nodes,
            "rng": torch.get_rng_state(),
            # Batch statistics differ between ranks until DDP's next forward; rank 0's are what it broadcasts.
            "buffers": dict(self.method.ddp.module.named_buffers()),
        }
        if torch.cuda.is_available():
            local["cuda_rng"] = torch.cuda.get_rng_state()
        if self.method.scaler is not None:
            local["scaler"] = self.method.scaler.state_dict()
        shared: dict[str, Any] = {}
        parameters = self._parameters()
        try:
            # Models, or shards, that differ between ranks are kept by each rank for itself.
            own = self.method.optimizer.local_models or isinstance(self.method.ddp, ShardedModel)
            (local if own else shared)["parameters"] = parameters
            checkpoint.save(self.folder, step, shared, local, self.keep)
        except OSError as e:
            raise UserError(f"{e}; free space or set output_dir=FOLDER on another disk") from e

    def _parameters(self) -> dict[str, Any]:
        return {name: held(p).detach() for name, p in self.method.ddp.module.named_parameters()}

    def find(self) -> checkpoint.Restored | None:
        """The newest whole checkpoint, read; None where there is none. Every rank calls it. Raises UserError."""
        try:
            return checkpoint.restore(self.folder, any_world=self.resize)
        except (ValueError, OSError) as e:
            raise UserError(f"cannot resume: {e}") from e

    def apply(self, found: checkpoint.Restored) -> dict[str, int | None] | None:
        """Puts a checkpoint into effect. Returns the `traffic` that it was saved with; None of other nodes or ranks.

        Raises UserError when it is of another model or optimizer.
        """
        try:
            shared, local = found.shared, self._own(found)
            with torch.no_grad():
                saved = (local if "parameters" in local else shared)["parameters"]
                _copy(self._parameters(), saved, "parameter")
                _copy(dict(self.method.ddp.module.named_buffers()), local["buffers"], "buffer")
            # What the configuration says counts: it is the saved one's, or resume_allow_config_change=true.
            asked = [{k: v for k, v in g.items() if k != "params"} for g in self.method.optimizer.param_groups]
            self.method.optimizer.load_state_dict(local["optimizer"])
            for group, options in zip(self.method.optimizer.param_groups, asked, strict=True):
                group |= options
            if "workload" in local:
                self.method.workload.load_state_dict(local["workload"])
            if self.method.scaler is not None and "scaler" in local:
                self.method.scaler.load_state_dict(local["scaler"])
            if "rng" in local:
                torch.set_rng_state(local["rng"])
            if "cuda_rng" in local and torch.cuda.is_available():
                torch.cuda.set_rng_state(local["cuda_rng"])
            return local.get("traffic") if local.get("nodes", self.nodes) == self.nodes else None
        except ValueError as e:
            raise UserError(f"cannot resume from {found.folder}: {e}") from e
        except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, StopIteration) as e:
            # Whole, but not what this program writes: whoever can write a checkpoint can write its checksums.
            what = " ".join(str(e).split())[:100]
            raise UserError(f"cannot resume from {found.folder}: it is not a checkpoint of this run ({what})") from e

    def _own(self, found: checkpoint.Restored) -> dict[str, Any]:
        """What this rank resumes with. Of another number of ranks: random states and text under way start fresh."""
        sharded = isinstance(self.method.ddp, ShardedModel)
        if found.same_world:
            fits = elastic.of_this_shape(self.method.optimizer, found.local["optimizer"])
            if fits or sharded or not self.resize:
                return found.local
            return found.local | {"optimizer": elastic.state(self.method.optimizer, found), "traffic": None}
        if sharded:
            raise ValueError("with comm.topology=hsdp the number of nodes and ranks has to stay")
        own = {key: value for key, value in found.local.items() if key in ("buffers", "scaler")}
        own["optimizer"] = elastic.state(self.method.optimizer, found)
        if "parameters" in found.local:
            own["parameters"] = elastic.mean(local["parameters"] for local in found.of_all())
        return own


def _copy(mine: dict[str, Any], saved: dict[str, Any], what: str) -> None:
    if set(mine) != set(saved):
        odd = ", ".join(sorted(set(mine) ^ set(saved))[:3])
        raise ValueError(f"the checkpoint is of another model: {what} {odd}")
    for name, tensor in mine.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"{what} {name} has shape {tuple(saved[name].shape)}, here {tuple(tensor.shape)}")
        tensor.copy_(saved[name])


def prime_buckets(method: AttachedMethod, batch: Any) -> None:
    """One backward pass without effect, after which DDP rebuilds its buckets as it did in the interrupted run.

    The sums of a ring all-reduce depend, in their last bit, on where in a bucket an element lies. Call before `apply`,
    which puts back what the pass changed (batch statistics, random state).
    """
    saved = method.workload.state_dict()
    with method.attachment.paused():
        method.workload.loss(method.ddp, batch).backward()
    method.ddp.zero_grad(set_to_none=True)
    method.workload.load_state_dict(saved)


def broadcast_buffers(module: nn.Module) -> None:
    """Gives every rank rank 0's buffers (batch statistics), so that ranks evaluate the same model."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
