"""Records made up for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.records import record
from experiments.records.record import ResultRecord

METHODS: dict[str, dict[str, Any]] = {
    "SGDM fp32": {"_target_": "birder.SGDM", "wire": "fp32", "lr": 0.1},
    "SGDM bf16": {"_target_": "birder.SGDM", "wire": "bf16", "lr": 0.1},
    "1-bit Adam": {"_target_": "birder.OneBitAdam", "wire": "fp32", "lr": 0.001},
    "Birder": {"_target_": "birder.Birder", "lr": 0.001},
    "no communication": {"_target_": "birder.SGDM", "wire": "fp32", "lr": 0.1},
}


def blank(**fields: Any) -> ResultRecord:
    """A record of a completed run of which only `fields` are of interest."""
    known: dict[str, Any] = {
        "group": None,
        "time": "2026-01-01T00:00:00Z",
        "status": "completed",
        "reason": None,
        "command": "run.py",
        "overrides": [],
        "config": {},
        "git": {"sha": None, "dirty": None},
        "exp": "x",
        "workload": "replay",
        "optimizer": "x",
        "method": "x",
        "wire": "fp32",
        "cluster": "local",
        "scale": "quick",
        "nodes": 4,
        "ranks_per_node": 1,
        "seed": 0,
        "data": {"name": "replay", "synthetic": True},
        "hardware": {"device": "cpu", "cpu": "some CPU", "cores": 2, "memory_gb": 8, "gpus": []},
        "software": {},
        "link": dict(record.LINK),
    }
    return ResultRecord(**{**known, **fields})


def run(method: str, ms: float | None = None, **changes: Any) -> ResultRecord:
    """A record of `method` on 4 loopback nodes, group g; step time `ms` when given."""
    name = changes.pop("id", method.replace(" ", "_").lower())
    config: dict[str, Any] = {
        "train": {"batch_per_rank": 4, "accumulate": 1, "precision": "fp32", "epochs": 1, "max_steps": 12},
        "optimizer": dict(METHODS[method]),
        "comm": {"overlap": True},
        "seed": changes.get("seed", 0),
    }
    for key, value in changes.pop("config", {}).items():
        section, _, leaf = key.partition(".")
        config[section][leaf] = value
    timing = {} if ms is None else {"steps": 9, "median_ms": ms, "p10_ms": ms * 0.99, "p90_ms": ms * 1.01}
    payload = {"SGDM fp32": 153.6e6, "SGDM bf16": 76.8e6, "1-bit Adam": 4.8e6, "Birder": 4.8e6}.get(method)
    known: dict[str, Any] = {
        "group": "g",
        "config": config,
        "exp": "resnet50",
        "workload": "resnet50",
        "optimizer": config["optimizer"]["_target_"].rpartition(".")[2],
        "method": method,
        "wire": {"SGDM fp32": "fp32", "SGDM bf16": "bf16", "no communication": "none"}.get(method, "1bit"),
        "data": {"name": "synthetic 64x64 images", "synthetic": True},
        "timing": timing,
        "bytes_per_step": {**record.BYTES, "payload_intra": 0, "payload_inter": payload},
    }
    return blank(**{"id": name, **known, **changes})


def score(method: str, value: float | None, seed: int, lr: float, **changes: Any) -> ResultRecord:
    """A record with a test accuracy on real data."""
    name = f"{method.replace(' ', '_').lower()}-{lr}-{seed}"
    metric = {"name": "top1", "value": value, "target": 92.0, "higher_is_better": True, "all": {"top1": value}}
    extra = {
        "exp": "digits",
        "group": None,
        "data": {"name": "digits", "synthetic": False},
        "metric": metric,
        "id": name,
    }
    return run(method, seed=seed, config={"optimizer.lr": lr}, **{**extra, **changes})


def save(results: Path, *records: ResultRecord) -> Path:
    results.mkdir(exist_ok=True)
    for r in records:
        record.write(r, results)
    return results


def full_group() -> list[ResultRecord]:
    times = {"SGDM fp32": 3000.0, "SGDM bf16": 1700.0, "1-bit Adam": 1000.0, "Birder": 800.0, "no communication": 600.0}
    return [run(method, ms) for method, ms in times.items()]


def cells(markdown: str, label: str) -> list[str]:
    """The cells of the first table row that begins with `label`."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]
