"""What a method and its wire format are called in tables. Reads the configuration only, never torch."""

from __future__ import annotations

import re
from typing import Any

# What a configuration says that has no `method` section. Classes whose `wire` option speaks of their dense phase only:
# most of what they send is one bit per parameter.
ONE_BIT = {"Birder": "Birder", "OneBitAdam": "1-bit Adam"}
DENSE = {"SGDM", "BertAdam", "AdamW", "LAMB", "Muon"}
VIRTUAL = "launch.virtual.VirtualLauncher"
UNCOMPRESSED_WIRES = {"none", "fp32", "bf16", "fp16"}
NO_COMMUNICATION = "no communication"
OURS = " (this project's)"
"""Behind the label of a variant that is in no paper."""


def class_name(section: dict[str, Any]) -> str:
    """Last part of the section's `_target_`: "birder.Birder" -> "Birder"."""
    return str(section["_target_"]).rpartition(".")[2]


def wire(config: dict[str, Any]) -> str:
    """What collectives carry: none | fp32 | bf16 | fp16 | lowrank | `method.sends` | 1bit | the optimizer's `wire` option."""
    if not config.get("comm", {}).get("enabled", True):
        return "none"
    if hook := config.get("comm", {}).get("hook"):
        return "lowrank" if hook == "powersgd" else str(hook)
    optimizer = config["optimizer"]
    name = class_name(optimizer)
    if optimizer.get("bits") == "none":  # of Birder: u itself is sent
        return "fp32"
    if sends := (config.get("method") or {}).get("sends"):
        return str(sends)
    if name in ONE_BIT:
        return "1bit"
    return str(optimizer.get("wire", "fp32" if name in DENSE else "1bit"))


def method(config: dict[str, Any]) -> str:
    """The row label of a run: "SGDM bf16", "1-bit Adam", "Birder hierarchical", "no communication", ..."""
    if not config.get("comm", {}).get("enabled", True):
        return NO_COMMUNICATION
    comm = config.get("comm", {})
    if hook := comm.get("hook"):
        kept = " with error feedback" * bool(comm.get("error_feedback"))
        named = {
            "powersgd": f"PowerSGD rank {comm['powersgd_rank']}",
            "int4": f"4-bit all-reduce{kept}",
            "fp8": f"fp8 all-reduce{kept}",
        }
        return named.get(hook, f"PyTorch {hook} hook")
    name = class_name(config["optimizer"])
    label = str((config.get("method") or {}).get("label") or ONE_BIT.get(name, name))
    sharded = " hsdp" if comm.get("topology") == "hsdp" else ""
    if name in DENSE:
        return f"{label} {wire(config)}{sharded}"
    optimizer = config["optimizer"]
    ours = ["one-phase"] * (optimizer.get("reduce") == "one_phase")
    if name == "Birder":
        bits = {"weyl": ["weyl bits"], "sigma_delta": ["sigma-delta bits"], "none": ["without bits"]}.get(
            str(optimizer.get("bits")), []
        )
        ours += bits + ["two betas"] * (optimizer.get("beta2") is not None)
    if name == "SigmaDeltaAdam":
        variance = str(optimizer.get("variance", "of_mean"))
        scale = [] if optimizer.get("full_scale") is None else [f"full scale {optimizer['full_scale']:g}"]
        label += ", ".join(["", *ours, *[variance] * (variance != "of_mean"), *scale])
    elif ours:
        label += f" {', '.join(ours)}{OURS}"
    if optimizer.get("message") == "int4":  # of DiLoCo
        label += " 4-bit"
    if (compressor := optimizer.get("compressor", "blocks")) != "blocks":
        label += f" {compressor.replace('_', '-')}"
    if is_compressed(wire(config)) and config.get("comm", {}).get("topology") == "hierarchical":
        label += " hierarchical"
    return label + sharded


def slug(config: dict[str, Any]) -> str:
    """`method` as a part of a file's name: "sgdm-bf16", "birder-hierarchical"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", method(config).lower())).strip("-")


def is_compressed(wire: str) -> bool:
    """Whether fewer bits are sent than a 16-bit all-reduce would."""
    return wire not in UNCOMPRESSED_WIRES


def workload(config: dict[str, Any]) -> str:
    """Name of the workload: the module of its class ("experiments.workloads.ptb.PennTreebank" -> "ptb")."""
    return str(config["workload"]["_target_"]).split(".")[-2]


def is_virtual(config: dict[str, Any]) -> bool:
    """Whether all ranks of a run are one process (launch/virtual.py), which says nothing about time."""
    return str(config.get("cluster", {}).get("_target_", "")) == VIRTUAL


def cluster(config: dict[str, Any]) -> str:
    """Name of the cluster: its `name`, or else the room of its launcher ("launch.ssh.launcher.SshLauncher" -> "ssh")."""
    section = config["cluster"]
    if section.get("name"):
        return str(section["name"])
    parts = [part for part in str(section.get("_target_", "unnamed")).split(".") if part != "launcher"]
    return parts[-2] if len(parts) > 1 else parts[0]
