"""One method on a model: optimizer, communication, loss scale, and the training step that they make."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import hydra.utils
import torch
from torch import Tensor, nn

import birder
from birder import BucketOptimizer
from birder.predict.recording import clock_of
from experiments.config import schedules
from experiments.training import step_profile
from experiments.training.products import products_of
from experiments.training.sharded import ShardedModel, Wrapped
from experiments.training.torch_hooks import HookAttachment, attach_hook
from experiments.workloads.base import Batch, Shard, Workload
from experiments.workloads.files import reading
from launch.errors import UserError, refused
from launch.spec import RunSpec

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Part = Callable[..., None]
"""Called with the parts of a step as they end: `part(name)`, or `part(name, seconds)` (`StepClock.part`)."""


RELEASED: dict[tuple[type, Any], Any] = {
    (birder.SLAMB, "v1"): birder.SLAMBv1,
    (birder.SLAMB, "v2"): birder.SLAMBv2,
    (birder.ZeroOneAdam, "deepspeed"): birder.DeepSpeedZeroOneAdam,
}
"""The classes of what a configuration names by a word."""


class Length:
    """How long a run is, in optimizer steps: {epoch, total}; short_of: `train.max_steps` that the epochs do not reach.

    Raises UserError where an epoch has no whole step.
    """

    def __init__(self, config: dict[str, Any], workload: Workload, world_size: int) -> None:
        settings = config["train"]
        accumulate = int(settings["accumulate"])
        self.epoch = workload.steps_per_epoch(world_size, int(settings["batch_per_rank"])) // accumulate
        if self.epoch < 1:
            raise UserError(f"train.accumulate={accumulate} is more than the batches of one epoch")
        self.total = int(settings["epochs"]) * self.epoch
        self.short_of: int | None = None
        if (most := settings["max_steps"]) is not None:
            self.short_of = int(most) if self.total < int(most) else None
            self.total = min(self.total, int(most))


def begin(spec: RunSpec, shard: Shard, world_size: int) -> tuple[Workload, Length, nn.Module]:
    """The workload with its data, how long the run is, and the initial model, the same on every rank. Raises UserError."""
    torch.manual_seed(spec.seed)
    workload: Workload = hydra.utils.instantiate(spec.config["workload"])
    with reading(spec.config["data"]["path"]):
        workload.prepare(shard)
    length = Length(spec.config, workload, world_size)
    return workload, length, workload.build_model().to(shard.device)


def batches(config: dict[str, Any], workload: Workload, shard: Shard, length: Length, start: int) -> Iterator[Batch]:
    """Batches from number `start` on, over epochs; the incomplete accumulation at an epoch's end is dropped."""
    settings = config["train"]
    per_epoch = length.epoch * int(settings["accumulate"])
    epoch, skip = divmod(start, per_epoch)
    while True:
        stream = workload.train_batches(
            shard, int(settings["batch_per_rank"]), seed=int(config["seed"]), epoch=epoch, start=skip
        )
        for _, batch in zip(range(per_epoch - skip), stream):
            yield batch
        epoch, skip = epoch + 1, 0


