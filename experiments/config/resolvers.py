"""What ${...} in conf/ may call.

${scaled:key}    the value of `key` in `scales.<scale.name>` of the workload's file
${lr_rule:0.1}   0.1 * batch / 256, the batch being that of one GPU or of all, as `train.lr_batch` says
${auto_scale:}   "paper" where the ranks have GPUs and there are data at `data.path`, else "quick"
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import shown
from launch.errors import UserError

_under_way: set[str] = set()
"""Keys that ${scaled:...} is evaluating."""


def _scaled(key: str, *, _root_: DictConfig) -> Any:
    name = str(_root_.scale.name)
    scales = _root_.get("scales") or {}
    if name not in scales:
        raise UserError(f"scale.name must be one of {', '.join(map(str, scales)) or 'quick, paper'}, not {shown(name)}")
    if key not in list(scales[name]):  # `in` would evaluate what stands there
        raise UserError(f"this workload sets no {shown(key)} for scale {name}: add it to scales.{name}")
    if key in _under_way:
        raise UserError(f"scales.{name}.{key} refers to itself")
    _under_way.add(key)
    try:
        return scales[name][key]
    finally:
        _under_way.discard(key)


def _lr_rule(base: float, *, _root_: DictConfig) -> float:
    train, cluster = _root_.train, _root_.cluster
    batch = train.batch_per_rank * train.accumulate
    if train.lr_batch == "total":
        batch *= cluster.nodes * cluster.ranks_per_node
    return float(base) * batch / 256


def _auto_scale(*, _root_: DictConfig) -> str:
    path = _root_.data.path
    return "paper" if path is not None and Path(path).exists() and _has_gpus(_root_.cluster) else "quick"


def _has_gpus(cluster: DictConfig) -> bool:
    """Whether the ranks will find GPUs: on this machine, or on SLURM's nodes, which this machine may be none of."""
    from launch.probe import visible_gpus

    if cluster.get("name") != "slurm":
        device, backend = cluster.get("device", "auto"), cluster.get("backend")
        return device != "cpu" and (device == "cuda" or backend != "gloo") and bool(visible_gpus())
    from launch.slurm import job

    if cluster.get("backend") != "auto":
        return bool(cluster.get("backend") == "nccl")
    return cluster.get("gpus_per_node") is not None or bool(job.gpus(cluster.get("partition")))


def register() -> None:
    """Makes them known to OmegaConf."""
    resolvers: dict[str, Callable[..., Any]] = {"scaled": _scaled, "lr_rule": _lr_rule, "auto_scale": _auto_scale}
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
