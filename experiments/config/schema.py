"""Every key of the configuration: type, range and meaning. docs/configuration.md is written from this file.

The sections `optimizer` and `cluster` depend on the chosen class: schema_optimizer.py, schema_cluster.py. The arguments of
a workload have the types of its constructor.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from experiments.config.kinds import (
    Count,
    CountOrZero,
    Epochs,
    Every,
    Folder,
    Location,
    Megabytes,
    Name,
    NotNegative,
    Positive,
    Rates,
    Scalar,
    Seed,
    Switch,
    Text,
    Variants,
    Warmup,
    doc,
)


class Section(BaseModel):
    """A section whose keys are exactly these."""

    model_config = ConfigDict(extra="forbid")


class Data(Section):
    path: Location | None = doc("folder or file of the data set; null: the workload's own default, often synthetic")


class Method(Section):
    label: Text | None = doc("how tables call the method; an optimizer's file sets it")
    sends: Text | None = doc("what travels: 1bit, blocks, masked, model, topk; an optimizer's file sets it")


class LrSchedule(Section):
    """A null key is not set. Which keys belong to which schedule: experiments/config/schedules.py."""

    name: Literal["constant", "linear", "cosine", "polynomial", "exponential", "step"] = doc("its shape")
    warmup: Warmup | None = doc("linear rise from 0 at the start", None)
    final: NotNegative | None = doc("share of the rate that is left at the end: linear, cosine, polynomial", None)
    power: Positive | None = doc("exponent: polynomial", None)
    gamma: Positive | None = doc("factor of a drop: exponential, step", None)
    every: Every | None = doc("steps between drops: exponential", None)
    milestones: Epochs | None = doc("epochs after which the rate drops: step", None)


class Train(Section):
    batch_per_rank: Count = doc("samples in a micro-batch of one rank")
    epochs: Count = doc("passes over the training set")
    max_steps: Count | None = doc("optimizer steps at most; null: epochs decide")
    accumulate: Count = doc("micro-batches per optimizer step")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = doc(
        "of forward and backward: tf32 on GPUs; bf16, fp16: autocast, fp16 with a GradScaler"
    )
    bf16_matmul: Literal["native", "fp32"] = doc(
        "kernels for products and convolutions of bf16: fp32, then rounded, is faster on a CPU without instructions for bf16"
    )
    max_grad_norm: Positive | None = doc("gradients are clipped to this global norm")
    lr_batch: Literal["total", "per_gpu"] = doc("the batch in a rule such as lr = 0.1 * batch / 256")
    lr_schedule: LrSchedule = doc("learning rate as a function of the step")
    eval_every: CountOrZero = doc("optimizer steps between evaluations; 0: at the end of each epoch")
    timing_warmup: CountOrZero = doc("first steps, left out of the timing")
    threads: Count | None = doc("torch threads per rank; null: cores divided by the ranks on this machine")


class Comm(Section):
    enabled: Switch = doc("false: no communication: the bound of any speedup, never a training result")
    topology: Literal["flat", "hierarchical", "hsdp"] = doc(
        "who is a worker: every rank, every node, or every node with the model sharded over its ranks by FSDP2"
    )
    overlap: Switch = doc("false: communicate after backward, not during it")
    bucket_cap_mb: Megabytes = doc("size of buckets and units, MB")
    hook: Literal["bf16", "fp16", "powersgd", "int4", "fp8"] | None = doc(
        "how gradients of a dense optimizer are averaged: PyTorch's hooks, or 4 or 8 bits with a scale for every block"
    )
    powersgd_rank: Count = doc("rank of PowerSGD's approximation")
    error_feedback: Switch = doc(
        "int4 and fp8: keep what rounding takes from a rank's gradient, and add it in the next step"
    )


class Checkpoint(Section):
    every: CountOrZero = doc("optimizer steps between checkpoints; 0: none")
    keep: Count = doc("how many of the last checkpoints stay")


class Parity(Section):
    """docs/accuracy.md."""

    baseline: Text | None = doc("optimizer that others are compared with, by the name of its class; null: none")
    margin: Positive | None = doc("difference that counts as none, in the metric's unit; null: no verdicts")
    relative: Switch = doc("true: differences and the margin are shares of the baseline's value", False)
    choose_seeds: Count = doc("how many seeds choose a learning rate by held-out data", 1)


class Timing(Section):
    """docs/timing.md."""

    mode: Literal["auto", "interleaved", "sequential"] = doc(
        "interleaved: all methods in one world; sequential: one run after the other; auto: interleaved if only time counts"
    )
    rounds: Count = doc("every method runs in each")
    rounds_when_rebuilding: Count = doc(
        "no more than these where memory holds one method at a time, rebuilt in each round"
    )
    steps: Count = doc("steps of a method in a round, at least; methods whose steps differ in kind take whole cycles")


class Scale(Section):
    name: Text = doc("column of `scales` that is used; chosen with scale=quick, paper or auto")


class Wandb(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = doc("auto: online where there is a key")
    project: Text | None = doc("project of the runs; null: WANDB_PROJECT, or birder")
    entity: Text | None = doc("account; null: the default one")
    group: Text | None = doc("group of the runs; null: that of the comparison")


class Profile(Section):
    steps: Count = doc("first timed steps, of which the one with the median time is shown")


class Config(Section):
    exp: Name = doc("name of the experiment; its file sets it")
    seed: Seed = doc("of initial weights, order of the data and random bits")
    results_dir: Folder = doc("records, curves, tables, plots")
    output_dir: Folder = doc("one folder per run: spec, logs, checkpoints, curve")
    resume: Literal["never", "auto"] = doc("auto: go on from the last complete checkpoint of the run `run_name`")
    resume_allow_config_change: Switch = doc(
        "true: go on although keys differ that change the result; the record says which", False
    )
    resume_resize: Literal["never", "average"] = doc(
        "average: resume with another number of nodes or ranks; new workers get the means of the old ones' state",
        "never",
    )
    run_name: Name | None = doc("folder of the run below output_dir; null: a new one")
    timeline: Text | None = doc("the GPU that an emulated cluster stands for: a file of results/timelines")
    compare: Variants = doc("variants that experiments/compare.py compares")
    tune: Rates | None = doc("learning rates from which experiments/all_methods.py chooses")
    evaluate: Switch = doc("false: measure only, evaluate nothing", True)
    data: Data = doc("the data set")
    method: Method = doc("what tables say of the method")
    train: Train = doc("the training loop")
    comm: Comm = doc("communication")
    checkpoint: Checkpoint = doc("checkpoints")
    parity: Parity = doc("how tables compare accuracies")
    timing: Timing = doc("how a comparison times its variants")
    scale: Scale = doc("size of the run")
    tracker: Literal["wandb", "tensorboard", "none"] = doc(
        "where runs and comparisons are also recorded, besides their records; `wandb` says how", "wandb"
    )
    wandb: Wandb = doc("Weights & Biases")
    profile: Profile | None = doc("added with +profile=step: one step as a chrome trace", None)
    scales: dict[str, dict[str, Scalar]] = doc("values of the workload at each scale, for ${scaled:key}")
    workload: dict[str, Any] = doc("class and arguments of the workload")
    optimizer: dict[str, Any] = doc("class and arguments of the optimizer")
    cluster: dict[str, Any] = doc("class and arguments of the launcher")
