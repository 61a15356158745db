"""The training loop: the same for every workload, method and cluster. Runs on every rank."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from experiments.records import labels, record
from experiments.training import rank_link, step_profile, traffic
from experiments.training.clock import StepClock
from experiments.training.method import AttachedMethod, begin
from experiments.training.resume import Checkpoints, broadcast_buffers, prime_buckets
from experiments.training.sharded import gathered, wrap
from experiments.training.track import Tracker
from experiments.training.traffic import NicMeter, Traffic, past_the_counters
from experiments.training.virtual import VirtualMethod
from experiments.training.world import gathered as everyones
from experiments.training.world import world
from experiments.workloads.base import Shard, all_sum
from launch.errors import UserError
from launch.failure import Diverged
from launch.spec import RunSpec
from launch.words import say


def train(spec: RunSpec) -> None:
    """Trains as the rank that torchrun's environment names, and writes the record on rank 0.

    Raises UserError for what the user can mend, Diverged when the loss, or a model that is evaluated, is NaN or inf.
    """
    with world(spec) as shard:
        _Run(spec, shard).run()


LOST = 20
"""Losses of NaN or inf, one after the other, with which a run in fp16 has diverged: a GradScaler's scale of 2^16, halved
in each of these steps, has long been below 1."""


class _Run:
    """One run on one rank."""

    def __init__(self, spec: RunSpec, shard: Shard) -> None:
        self.spec, self.shard, self.config = spec, shard, spec.config
        self.settings = spec.config["train"]
        self.main = shard.rank == 0
        self.batch = int(self.settings["batch_per_rank"])
        self.accumulate = int(self.settings["accumulate"])
        self.virtual = labels.is_virtual(self.config)
        # Virtual ranks are all in this process, which is the only one of its world.
        self.world_size = spec.nodes * spec.ranks_per_node if self.virtual else shard.world_size
        self.workload, self.length, model = begin(spec, shard, self.world_size)
        self.ddp = wrap(model, spec, shard.device)
        kind = VirtualMethod if self.virtual else AttachedMethod
        self.method = kind(self.config, self.workload, self.ddp, shard, self.length, spec.seed)
        self.clock = StepClock(int(self.settings["timing_warmup"]), shard.device)
        asked = self.config.get("profile")
        self.profile = step_profile.KeptSpans(int(asked["steps"])) if asked else None
        nic = NicMeter(blind=self.virtual or past_the_counters(dist.get_backend()))
        self.traffic = Traffic(self.method.attachment.counter, nic)
        self.method.seed(shard.rank)
        save, resize = self.config["checkpoint"], self.config.get("resume_resize") == "average"
        self.checkpoints = Checkpoints(spec.path / "checkpoints", save["keep"], self.method, spec.nodes, resize)
        self.save_every = int(save["every"])
        self.link = rank_link.of_run(spec, shard.device)  # of a real network: probed
        self.metrics: dict[str, float] = {}
        self.losses: list[tuple[int, torch.Tensor]] = []  # not looked at yet
        self.lost = 0  # how many of the last ones, one after the other, were no number
        self.evaluates = bool(self.config.get("evaluate", True))  # False: a run that only measures time

    def run(self) -> None:
        if self.main and self.length.short_of is not None:
            say(
                f"train.epochs={self.settings['epochs']} ends this run at step {self.length.total}, "
                f"before train.max_steps={self.length.short_of}"
            )
        done = self._resume()
        # Without a checkpoint nothing tells how far a run came but its record.
        if (done >= self.length.total or (not done and self.config["resume"] == "auto")) and self._recorded(done):
            return
        names = {"sample": self.workload.sample, "metric": self.workload.metric}
        with Tracker(self.spec, self.main, total=self.length.total, start=done, **names) as tracker:
            self._loop(done, tracker)

    def _loop(self, done: int, tracker: Tracker) -> None:
        samples = self.workload.samples(self.batch) * self.accumulate * self.world_size
        self.ddp.train()
        stream, total = self.method.batches(self.shard, done * self.accumulate), self.length.total
        for step in range(done + 1, total + 1):
            if step > int(self.settings["timing_warmup"]):  # of the whole run, so that an interruption changes nothing
                self.traffic.begin()
            self.method.set_lr(step)
            self.clock.start()
            began, timed = time.perf_counter(), self.clock.counting
            loss = self.method.step(stream, self.clock.part)
            self.clock.stop()
            if timed and self.profile is not None:
                self.profile.keep(step, began, time.perf_counter() - began, self.method.optimizer.pipeline.trace.last)
            self.traffic.rounds.end_step()
            self.losses.append((step, loss))
            evaluate = self.evaluates and (step == total or self._evaluation_due(step))
            save = self.save_every and (step % self.save_every == 0 or step == total)
            # A loss on a GPU is read when its step has been waited for anyway.
            if not self.clock.unread or evaluate or save or step == total:
                self._check_losses()
            if evaluate or save:
                self.traffic.pause()
            if evaluate:
                self._evaluate()
            tracker.log(
                step,
                loss=loss,
                metric=self.metrics.get(self.workload.metric) if evaluate else None,
                samples_per_s=samples / self.clock.known if self.clock.known else None,
                lr=self.method.lr,
            )
            if save:
                self.checkpoints.save(step, self.traffic.sums())
            if (evaluate or save) and step < total:
                self.traffic.continue_()
        if done >= total and not self.metrics and self.evaluates:
            self._evaluate()
        self._finish(tracker, samples)

    def _check_losses(self) -> None:
        """Raises Diverged for the first loss that is NaN or inf; with a GradScaler, which skips such steps, after many."""
        for step, loss in self.losses:
            self.lost = 0 if math.isfinite(value := float(loss)) else self.lost + 1
            if self.lost == (1 if self.method.scaler is None else LOST):
                raise Diverged(f"the loss is {value} at step {step}: lower optimizer.lr")
        self.losses.clear()

    def _resume(self) -> int:
        if self.config["resume"] != "auto":
            return 0
        found = self.checkpoints.find()
        if found is None:
            return 0
        if self.main:
            for line in found.passed_over:
                say(f"{line}; resuming from {found.folder.name}")
        if found.step > self.length.total:
            raise UserError(f"this run ends at step {self.length.total}, and {found.folder} is of step {found.step}")
        prime_buckets(self.method, next(self.method.batches(self.shard, 0)))
        self.traffic.resume(self.checkpoints.apply(found))
        if self.main:
            say(f"resumed from step {found.step}")
        return found.step

    def _recorded(self, done: int) -> bool:
        """Whether an earlier start of this run ended well, so that nothing is left to do. Its record stays, and joins the
        comparison that this start belongs to. done: the checkpoint's step, 0 for none."""
        spec, results = self.spec, self.config["results_dir"]
        kept = record.ended_well(spec) if self.main else None
        if kept is not None and kept.steps is not None and kept.steps < done:
            kept = None  # of a shorter run, which has been trained on since
        if not all_sum([float(kept is not None)], self.shard)[0]:
            return False
        if kept is not None:
            path = record.write(replace(kept, group=spec.group or kept.group), results)
            say(f"this run has ended already; its record stays: {path}")
        return True

    def _evaluation_due(self, step: int) -> bool:
        every = int(self.settings["eval_every"])
        return step % every == 0 if every else step % self.length.epoch == 0

    def _evaluate(self) -> None:
        broadcast_buffers(self.ddp.module)
        self.ddp.module.eval()
        device = self.shard.device
        # Where the ranks' models differ, their mean is what is evaluated. Random states stay as they were.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            self.method.averaged(),
            gathered(self.ddp),
        ):
            # Of NaN, too, a model makes answers, and after the last update no loss shows it.
            if not all(bool(p.isfinite().all()) for p in self.ddp.module.parameters()):
                raise Diverged("the loss is nan from here on, for parameters are NaN or inf: lower optimizer.lr")
            self.metrics = self.workload.evaluate(self.ddp.module, self.shard)
        self.ddp.train()

    def _finish(self, tracker: Tracker, samples: int) -> None:
        self.traffic.pause()
        # One process that computes for all ranks says nothing about their time.
        timing: dict[str, Any] = {"steps": 0}
        self.clock.settle()
        if not self.virtual:
            timing = self.clock.summary(samples, uneven=self.traffic.rounds.uneven)
        spec = self.spec
        sent = traffic.of_record(self.traffic, spec.nodes, self.shard)
        state = all_sum([float(self.method.state_bytes())], self.shard)[0] / self.world_size
        profiles = [] if self.profile is None else everyones(self.profile)
        if not self.main:
            return
        name = self.workload.metric
        metric = {
            "name": name,
            "value": self.metrics.get(name),
            "target": self.workload.target,
            "higher_is_better": self.workload.higher_is_better,
            "all": self.metrics,
        }
        written = record.write(
            record.from_spec(
                spec,
                data=self.workload.data,
                timing=timing,
                **sent,
                steps=self.length.total,
                state_bytes_per_rank=round(state),
                metric=metric if self.metrics else {},
                curve=record.save_curve(spec.path / "curve.csv", self.config["results_dir"], spec.id),
                device=self.shard.device.type,
                link=self.link,
            ),
            self.config["results_dir"],
        )
        tracker.close(self.metrics)  # only now: a run whose record cannot be written has failed
        value = f", {name} {self.metrics[name]:.2f}" if name in self.metrics else ""
        typical = "virtual workers: no times" if self.virtual else "too few steps to time"
        typical = f"{timing[timing['typical'] + '_ms']:.0f} ms a step" if timing["steps"] else typical
        say(f"{typical}{value}")
        say(f"record: {written}")
        if profiles:
            title = f"{labels.method(self.config)}, {spec.exp}, {spec.nodes} x {spec.ranks_per_node}"
            for path in step_profile.write(profiles, spec.path / "profile", title):
                say(f"profile: {path}")
