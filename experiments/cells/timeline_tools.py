"""Makes timelines: from a published rate, or by measuring real training steps. Needs torch and the models' packages."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from birder.predict import architecture, recording
from birder.predict.timeline import Gradient, IntraNode, Timeline
from experiments.cells import architectures
from experiments.cells.architectures import Asked
from launch.errors import UserError, refused

SEQUENCE = 384
"""Tokens of a SQuAD sample."""
WARMUP = 5
"""Steps before the measured ones: DDP is not involved, but the GPU's clock and cuDNN's choice of kernels are."""

Loss = Callable[[], Tensor]


def build(model: str, batch: int, device: str) -> tuple[nn.Module, Loss]:
    """The model and a function that runs its forward on random data. On "meta" nothing is computed. Raises UserError."""
    torch.manual_seed(0)
    with torch.device(device):
        if model == "resnet50":
            return architectures.of_torchvision(model, batch)
        if model == "bert_base":
            from transformers import BertConfig

            # "eager" spells attention out in products that the counter of operations knows.
            asked = Asked(model, batch, "fp32", SEQUENCE, attention="eager" if device == "meta" else "sdpa")
            return architectures.of_transformers(BertConfig(architectures=["BertForQuestionAnswering"]), asked)
        if model == "tiny":
            net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            rows = torch.randn(batch, 64)
            return net, lambda: net(rows).square().mean()
    raise UserError(f"model {model!r} is unknown: resnet50, bert_base or tiny")


def work_until_ready(model: str) -> list[tuple[str, tuple[int, ...], float]]:
    """(parameter, shape, share of backward's operations done when its gradient is ready), in the model's order.

    Counted on a real forward and backward without data: convolutions and matrix products, nothing else. What lies
    between two of them (normalisation, embeddings) counts as free.
    """
    with refused(model, ValueError):
        work = architecture.count(*build(model, 2, "meta"), "fp32")
    done = list(itertools.accumulate((k.flops for k in work.kernels), initial=0.0))
    forward, total = done[work.forward], done[-1]
    return [(name, s, (done[work.ready[name]] - forward) / (total - forward)) for name, s in work.shapes.items()]


def make(options: argparse.Namespace) -> Timeline:
    """Spreads a published rate: forward a third of a step, backward two thirds, by the operations of each layer."""
    _check_gpus(options)
    if options.samples_per_s <= 0 or options.batch < 1:
        raise UserError("--samples-per-s and --batch must be positive")
    step_ms = 1000 * options.batch / options.samples_per_s
    forward_ms = step_ms / 3
    gradients = tuple(
        Gradient(name, shape, min(round(forward_ms + share * (step_ms - forward_ms), 4), round(step_ms, 4)))
        for name, shape, share in work_until_ready(options.model)
    )
    spread = "forward 1/3 and backward 2/3 of the step, backward spread by the operations of each layer"
    return Timeline(
        name=options.name or f"{options.model}_b{options.batch}_{options.precision}",
        model=options.model,
        gpu=options.gpu,
        precision=options.precision,
        batch_per_gpu=options.batch,
        gpus_per_node=options.gpus_per_node,
        forward_ms=round(forward_ms, 4),
        step_ms=round(step_ms, 4),
        gradients=gradients,
        intra_node=IntraNode.of(sum(g.numel for g in gradients), options.gpus_per_node),
        source=options.source,
        note="; ".join(filter(None, [f"{options.samples_per_s:g} samples/s; {spread}", options.note])),
    )


def _check_gpus(options: argparse.Namespace) -> None:
    if options.gpus_per_node < 1:
        raise UserError(f"--gpus-per-node must be at least 1, got {options.gpus_per_node}")


def record(options: argparse.Namespace) -> Timeline:
    """Measures forward and backward on this machine: the median over `options.steps` steps of each gradient's time.

    The optimizer's update is not in it. Raises UserError where the precision asked for is not to be had.
    """
    _check_gpus(options)
    if options.steps < 1 or options.batch < 1:
        raise UserError("--steps and --batch must be at least 1")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU here: record with --device cpu or on a machine that has one")
    if device == "cpu" and options.precision == "tf32":
        raise UserError("tf32 is a GPU's format: use --precision fp32 or amp on a CPU")
    net, loss = build(options.model, options.batch, device)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision != "fp32"
        torch.backends.cudnn.benchmark = True
    dtype = torch.float16 if device == "cuda" else torch.bfloat16

    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    slug = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    command = ["python", "experiments/timelines.py", "record", "--model", options.model]
    command += ["--batch", str(options.batch), "--precision", options.precision, "--steps", str(options.steps)]
    return _measured(
        net,
        loss,
        options.steps,
        lambda: torch.autocast(device, dtype, options.precision == "amp"),
        name=options.name or f"{options.model}_b{options.batch}_{options.precision}_{slug}",
        model=options.model,
        gpu=gpu,
        precision=options.precision,
        batch_per_gpu=options.batch,
        gpus_per_node=options.gpus_per_node,
        command=shlex.join(command),
        note="; ".join(filter(None, ["forward and backward, without the optimizer's update", options.note])),
    )


def _measured(
    net: nn.Module,
    loss: Loss,
    steps: int,
    cast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **about: Any,
) -> Timeline:
    """Forward, the loss in it, and backward of a model on its device: medians over so many steps. about: as of `assemble`."""
    watch = recording.Watch(net, recording.clock_of(next(net.parameters()).device))

    def step() -> None:
        net.zero_grad()
        with cast():
            value = loss()
        watch.mark(recording.FORWARD)
        value.backward()

    times = recording.measured(watch, step, steps, WARMUP)
    made = recording.assemble(times, watch.shapes, frozen=watch.frozen, **about)
    return replace(made, wall_ms=None)  # a whole step is more than this


def record_module(where: str, batch: int, steps: int) -> Timeline:
    """Records the timeline of `package.module:function` on this machine. function(batch) returns (module, loss).

    Raises UserError for a function that is not there or returns something else, and for a model that gets no gradient.
    """
    about: dict[str, Any] = {"model": where, "precision": "unchanged", "batch_per_gpu": batch, "gpus_per_node": 1}
    with refused(f"model={where} cannot be recorded", Exception):  # of a user's own function
        net, loss = architectures.function(where, batch)
        if not any(p.requires_grad for p in net.parameters()):
            raise ValueError("the module has no parameter that gets a gradient")
        device = next(net.parameters()).device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        about |= {"name": where.partition(":")[2], "gpu": gpu, "command": f"model={where} batch={batch}"}
        return _measured(net, loss, steps, **about)
