"""Rules that concern several keys at once, or the machine: what a schema of single keys cannot say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiments.config.kinds import shown
from experiments.config.schema_optimizer import OPTIMIZERS
from experiments.records import labels
from launch.errors import UserError, refused
from launch.words import there_are


def check_hook(config: dict[str, Any]) -> None:
    """Raises UserError where a resolved configuration asks for a hook with what does not go with it."""
    comm, optimizer, train = config["comm"], config["optimizer"], config["train"]
    kept = comm["error_feedback"]
    if kept and comm["hook"] not in ("int4", "fp8"):
        raise UserError(
            "comm.error_feedback=true is of comm.hook=int4 and fp8: set one of them, or comm.error_feedback=false"
        )
    if (hook := comm["hook"]) is None:
        return
    ask = f"comm.hook={hook}"
    if (name := labels.class_name(optimizer)) not in labels.DENSE:
        raise UserError(f"{ask} sends gradients, {name} sends its own messages: take optimizer=sgdm or optimizer=adamw")
    if (wire := optimizer.get("wire", "fp32")) != "fp32":
        raise UserError(f"{ask} says what is sent, and so does optimizer.wire={wire}: leave optimizer.wire=fp32")
    if not comm["enabled"]:
        raise UserError(f"{ask} does not go with comm.enabled=false: without communication there is no hook")
    if comm["topology"] != "flat":
        raise UserError(f"{ask} knows no nodes: set comm.topology=flat")
    if not comm["overlap"]:
        raise UserError(f"{ask} runs during backward: set comm.overlap=true")
    if (hook == "powersgd" or kept) and (config["checkpoint"]["every"] or config["resume"] == "auto"):
        raise UserError(f"{ask} keeps errors that no checkpoint holds: set checkpoint.every=0 and resume=never")
    if hook != "powersgd":
        return
    if train["timing_warmup"] < 2:
        raise UserError(f"{ask} compresses from the third step on, so the first two are not to be timed: "
                        "set train.timing_warmup=2 or more")  # fmt: skip
    if train["precision"] == "fp16":
        raise UserError(f"{ask} would keep an overflow in its error for ever: set train.precision=bf16 or fp32")


def check_device(cluster: dict[str, Any]) -> None:
    """Raises UserError where a cluster's device does not go with its back end."""
    if cluster.get("device") == "cpu" and cluster["backend"] == "nccl":
        raise UserError(
            "cluster.backend=nccl sends from GPUs, and cluster.device=cpu takes none: leave one of them auto"
        )


def check_precision(config: dict[str, Any]) -> None:
    """Raises UserError where a resolved configuration asks for a precision with what does not go with it."""
    train = config["train"]
    if config["comm"]["topology"] == "hsdp" and train["precision"] == "fp16":
        raise UserError("comm.topology=hsdp has no GradScaler: set train.precision=bf16 or fp32")
    if train["bf16_matmul"] != "native" and train["precision"] != "bf16":
        raise UserError(
            f"train.bf16_matmul={train['bf16_matmul']} goes with train.precision=bf16, not {train['precision']}"
        )


def check_virtual(config: dict[str, Any]) -> None:
    """Raises UserError where a resolved configuration asks virtual workers for what they cannot do."""
    if not labels.is_virtual(config):
        return
    comm, ask = config["comm"], "cluster=virtual"
    if config["train"]["precision"] == "fp16":
        raise UserError(f"{ask} has no loss scaling: set train.precision=bf16 or fp32")
    if comm["hook"] is not None:
        raise UserError(f"{ask} takes this project's methods, not comm.hook={comm['hook']}: set comm.hook=null")
    if comm["topology"] == "hsdp":
        raise UserError(f"{ask} shards no model: set comm.topology=flat or hierarchical")
    if not comm["enabled"]:
        raise UserError(f"{ask} is for accuracy, of which comm.enabled=false has none: set comm.enabled=true")
    if config["checkpoint"]["every"] or config["resume"] == "auto":
        raise UserError(f"{ask} keeps no checkpoints: set checkpoint.every=0 and resume=never")
    if config.get("profile"):
        raise UserError(f"{ask} has no times to show: leave +profile=step out")
    if labels.workload(config) == "replay":
        raise UserError(f"{ask} trains, and the replayed model waits instead: take cluster=local or cluster=emulated")


def check_writable(key: str, folder: Path) -> None:
    """Raises UserError unless files can be made in `folder`, or in the nearest parent that exists. Makes nothing."""
    there = folder
    with refused(f"{key}={shown(str(folder))} cannot be a folder", OSError):  # a name that is too long, a loop of links
        while not there.exists() and there != there.parent:
            there = there.parent
        is_folder = there.is_dir()
    if not is_folder:
        raise UserError(f"{key}={shown(str(folder))}: {shown(str(there))} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}={shown(str(folder))} cannot be written to: choose another folder with {key}=FOLDER")


def check_scales(scales: dict[str, dict[str, Any]]) -> None:
    """All scales hold the same keys, so that a misspelt one does not pass."""
    every = {key for scale in scales.values() for key in scale}
    for name, scale in scales.items():
        if absent := sorted(every - set(scale)):
            raise UserError(f"scales.{name} has no '{shown(absent[0])[1:-1]}', which another scale has: give it to all")


def check_data(config: dict[str, Any]) -> None:
    """Raises UserError for data that the workload of a resolved configuration does not read."""
    path = config["data"]["path"]
    if path is not None and "data_path" not in config["workload"]:
        raise UserError(f"data.path={shown(path)}: {labels.workload(config)} reads no files, so leave it out")


def check_parity(config: dict[str, Any]) -> None:
    """Raises UserError for a baseline that names no optimizer: there would be no verdict, without a word."""
    name, own = config["parity"]["baseline"], labels.class_name(config["optimizer"])
    classes = [*(target.rpartition(".")[2] for target in OPTIMIZERS), own]
    if name is None or name.lower() in map(str.lower, classes):
        return
    same = [c for c in classes if c.lower() == name.replace("_", "").lower()]
    raise UserError(
        f"parity.baseline={shown(name)} names no class of optimizer"
        + (f": {same[0]}" if same else there_are(name, classes))
    )
