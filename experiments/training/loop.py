"""The training loop: the same for every workload, method and cluster. Runs on every rank."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import hydra.utils
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import BucketOptimizer
from experiments.config import schedules
from experiments.records import labels, record
from experiments.training import presence, step_profile
from experiments.training.clock import StepClock
from experiments.training.nic import NicMeter
from experiments.training.resume import Checkpoints, broadcast_buffers, prime_buckets
from experiments.training.rounds import Rounds
from experiments.training.torch_hooks import HookAttachment, attach_hook
from experiments.training.track import Tracker
from experiments.workloads.base import Batch, Shard, Workload, all_sum
from launch.errors import UserError
from launch.spec import RunSpec

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(spec: RunSpec) -> None:
    """Trains as the rank that torchrun's environment names, and writes the record on rank 0.

    Raises UserError for what the user can mend, RuntimeError when the loss is no number any more.
    """
    shard = _join_world(spec)
    try:
        _Run(spec, shard).run()
        dist.barrier()
        presence.stop()
    finally:
        dist.destroy_process_group()


def _join_world(spec: RunSpec) -> Shard:
    cluster, threads = spec.config["cluster"], spec.config["train"]["threads"]
    backend = cluster.get("backend", "auto")
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if threads:
        torch.set_num_threads(int(threads))
    elif "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    timeout = timedelta(seconds=float(cluster.get("timeout_s", 300)))
    store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
    silence_s = float(cluster.get("silence_s", 30))
    presence.start(store, rank, world, silence_s=silence_s, join_s=timeout.total_seconds())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return Shard(rank, world, device)


def make_optimizer(
    config: dict[str, Any], groups: list[dict[str, Any]], seed: int, total_steps: int
) -> BucketOptimizer:
    """The optimizer of a resolved configuration over `groups`. Raises UserError for arguments that it does not take.

    A `warmup_steps` or `local_doubling` below 1 is a fraction of `total_steps`.
    """
    options = {k: v for k, v in config["optimizer"].items() if k not in ("_target_", "weight_decay")}
    options["max_grad_norm"] = config["train"]["max_grad_norm"]
    for name in ("warmup_steps", "local_doubling"):
        if 0 < options.get(name, 0) < 1:
            options[name] = max(1, round(options[name] * total_steps))
    try:
        cls = hydra.utils.get_class(config["optimizer"]["_target_"])
        return cls(groups, weight_decay=config["optimizer"].get("weight_decay", 0.0), seed=seed, **options)
    except (TypeError, ValueError) as e:
        raise UserError(f"optimizer: {e}") from e


class _Run:
    """One run on one rank."""

    def __init__(self, spec: RunSpec, shard: Shard) -> None:
        self.spec, self.shard, self.config = spec, shard, spec.config
        self.settings = spec.config["train"]
        self.main = shard.rank == 0
        torch.manual_seed(spec.seed)  # the same initial model on every rank
        self.workload: Workload = hydra.utils.instantiate(self.config["workload"])
        self.workload.prepare(shard)
        self.batch = int(self.settings["batch_per_rank"])
        self.accumulate = int(self.settings["accumulate"])
        self.epoch_steps = self.workload.steps_per_epoch(shard.world_size, self.batch) // self.accumulate
        if self.epoch_steps < 1:
            raise UserError(f"train.accumulate={self.accumulate} is more than the batches of one epoch")
        self.total_steps = int(self.settings["epochs"]) * self.epoch_steps
        if self.settings["max_steps"] is not None:
            self.total_steps = min(self.total_steps, int(self.settings["max_steps"]))
        model = self.workload.build_model().to(shard.device)
        groups = self.workload.param_groups(model, float(self.config["optimizer"].get("weight_decay", 0.0)))
        self.optimizer = make_optimizer(self.config, groups, spec.seed, self.total_steps)
        self.base_lrs = [g["lr"] for g in self.optimizer.param_groups]
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[shard.device] if shard.device.type == "cuda" else None,
            bucket_cap_mb=self.config["comm"]["bucket_mb"],
        )
        half = self.settings["precision"] == "fp16"
        self.scaler = torch.amp.GradScaler(shard.device.type) if half else None
        comm = self.config["comm"]
        self.attachment = self._hook() or birder.attach(
            self.ddp,
            self.optimizer,
            hierarchical=comm["topology"] == "hierarchical",
            communicator=self.workload.communicator(comm["topology"] == "hierarchical"),
            overlap=comm["overlap"] and not half,
            communicate=comm["enabled"],
            unit_mb=comm["bucket_mb"],
        )
        self.clock = StepClock(int(self.settings["timing_warmup"]), shard.device)
        self.rounds = Rounds(self.attachment.counter)
        asked = self.config.get("profile")
        self.profile = step_profile.Kept(int(asked["steps"])) if asked else None
        self.nic = NicMeter()
        # Dropout and the like differ between ranks from here on.
        torch.manual_seed(spec.seed * 1_000_003 + shard.rank + 1)
        save = self.config["checkpoint"]
        self.checkpoints = Checkpoints(
            spec.path / "checkpoints", save["keep"], self.ddp, self.optimizer, self.workload, self.scaler
        )
        self.save_every = int(save["every"])
        self.metrics: dict[str, float] = {}
        self.evaluates = bool(self.config.get("evaluate", True))  # False: a run that only measures time

    def _hook(self) -> HookAttachment | None:
        """One of PyTorch's own hooks, where the configuration asks for it."""
        comm = self.config["comm"]
        if not comm.get("hook") or not comm["enabled"]:
            return None
        try:
            return attach_hook(
                self.ddp, self.optimizer, comm["hook"], rank=comm["powersgd_rank"], unit_mb=comm["bucket_mb"]
            )
        except ValueError as e:
            raise UserError(f"comm.hook: {e}") from e

    def run(self) -> None:
        done = self._resume()
        sample = self.workload.sample
        with Tracker(self.spec, self.main, total=self.total_steps, start=done, sample=sample) as tracker:
            self._loop(done, tracker)

    def _loop(self, done: int, tracker: Tracker) -> None:
        samples = self.workload.samples(self.batch) * self.accumulate * self.shard.world_size
        self.ddp.train()
        counted = False
        batches = self._batches(done * self.accumulate)
        for step in range(done + 1, self.total_steps + 1):
            if self.clock.counting and not counted:
                self.attachment.counter.reset()
                self.rounds.reset()
                self.nic.resume()
                counted = True
            self._set_lr(step)
            self.clock.start()
            began, timed = time.perf_counter(), self.clock.counting
            loss = self._step(batches)
            seconds = self.clock.stop()
            if timed and self.profile is not None:
                self.profile.keep(step, began, seconds, self.optimizer.pipeline.trace.last)
            self.rounds.end_step()
            if not math.isfinite(loss) and self.scaler is None:
                raise RuntimeError(f"the loss is {loss} at step {step}: lower optimizer.lr")
            evaluate = self.evaluates and (step == self.total_steps or self._evaluation_due(step))
            save = self.save_every and (step % self.save_every == 0 or step == self.total_steps)
            if evaluate or save:
                self.nic.pause()
            if evaluate:
                self._evaluate()
            tracker.log(
                step,
                loss=loss,
                metric=self.metrics.get(self.workload.metric) if evaluate else None,
                samples_per_s=samples / seconds,
                lr=self.optimizer.param_groups[0]["lr"],
            )
            if save:
                self.checkpoints.save(step)
            if (evaluate or save) and counted and step < self.total_steps:
                self.nic.resume()
        if done >= self.total_steps and not self.metrics and self.evaluates:
            self._evaluate()
        self._finish(tracker, samples)

    def _resume(self) -> int:
        if self.config["resume"] != "auto":
            return 0
        found = self.checkpoints.find()
        if found is None:
            return 0
        if self.main:
            for line in found.passed_over:
                print(f"{line}; going on from {found.folder.name}", flush=True)
        if found.step > self.total_steps:
            raise UserError(f"this run ends at step {self.total_steps}, and {found.folder} is of step {found.step}")
        prime_buckets(self.ddp, self.attachment, self.workload, next(self._batches(0)))
        self.checkpoints.apply(found)
        return found.step

    def _batches(self, start: int) -> Iterator[Batch]:
        """Batches from number `start` on, over epochs; the incomplete accumulation at an epoch's end is dropped."""
        per_epoch = self.epoch_steps * self.accumulate
        epoch, skip = divmod(start, per_epoch)
        while True:
            stream = self.workload.train_batches(self.shard, self.batch, seed=self.spec.seed, epoch=epoch, start=skip)
            for _, batch in zip(range(per_epoch - skip), stream):
                yield batch
            epoch, skip = epoch + 1, 0

    def _set_lr(self, step: int) -> None:
        factor = schedules.factor(self.settings["lr_schedule"], step, self.total_steps, self.epoch_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = PRECISIONS[self.settings["precision"]]
        return torch.autocast(self.shard.device.type, dtype) if dtype else contextlib.nullcontext()

    def _step(self, batches: Iterator[Batch]) -> float:
        """One optimizer step; returns this rank's mean loss."""
        losses = []
        trace, began = self.optimizer.pipeline.trace, time.perf_counter()
        self.optimizer.zero_grad()
        for micro in range(self.accumulate):
            last = micro == self.accumulate - 1
            batch = next(batches)
            if micro == 0:
                self.clock.part("data")
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                with self._autocast():
                    loss = self.workload.loss(self.ddp, batch) / self.accumulate
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            losses.append(loss.detach())
        self.clock.part("forward_backward")
        trace.add("compute", None, began, time.perf_counter())
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.clock.part("optimizer_step")
        # Encoding and collectives run beside backward, too: of these only exposed_wire is a share of the step's time.
        for name, seconds in step_profile.split(trace.last).items():
            self.clock.part(name, seconds)
        return float(torch.stack(losses).sum())

    def _evaluation_due(self, step: int) -> bool:
        every = int(self.settings["eval_every"])
        return step % every == 0 if every else step % self.epoch_steps == 0

    def _evaluate(self) -> None:
        broadcast_buffers(self.ddp.module)
        rng = torch.get_rng_state()
        self.ddp.module.eval()
        # Where the ranks' models differ, their mean is what is evaluated.
        with torch.no_grad(), self.optimizer.averaged():
            self.metrics = self.workload.evaluate(self.ddp.module, self.shard)
        self.ddp.train()
        torch.set_rng_state(rng)

    def _finish(self, tracker: Tracker, samples: int) -> None:
        self.nic.pause()
        spec, counter, steps = self.spec, self.attachment.counter, len(self.clock.steps)
        timing = self.clock.summary(samples, uneven=self.rounds.uneven)
        intra, inter = all_sum([float(counter.intra), float(counter.inter)], self.shard)
        # The ranks of a node share its interface: the first of them speaks for all.
        nic = self.nic.total if os.environ.get("LOCAL_RANK", "0") == "0" else (0, 0)
        tx, rx, unknown = all_sum([*map(float, nic or (0, 0)), float(nic is None)], self.shard)
        known = steps and not unknown
        kept = self.optimizer.state_bytes() + self.attachment.state_bytes()
        state = all_sum([float(kept)], self.shard)[0] / self.shard.world_size
        profiles: list[Any] = [None] * self.shard.world_size
        if self.profile is not None:
            dist.all_gather_object(profiles, self.profile)
        if not self.main:
            return
        name = self.workload.metric
        per = spec.nodes * steps
        metric = {
            "name": name,
            "value": self.metrics.get(name),
            "target": self.workload.target,
            "higher_is_better": self.workload.higher_is_better,
            "all": self.metrics,
        }
        tracker.close(self.metrics)
        written = record.write(
            record.from_spec(
                spec,
                data={"name": self.workload.data_name, "synthetic": self.workload.synthetic},
                timing=timing,
                bytes_per_step={
                    "payload_intra": round(intra / per) if steps else None,
                    "payload_inter": round(inter / per) if steps else None,
                    "nic_tx": round(tx / per) if known else None,
                    "nic_rx": round(rx / per) if known else None,
                },
                collectives_per_step=round(counter.collectives / steps, 2) if steps else None,
                rounds_per_step=round(self.rounds.per_step or 0.0, 4) if steps else None,
                state_bytes_per_rank=round(state),
                metric=metric if self.metrics else {},
                curve=record.save_curve(spec.path / "curve.csv", self.config["results_dir"], spec.id),
                device=self.shard.device.type,
            ),
            self.config["results_dir"],
        )
        value = f", {name} {self.metrics[name]:.2f}" if name in self.metrics else ""
        typical = f"{timing[timing['typical'] + '_ms']:.0f} ms a step" if timing["steps"] else "too few steps to time"
        print(f"{typical}{value}; record {written}", flush=True)
        if self.profile is not None:
            title = f"{labels.method(self.config)}, {spec.exp}, {spec.nodes} x {spec.ranks_per_node}"
            for path in step_profile.write(profiles, spec.path / "profile", title):
                print(f"profile {path}", flush=True)
