"""Ranges of every configuration key, checked in the launcher before anything heavy is imported or started.

The rules are by key, so a new optimizer or cluster that uses the usual names is covered; what a class alone can know,
its constructor checks on the workers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.records import labels
from launch.errors import UserError

Rule = Callable[[Any], bool]


def whole(minimum: int) -> tuple[Rule, str]:
    """A whole number, `minimum` or more. True and 4.0 are none."""
    return (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= minimum,
        f"a whole number, {minimum} or more",
    )


def number(rule: Rule, words: str) -> tuple[Rule, str]:
    """A finite int or float for which `rule` holds."""
    return lambda v: is_number(v) and rule(v), f"a number {words}"


def optional(rule: tuple[Rule, str]) -> tuple[Rule, str]:
    """null, or what `rule` asks for."""
    return lambda v: v is None or rule[0](v), f"{rule[1]}, or null"


def one_of(*options: Any) -> tuple[Rule, str]:
    """One of `options`; a bool only matches a bool."""
    return (
        lambda v: any(v == o and isinstance(v, bool) == isinstance(o, bool) for o in options),
        "one of " + ", ".join(str(o).lower() if isinstance(o, bool) else str(o) for o in options),
    )


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(v) and 0 <= v < 1 for v in value)


def _bounds(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(is_number(v) for v in value)
    return pair and 0 <= value[0] <= value[1] and value[1] > 0


def _dilation(value: Any) -> bool:
    return value == "auto" or (is_number(value) and value >= 1)


def _milestones(value: Any) -> bool:
    return isinstance(value, list) and all(is_number(v) and v > 0 for v in value) and value == sorted(set(value))


def _span(value: Any) -> bool:
    return is_number(value) and (0 <= value < 1 or (isinstance(value, int) and value >= 1))


def _rates(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(is_number(v) and v > 0 for v in value)


def _warmup(value: Any) -> bool:
    return is_number(value) and (0 < value < 1 or (isinstance(value, int) and value >= 1))


_POSITIVE = number(lambda v: v > 0, "above 0")
_NOT_NEGATIVE = number(lambda v: v >= 0, "of 0 or more")
_DECAY = number(lambda v: 0 <= v < 1, "from 0 up to, but not including, 1")
_FRACTION = number(lambda v: 0 <= v <= 1, "from 0 to 1")
_SWITCH = one_of(True, False)

# The shape of the world and the batch: other keys are computed from these, so these come first.
FIRST: dict[str, tuple[Rule, str]] = {
    "cluster.nodes": whole(1),
    "cluster.ranks_per_node": whole(1),
    "train.lr_batch": one_of("total", "per_gpu"),
    "train.batch_per_rank": whole(1),
    "train.accumulate": whole(1),
}

REST: dict[str, tuple[Rule, str]] = {
    "seed": whole(0),
    "tune": optional((_rates, "a list of learning rates, such as [0.01,0.1]")),
    "resume": one_of("never", "auto"),
    "resume_with": one_of("unchanged", "changed"),
    "cluster.backend": one_of("auto", "nccl", "gloo"),
    "cluster.device": one_of("auto", "cpu", "cuda"),
    "cluster.max_restarts": whole(0),
    "cluster.timeout_s": _POSITIVE,
    "cluster.silence_s": _POSITIVE,
    "cluster.dry_run": _SWITCH,
    "cluster.wait": _SWITCH,
    "cluster.poll_s": _POSITIVE,
    "cluster.cpus_per_node": optional(whole(1)),
    "cluster.link_gbps": _POSITIVE,
    "cluster.dilation": (_dilation, "auto, or a number of 1 or more"),
    "turns.mode": one_of("auto", "turns", "runs"),
    "turns.rounds": whole(1),
    "turns.steps": whole(1),
    "train.epochs": whole(1),
    "train.max_steps": optional(whole(1)),
    "train.precision": one_of("fp32", "tf32", "bf16", "fp16"),
    "train.lr_schedule.name": one_of("constant", "linear", "cosine", "polynomial", "exponential", "step"),
    "train.lr_schedule.warmup": optional((_span, "a fraction of all steps from 0 up to 1, or a number of steps")),
    "train.lr_schedule.every": optional((_span, "a number of steps, or a fraction of all steps")),
    "train.lr_schedule.final": optional(_NOT_NEGATIVE),
    "train.lr_schedule.power": optional(_POSITIVE),
    "train.lr_schedule.gamma": optional(_POSITIVE),
    "train.lr_schedule.milestones": optional((_milestones, "a rising list of epochs, such as [30,60,90]")),
    "train.eval_every": whole(0),
    "train.timing_warmup": whole(0),
    "train.threads": optional(whole(1)),
    "train.max_grad_norm": optional(_POSITIVE),
    "comm.enabled": _SWITCH,
    "comm.topology": one_of("flat", "hierarchical"),
    "comm.overlap": _SWITCH,
    "comm.bucket_mb": _POSITIVE,
    "comm.hook": optional(one_of("bf16", "fp16", "powersgd")),
    "comm.powersgd_rank": whole(1),
    "profile.steps": whole(1),
    "checkpoint.every": whole(0),
    "checkpoint.keep": whole(1),
    "wandb.mode": one_of("auto", "online", "offline", "disabled"),
    "optimizer.lr": _NOT_NEGATIVE,
    "optimizer.momentum": _DECAY,
    "optimizer.beta": _DECAY,
    "optimizer.betas": (_betas, "two numbers from 0 up to, but not including, 1, such as [0.9,0.999]"),
    "optimizer.eps": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "optimizer.warmup_steps": (_warmup, "a number of steps, 1 or more, or a fraction of all steps between 0 and 1"),
    "optimizer.decoupled": _SWITCH,
    "optimizer.idle": one_of("decay", "hold"),
    "optimizer.intra": one_of("gradient", "u"),
    "optimizer.reduce": one_of("two_phase", "one_phase"),
    "optimizer.gradient_ratio": optional(whole(1)),
    "optimizer.model_ratio": whole(1),
    "optimizer.reset_every": whole(1),
    "optimizer.ratio": whole(1),
    "optimizer.block": whole(1),
    "optimizer.implementation": one_of("I", "II"),
    "optimizer.nesterov": _SWITCH,
    "optimizer.bias_correction": _SWITCH,
    "optimizer.min_coeff": _NOT_NEGATIVE,
    "optimizer.max_coeff": optional(_POSITIVE),
    "optimizer.phi": optional((_bounds, "two rising numbers of 0 or more, such as [0.0,10.0]")),
    "optimizer.coeff_beta": _DECAY,
    "optimizer.factor_min": number(lambda v: 0 < v <= 1, "above 0, at most 1"),
    "optimizer.factor_max": number(lambda v: v >= 1, "of 1 or more"),
    "optimizer.factor_threshold": _DECAY,
    "optimizer.beta3": _FRACTION,
    "optimizer.fraction": number(lambda v: 2**-15 <= v <= 1, "from 2^-15 to 1"),
    "optimizer.sync_every": whole(1),
    "optimizer.sync_phase": optional(whole(0)),
    "optimizer.dense_below": whole(0),
    "optimizer.unseen": one_of("step", "hold"),
    "optimizer.form": one_of("paper", "v1", "v2"),
    "optimizer.kappa": whole(1),
    "optimizer.local_doubling": (_warmup, "a number of steps, 1 or more, or a fraction of all steps between 0 and 1"),
    "optimizer.local_limit": whole(1),
    "optimizer.variant": one_of("paper", "deepspeed", "released"),
    "optimizer.wire": one_of("fp32", "bf16", "fp16"),
}


def check(get: Callable[[str], Any], has: Callable[[str], bool], rules: dict[str, tuple[Rule, str]]) -> None:
    """Raises UserError for the first key of `rules` that is present (`has`) and whose value (`get`) breaks its rule."""
    for key, (rule, words) in rules.items():
        if has(key) and not rule(value := get(key)):
            raise UserError(f"{key} must be {words}, not {shown(value)}")


def check_hook(config: dict[str, Any]) -> None:
    """Raises UserError where a resolved configuration asks for one of PyTorch's hooks with what does not go with it."""
    comm, optimizer, train = config["comm"], config["optimizer"], config["train"]
    if (hook := comm["hook"]) is None:
        return
    ask = f"comm.hook={hook}"
    if (name := labels.class_name(optimizer)) not in labels.DENSE:
        raise UserError(
            f"{ask} sends gradients, {name} sends messages of its own: take optimizer=sgdm or optimizer=adamw"
        )
    if (wire := optimizer.get("wire", "fp32")) != "fp32":
        raise UserError(f"{ask} says what is sent, and so does optimizer.wire={wire}: leave optimizer.wire=fp32")
    if not comm["enabled"]:
        raise UserError(f"{ask} does not go with comm.enabled=false: without communication there is no hook")
    if comm["topology"] != "flat":
        raise UserError(f"{ask} knows no nodes: set comm.topology=flat")
    if not comm["overlap"]:
        raise UserError(f"{ask} runs beside backward: set comm.overlap=true")
    if hook != "powersgd":
        return
    if train["timing_warmup"] < 2:
        raise UserError(f"{ask} compresses from the third step on, so the first two are not to be timed: "
                        "set train.timing_warmup=2 or more")  # fmt: skip
    if train["precision"] == "fp16":
        raise UserError(f"{ask} would keep an overflow in its error for ever: set train.precision=bf16 or fp32")
    if config["checkpoint"]["every"] or config["resume"] == "auto":
        raise UserError(f"{ask} keeps errors that no checkpoint holds: set checkpoint.every=0 and resume=never")


def check_name(key: str, name: Any) -> None:
    """Raises UserError unless `name` is safe as the name of a file."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", str(name)):
        raise UserError(f"{key} names a folder: letters, digits, '.', '_', '-', at most 100 of them, not {shown(name)}")


def check_writable(key: str, folder: Path) -> None:
    """Raises UserError unless files can be made in `folder`, or in the nearest parent that exists. Makes nothing."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(f"{key}={folder}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}={folder} cannot be written to: choose another folder with {key}=FOLDER")


def shown(value: Any) -> str:
    """`value` as the user would type it, within one line."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return f"'{text}'" if isinstance(value, str) else text
