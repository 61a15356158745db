"""Whether a configuration resumes the run of a directory, and which keys have changed since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.config.validate import shown
from experiments.records import old_keys, record
from experiments.records.old_keys import CHANGED
from launch.errors import UserError
from launch.spec import RunSpec

BOOKKEEPING = (
    "run_name",
    "output_dir",
    "results_dir",
    "resume",
    "resume_allow_config_change",
    "resume_resize",
    CHANGED,
    "tracker",
    "wandb",
    "checkpoint",
    "hydra",
    "compare",
    "method",
)
"""Keys that say how a run is kept and reported, not what is run."""
SAME_NUMBERS = ("train.bf16_matmul",)
"""Keys that change how long a step takes and the order of sums, as another CPU does: they make no other method of it."""
BEFORE = {"train.bf16_matmul": "native", "comm.error_feedback": False}
"""What runs did that are older than the keys."""

# What changes no parameter at any step. Everything else does, or may, and so do _OF_THE_CLUSTER.
FREE = (
    *BOOKKEEPING,
    "cluster",
    "tune",
    "scale",
    "scales",
    "timeline",
    "timing",
    "parity",
    "profile",
    "evaluate",
    "train.eval_every",
    "train.timing_warmup",
    "data.weights",  # a run that resumes has its own
)
_OF_THE_WORLD = ("cluster.nodes", "cluster.ranks_per_node")
_FILES = "data.files"
"""Compared only where both know it (`data` of construct.py): runs that are older do not."""
_OF_THE_CLUSTER = (*_OF_THE_WORLD, "cluster.backend")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys. Lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def within(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or lies in one."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def go_on(run_dir: Path, resolved: dict[str, Any]) -> str:
    """The id of the run in `run_dir`. Notes in `resolved` what the run has been changed in since it began.

    Raises UserError when its checkpoints cannot fit this configuration; also when another one would give other parameters,
    unless there is a checkpoint and it says resume_allow_config_change=true. With resume_resize=average the numbers of nodes
    and ranks may differ.
    """
    resized = resolved["resume_resize"] == "average"
    try:
        earlier = RunSpec.load(run_dir / "spec.yaml")
        then_config = old_keys.config(earlier.config)
        then, before = _identity(then_config), list(then_config.get(CHANGED) or [])
    except Exception as error:
        raise UserError(f"{run_dir}/spec.yaml is not readable: choose another run_name") from error
    for key, now in _identity(resolved).items():
        is_size = key in ("world size", "nodes")
        if then[key] != now and not (resized and is_size):
            how = "; resume_resize=average resumes with another number of ranks" if is_size else ""
            raise UserError(f"cannot resume {run_dir}: it ran with {key} {then[key]}, this is {now}{how}")
    saved = any(run_dir.glob("checkpoints/step-*"))
    if not saved and not record.ended_well(replace(earlier, config=resolved)):
        return earlier.id  # there is nothing of it that this would resume, or write over
    changed = differences(then_config, resolved)
    unasked = [change for change in changed if not (resized and change[0] in _OF_THE_WORLD)]
    if unasked and not (saved and resolved["resume_allow_config_change"]):
        key, old, new = min(unasked, key=lambda change: change[0] == _FILES)
        was = f"{key} was {_short(old)}, now it is {_short(new)}"
        if key == _FILES:
            was = "the files at data.path are others than it began with"
        more = f" (and {len(unasked) - 1} more)" if len(unasked) > 1 else ""
        # A run that has ended without a checkpoint cannot continue, however much is allowed.
        otherwise = "continue anyway with resume_allow_config_change=true" if saved else "choose another run_name"
        raise UserError(f"cannot resume {str(run_dir)[-80:]}: {was}{more}: set it as it was, or {otherwise}")
    if before or changed:
        resolved |= {CHANGED: [*before, *changed], "resume_allow_config_change": True}
    return earlier.id


def changed_midway(config: dict[str, Any]) -> bool:
    """Whether the run of a record was resumed with keys that it had not begun with, other than the number of ranks."""
    return any(key not in _OF_THE_WORLD for key, *_ in config.get(CHANGED) or ())


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[list[Any]]:
    """[key, then, now] for all keys in which two configurations differ that change the trajectory; None: not there."""
    old, new = BEFORE | flatten(then), BEFORE | flatten(now)
    if None in (old.get(_FILES), new.get(_FILES)):
        old[_FILES] = new[_FILES] = None
    keys = sorted(k for k in {*old, *new} if k in _OF_THE_CLUSTER or not within(k, FREE))
    return [[k, old.get(k), new.get(k)] for k in keys if old.get(k) != new.get(k)]


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    cluster = config["cluster"]
    return {
        "workload": config["workload"]["_target_"],
        "optimizer": config["optimizer"]["_target_"],
        "world size": int(cluster["nodes"]) * int(cluster["ranks_per_node"]),
        "nodes": int(cluster["nodes"]),
    }