class AttachedMethod:
    """An optimizer attached to `ddp` as a resolved configuration says. Made on every rank.

    optimizer, attachment, scaler: what makes a step; scaler is None but for fp16.
    Raises UserError for arguments that optimizer or hook do not take.
    """

    def __init__(
        self,
        config: dict[str, Any],
        workload: Workload,
        ddp: Wrapped,
        shard: Shard,
        length: Length,
        seed: int,
    ) -> None:
        self.config, self.settings = config, config["train"]
        self.workload, self.ddp, self.device, self.length = workload, ddp, shard.device, length
        self._seed = seed
        self.accumulate = int(self.settings["accumulate"])
        half = self.settings["precision"] == "fp16"
        self.scaler = torch.amp.GradScaler(shard.device.type) if half else None
        self.optimizer: BucketOptimizer
        self.attachment: birder.Attachment | HookAttachment
        self._updates: list[tuple[Any, Any]] = []
        self.connect()
        self.base_lrs = [g["lr"] for g in self.optimizer.param_groups]

    def make_optimizer(self) -> BucketOptimizer:
        """The optimizer that the configuration says. Raises UserError for arguments that it does not take.

        A `warmup_steps` or `local_doubling` below 1 is a fraction of the run's steps.
        """
        asked = self.config["optimizer"]
        options = {k: v for k, v in asked.items() if k not in ("_target_", "weight_decay")}
        options["max_grad_norm"] = self.settings["max_grad_norm"]
        for name in ("warmup_steps", "local_doubling"):
            if 0 < options.get(name, 0) < 1:
                options[name] = max(1, round(options[name] * self.length.total))
        with refused("optimizer", TypeError, ValueError):
            cls = hydra.utils.get_class(asked["_target_"])
            cls = RELEASED.get((cls, options.get("form") or options.get("variant")), cls)
            decay = float(asked.get("weight_decay", 0.0))
            groups = self.workload.param_groups(self.ddp.module, decay)
            if issubclass(cls, birder.Muon):
                groups = cls.groups(self.ddp.module, groups)
            return cls(groups, weight_decay=decay, seed=self._seed, **options)

    def connect(self) -> None:
        """Makes `optimizer` and `attachment`."""
        comm, ddp = self.config["comm"], self.ddp
        self.optimizer = self.make_optimizer()
        unit_mb, overlap = comm["bucket_cap_mb"], comm["overlap"] and self.scaler is None
        common: dict[str, Any] = {"overlap": overlap, "communicate": comm["enabled"], "unit_mb": unit_mb}
        if isinstance(ddp, ShardedModel):  # FSDP2 inside a node
            with refused("comm.topology=hsdp", TypeError):
                self.attachment = birder.attach(ddp.module, self.optimizer, mesh=ddp.mesh, **common)
        elif comm.get("hook") and comm["enabled"]:  # for dense optimizers
            options = {"rank": comm["powersgd_rank"], "error_feedback": comm["error_feedback"], "unit_mb": unit_mb}
            with refused("comm.hook", ValueError):
                self.attachment = attach_hook(ddp, self.optimizer, comm["hook"], **options)
        else:
            by_node = comm["topology"] == "hierarchical"
            made = self.workload.communicator(by_node)
            self.attachment = birder.attach(ddp, self.optimizer, hierarchical=by_node, communicator=made, **common)
        if self.device.type == "cuda":
            self._watch_updates()

    def seed(self, rank: int) -> None:
        """Begins torch's random numbers of this rank: dropout and the like differ between ranks."""
        torch.manual_seed(self._seed * 1_000_003 + rank + 1)

    def batches(self, shard: Shard, start: int) -> Iterator[Batch]:
        """What `step` takes its batches from, from number `start` on."""
        return batches(self.config, self.workload, shard, self.length, start)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the parameters are what is to be evaluated: where the ranks' models differ, their mean."""
        return self.optimizer.averaged()

    @property
    def lr(self) -> float:
        """The learning rate of the first group, now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_bytes(self) -> int:
        """Bytes that optimizer and connection keep on this rank between steps."""
        return int(self.optimizer.state_bytes() + self.attachment.state_bytes())

    def set_lr(self, step: int) -> None:
        """The learning rate of step number `step`, from 1, as the schedule says."""
        factor = schedules.factor(self.settings["lr_schedule"], step, self.length.total, self.length.epoch)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def step(self, stream: Iterator[Batch], part: Part = lambda *_: None) -> Tensor:
        """One optimizer step; this rank's mean loss, which on CUDA nobody has waited for."""
        trace, began = self.optimizer.pipeline.trace, time.perf_counter()
        self.optimizer.zero_grad()
        loss = forward_backward(
            self.workload, self.ddp, stream, self.settings, self.device, self.scaler, lambda: part("data")
        )
        part("forward_backward")
        trace.add("compute", None, began, time.perf_counter())
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        part("optimizer_step")
        # Encoding and collectives run during backward, too: of these only exposed_wire is a share of the step's time.
        for name, seconds in step_profile.split(trace.last).items():
            part(name, seconds)
        return loss

    def update_seconds(self) -> list[float]:
        """What the updates of parameters took since the last call: on the CPU that of the last step alone.

        On CUDA they are read from events: call it after the device has been waited for.
        """
        if self.device.type == "cuda":
            read = [clock_of(self.device).ms(*moments) / 1000 for moments in self._updates]
            self._updates.clear()
            return read
        return [sum(s.seconds for s in self.optimizer.pipeline.trace.last if s.kind == "apply")]

    def _watch_updates(self) -> None:
        """Has every update leave two events on the device's current stream."""
        update, clock = self.optimizer.update, clock_of(self.device)

        def watched(*arguments: Any) -> None:
            began = clock.mark()
            update(*arguments)
            self._updates.append((began, clock.mark()))
            del self._updates[:-1024]  # nobody may be asking

        self.optimizer.update = watched  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Ends what was started. No step may follow."""
        self.attachment.close()


def forward_backward(
    workload: Workload,
    ddp: Wrapped,
    stream: Iterator[Batch],
    settings: dict[str, Any],
    device: torch.device,
    scaler: torch.amp.GradScaler | None = None,
    have_data: Callable[[], None] = lambda: None,
) -> Tensor:
    """The micro-batches of one step through DDP; their mean loss, detached.

    settings: `train` of the configuration. have_data: called when the first micro-batch is there.
    """
    losses, accumulate = [], int(settings["accumulate"])
    dtype = PRECISIONS[settings["precision"]]
    for micro in range(accumulate):
        batch = next(stream)
        if micro == 0:
            have_data()
        with products_of(settings), contextlib.nullcontext() if micro == accumulate - 1 else ddp.no_sync():
            with torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext():
                loss = workload.loss(ddp, batch) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
